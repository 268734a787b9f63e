"""While a fit runs, modules are the user's own: they are pickled, copied, scripted, exported and compiled as at any other time."""

import copy
import io
import pickle
from functools import partial

import pytest
import pytorch_lightning as pl
import torch
from runs import Net, blocks, classes, equal_states, fit, loader
from torch import nn

from lightning_ipu.plan import PlanError

PLANS = [{}, {"R": 2, "recompute": True}]


def dropping() -> nn.Sequential:
    return blocks(norm=True, dropout=0.4)


def scripted(module: nn.Module) -> None:
    assert isinstance(torch.jit.script(module), torch.jit.ScriptModule)


def copied(module: nn.Module) -> None:
    """A copy is a network of its own, and works."""
    other = copy.deepcopy(module)
    network = getattr(other, "network", other)
    network(torch.ones(4, 8)).sum().backward()


def pickled(module: nn.Module) -> None:
    file = io.BytesIO()
    torch.save(module, file)
    assert b"lightning_ipu" not in file.getvalue()
    file.seek(0)
    pickle.dumps(torch.load(file, weights_only=False))


EXPORTS = {
    "pickled": lambda module: pickled(module.network),
    "the LightningModule pickled": pickled,
    "copied": lambda module: copied(module.network),
    "the LightningModule copied": copied,
    "scripted": lambda module: scripted(module.network),
    "the LightningModule traced": lambda module: module.to_torchscript(method="trace", example_inputs=torch.ones(2, 8)),
    "exported": lambda module: torch.export.export(module.network, (torch.ones(2, 8),)),
}


@pytest.mark.parametrize("name", EXPORTS)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_network_with_dropout_can_be_exported_from_every_hook(name, plan):
    done = []

    def export(hook):
        def call(self, *args):
            module = next(value for value in args if isinstance(value, pl.LightningModule))
            EXPORTS[name](module)
            done.append(hook)

        return call

    hooks = ["on_train_start", "on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end", "on_train_epoch_end", "on_fit_end"]
    module = Net(dropping)
    fit(module, loader(classes(8), 2), callbacks=[type("Exports", (pl.Callback,), {hook: export(hook) for hook in hooks})()], **plan)
    assert set(done) == set(hooks)
    untouched = Net(dropping)
    fit(untouched, loader(classes(8), 2), **plan)
    assert equal_states(module, untouched)


def test_a_copy_made_in_a_step_is_a_network_of_its_own():
    class Copies(Net):
        def training_step(self, batch, batch_idx):
            copied(self.network)
            pickled(self.network)
            return super().training_step(batch, batch_idx)

    fit(Copies(dropping), loader(classes(8), 2))


compiled = partial(torch.compile, backend="aot_eager")


class Masks(nn.Module):
    """Dropouts in one graph; notes nothing, so that no graph breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(8, 8), nn.Linear(8, 3), nn.Dropout(0.4)

    def forward(self, x):
        return self.second(self.drop(nn.functional.dropout(self.first(x).relu(), 0.2, self.training)))


def whole_graph() -> nn.Module:
    """A compiled module between dropouts of the ordinary kind."""
    return nn.Sequential(nn.Dropout(0.1), compiled(Masks(), fullgraph=True), nn.Dropout(0.1))


def in_place() -> nn.Module:
    network = nn.Sequential(nn.Dropout(0.1), Masks())
    network[1].compile(backend="aot_eager", fullgraph=True)
    return network


@pytest.mark.parametrize("make", [whole_graph, in_place])
def test_a_compiled_network_draws_by_its_name_in_whatever_host_steps_recomputed_and_resumed(make, tmp_path):
    reference = Net(make)
    fit(reference, loader(classes(24), 2), A=2)
    assert len(set(reference.losses)) == 12
    for plan in ({"D": 4}, {"recompute": ["network.1"]}):
        module = Net(make)
        fit(module, loader(classes(24), 2), A=2, **plan)
        assert module.losses == reference.losses and equal_states(module, reference)
    path = tmp_path / "third.ckpt"

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 3:
                trainer.save_checkpoint(path)

    fit(Net(make), loader(classes(24), 2), A=2, callbacks=[Save()])
    resumed = Net(make)
    fit(resumed, loader(classes(24), 2), A=2, ckpt_path=path)
    assert equal_states(resumed, reference)


def test_a_compiled_lightning_module_trains_as_its_steps_are_seeded():
    losses = []
    for plan in ({}, {"D": 3}):
        module = Net(lambda: blocks(dropout=0.4))
        fit(torch.compile(module, backend="eager"), loader(classes(12), 2), A=2, **plan)
        losses.append(module.losses)
    assert losses[0] == losses[1] and len(losses[0]) == 6


def test_recomputation_of_a_compiled_lightning_module_is_refused_in_one_line():
    with pytest.raises(PlanError, match="recompute=True cannot reach into Net, which is compiled as a whole: compile its submodules"):
        fit(torch.compile(Net(), backend="eager"), loader(classes(12), 2), recompute=True)
    with pytest.raises(PlanError, match="matches 'network.1._orig_mod' inside a compiled module"):
        fit(Net(whole_graph), loader(classes(12), 2), recompute=[r"network\.1\._orig_mod"])
