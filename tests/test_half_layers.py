"""Every layer of torch.nn that has weights trains with 16-bit ones: forward, backward, update, evaluation."""

import copy
import inspect
import io
from functools import partial

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.precision import MixedPrecision
from runs import Net, blocks, classes, fit, loader, make_trainer
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm
from torch.utils.data import DataLoader, TensorDataset

from lightning_ipu import PlanError
from lightning_ipu.precision.plugin import SixteenBit

ROWS, SEQUENCE = partial(torch.randn, 2, 4), partial(torch.randn, 3, 2, 4)
WORDS = partial(torch.tensor, [[1, 2], [0, 3]])


def image(dimensions: int) -> torch.Tensor:
    return torch.randn(2, 4, *[6] * dimensions)


def first(layer, *inputs, **options):
    output = layer(*inputs, **options)
    return output[0] if isinstance(output, tuple) else output


def with_loss(layer, x):
    return layer(x, torch.tensor([1, 5])).loss


def weighted(layer, words, weights):
    return layer(words, per_sample_weights=weights)


Encoder, Decoder = nn.TransformerEncoderLayer, nn.TransformerDecoderLayer
LAYERS = {  # name: how it is made, inputs, how it is called
    **{f"Conv{d}d": (partial(getattr(nn, f"Conv{d}d"), 4, 4, 3), [partial(image, d)]) for d in (1, 2, 3)},
    **{f"ConvTranspose{d}d": (partial(getattr(nn, f"ConvTranspose{d}d"), 4, 4, 3), [partial(image, d)]) for d in (1, 2, 3)},
    **{f"BatchNorm{d}d": (partial(getattr(nn, f"BatchNorm{d}d"), 4), [partial(image, d)]) for d in (1, 2, 3)},
    **{f"InstanceNorm{d}d": (partial(getattr(nn, f"InstanceNorm{d}d"), 4, affine=True), [partial(image, d)]) for d in (1, 2, 3)},
    "GroupNorm": (partial(nn.GroupNorm, 2, 4), [partial(image, 2)]),
    "LayerNorm": (partial(nn.LayerNorm, 4), [ROWS]),
    "RMSNorm": (partial(nn.RMSNorm, 4), [ROWS]),
    "Linear": (partial(nn.Linear, 4, 3), [ROWS]),
    "Bilinear": (partial(nn.Bilinear, 4, 4, 3), [ROWS, ROWS]),
    "PReLU": (partial(nn.PReLU, 4), [ROWS]),
    "Embedding": (partial(nn.Embedding, 5, 4), [WORDS]),
    **{f"EmbeddingBag {mode}": (partial(nn.EmbeddingBag, 5, 4, mode=mode), [WORDS]) for mode in ("sum", "mean", "max")},
    "EmbeddingBag weighted": (partial(nn.EmbeddingBag, 5, 4, mode="sum"), [WORDS, partial(torch.ones, 2, 2)], weighted),
    **{name: (partial(getattr(nn, name), 4, 5, 2, bidirectional=True), [SEQUENCE], first) for name in ("RNN", "LSTM", "GRU")},
    "LSTM projected": (partial(nn.LSTM, 4, 5, proj_size=3), [SEQUENCE], first),
    "GRU with a state": (partial(nn.GRU, 4, 5), [SEQUENCE, partial(torch.zeros, 1, 2, 5)], first),
    **{name: (partial(getattr(nn, name), 4, 5), [ROWS], first) for name in ("RNNCell", "LSTMCell", "GRUCell")},
    "MultiheadAttention": (partial(nn.MultiheadAttention, 4, 2), [SEQUENCE] * 3, first),
    "MultiheadAttention of other keys": (
        partial(nn.MultiheadAttention, 4, 2, kdim=4, vdim=4, add_bias_kv=True),
        [SEQUENCE] * 3,
        partial(first, need_weights=False),
    ),
    "TransformerEncoderLayer": (partial(Encoder, 4, 2, 8), [SEQUENCE]),
    "TransformerDecoderLayer": (partial(Decoder, 4, 2, 8), [SEQUENCE, SEQUENCE]),
    "TransformerEncoder": (lambda: nn.TransformerEncoder(Encoder(4, 2, 8), 2, enable_nested_tensor=False), [SEQUENCE]),
    "TransformerDecoder": (lambda: nn.TransformerDecoder(Decoder(4, 2, 8), 2), [SEQUENCE, SEQUENCE]),
    "Transformer": (partial(nn.Transformer, 4, 2, 1, 1, 8, batch_first=True), [SEQUENCE, SEQUENCE]),
    "AdaptiveLogSoftmaxWithLoss": (partial(nn.AdaptiveLogSoftmaxWithLoss, 4, 6, [2, 4]), [ROWS], with_loss),
    **{
        f"{make.__module__.rpartition('.')[2]}.{make.__name__} of a {of}": (lambda make=make, layer=layer: make(layer()), [x])
        for make in (spectral_norm, weight_norm, parametrizations.spectral_norm, parametrizations.weight_norm, parametrizations.orthogonal)
        for of, layer, x in (("Linear", partial(nn.Linear, 4, 4), ROWS), ("Conv2d", partial(nn.Conv2d, 4, 4, 3), partial(image, 2)))
    },
}

if hasattr(nn, "LinearCrossEntropyLoss"):  # torch 2.14
    LAYERS["LinearCrossEntropyLoss"] = partial(nn.LinearCrossEntropyLoss, 4, 3), [ROWS, partial(torch.tensor, [0, 2])]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
@pytest.mark.parametrize("name", LAYERS)
def test_it_trains_with_16_bit_weights_on_inputs_of_either_type(name, precision):
    make, inputs, *call = LAYERS[name]
    plugin = SixteenBit(precision, device="cpu")
    for dtype in (torch.float32, plugin.dtype):
        torch.manual_seed(0)
        layer = plugin.convert_module(nn.Sequential(make()))
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
        narrow = plugin.narrow_update(optimizer, layer, seed=0)
        values = [value.to(dtype) if value.is_floating_point() else value for value in (make() for make in inputs)]
        before = [parameter.detach().clone() for parameter in layer.parameters()]

        def loss(module, values=values):
            with plugin.train_step_context():
                output = call[0](module[0], *values) if call else module[0](*values)
                return (output.float() * torch.linspace(-1, 1, max(output.numel(), 1)).reshape(output.shape)).sum()

        loss(layer).backward()
        narrow.step(0)
        assert {parameter.dtype for parameter in layer.parameters()} == {plugin.dtype}
        assert {parameter.grad.dtype for parameter in layer.parameters() if parameter.grad is not None} == {torch.float32}
        assert any(not torch.equal(a, b) for a, b in zip(before, layer.parameters(), strict=True))
        with torch.no_grad():
            assert loss(layer.eval()).isfinite()
        if "norm of" not in name and "orthogonal" not in name:  # torch itself neither copies nor pickles those
            torch.save(copy.deepcopy(layer), file := io.BytesIO())
            file.seek(0)
            with torch.no_grad():
                assert loss(torch.load(file, weights_only=False)).isfinite()


def test_no_layer_of_torch_nn_with_weights_is_left_out():
    def has_weights(kind: type) -> bool:
        own = [base for base in kind.__mro__ if issubclass(base, nn.Module) and base is not nn.Module and "__init__" in vars(base)]
        return any("Parameter(" in (text := inspect.getsource(base.__init__)) or "Linear(" in text for base in own)

    kinds = {name for name, kind in vars(nn).items() if inspect.isclass(kind) and issubclass(kind, nn.Module) and has_weights(kind)}
    lazy = {name for name in kinds if name.startswith("Lazy")}  # what they become is above
    bases = {"SyncBatchNorm", "RNNBase", "RNNCellBase", "Parameter", "Container"}
    assert kinds - lazy - bases <= {name.split()[0] for name in LAYERS}


def test_a_layer_without_a_shape_is_refused_by_name():
    with pytest.raises(PlanError, match=r"'network.0.weight' has no shape yet, and so cannot be in 16 bits"):
        fit(Net(lambda: nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 3))), loader(classes(8), 2), precision="bf16-true")


def test_a_network_with_16_bit_weights_can_be_scripted_and_compiled_while_it_trains():
    class Exports(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            torch.jit.script(pl_module.network)

    fit(Net(lambda: blocks(norm=True, dropout=0.2)), loader(classes(8), 2), precision="bf16-true", callbacks=[Exports()])


def test_gradients_of_a_parameter_that_is_unfrozen_later_are_summed_in_32_bits():
    class Unfreezing(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2), requires_grad=False)

        def on_train_epoch_start(self):
            self.b.requires_grad_(self.current_epoch == 1)

        def training_step(self, batch, batch_idx):
            return (self.a + self.b).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1.0)

    module = Unfreezing()
    ones = DataLoader(TensorDataset(torch.ones(512)))
    fit(module, ones, A=512, max_epochs=2, precision="bf16-true", stochastic_rounding=False)
    assert (module.a.tolist(), module.b.tolist()) == ([-2.0] * 2, [-1.0] * 2)  # in bfloat16 the sum of 1/512 would stick at 1/2


def test_loss_scaling_starts_from_the_users_scaler_or_refuses_it():
    def plugin(scaler, **options):
        return make_trainer(plugins=[MixedPrecision("16-mixed", "cpu", scaler)], **options).strategy.precision_plugin

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=2)
    scaling, factors = plugin(scaler).scaling, []
    for finite in (True, True, False, True, True):
        scaling.update(finite)
        factors.append(scaling.factor)
    assert factors == [1024, 4096, 1024, 1024, 4096]
    assert plugin(torch.amp.GradScaler("cpu", enabled=False)).scaling is None
    assert plugin(None).scaling.factor == 65536 and plugin(None, loss_scaling=8.0).scaling.factor == 8
    with pytest.raises(ValueError, match=r"loss_scaling=8.0 contradicts the settings of the plugin's scaler; give one of the two"):
        plugin(scaler, loss_scaling=8.0)
    kind = type("OtherScaler", (torch.amp.GradScaler,), {})
    with pytest.raises(ValueError, match="scaler=OtherScaler has methods of its own, which would not be called"):
        plugin(kind("cpu"))
