"""16-bit weights and loss scaling under IPUStrategy: the plan's numbers, skipped updates, checkpoints, refusals."""

import pytest
import pytorch_lightning as pl
import torch
from runs import Net, blocks, classes, equal_states, loader, sgd

from lightning_ipu import IPUStrategy, PlanError


def fit(
    precision: str = "bf16-true", *, net: Net | None = None, ckpt_path=None, samples: int = 48, trainer=None, **strategy
) -> tuple[pl.Trainer, Net]:
    net = net or Net(lambda: blocks(norm=True, dropout=0.2), optimizer=lambda p: torch.optim.AdamW(p, lr=0.01))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = {"accelerator": "cpu", "devices": 1, "max_epochs": 2, **quiet, **(trainer or {})}
    made = pl.Trainer(strategy=IPUStrategy(**strategy), precision=precision, **options)
    made.fit(net, loader(classes(samples), 4), ckpt_path=ckpt_path)
    return made, net


class Overflows(Net):
    """A network whose loss is infinite in chosen micro-batches."""

    def __init__(self, *infinite: int) -> None:
        super().__init__(
            lambda: blocks(norm=True),
            optimizer=sgd,
            schedule=lambda _, o: {"scheduler": torch.optim.lr_scheduler.ExponentialLR(o, 0.5), "interval": "step"},
        )
        self.infinite, self.number = infinite, 0

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.number += 1
        return loss * float("inf") if self.number - 1 in self.infinite else loss


def test_16_bit_weights_give_the_same_numbers_for_every_placement_of_the_same_plan():
    plan = {"replication_factor": 2, "gradient_accumulation_factor": 2}
    _, one = fit(**plan)
    for other in ({"device_iterations": 3}, {"recompute": True}, {"num_stages": 2}):
        assert equal_states(fit(**plan, **other)[1], one)
    assert {parameter.dtype for parameter in one.parameters()} == {torch.bfloat16}
    assert not equal_states(fit(**plan, stochastic_rounding=False)[1], one)


@pytest.mark.parametrize("device_iterations", [1, 4])
@pytest.mark.parametrize("infinite", [0, 5, 11])
@pytest.mark.parametrize("precision", ["16-true", "bf16-true"])
def test_an_update_that_overflows_moves_nothing_but_the_position(precision, infinite, device_iterations):
    scaling = {} if precision == "16-true" else {"loss_scaling": 8.0}
    net = Overflows(infinite)
    plan = {"gradient_accumulation_factor": 2, "device_iterations": device_iterations, **scaling}
    trainer, _ = fit(precision, net=net, trainer={"max_epochs": 1}, **plan)
    assert trainer.global_step == 5 and net.number == 12
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**5)
    state = trainer.precision_plugin.state_dict()
    assert state["skipped"] == 1 and state["factor"] == (32768 if precision == "16-true" else 8.0)
    assert all(buffer.isfinite().all() for buffer in net.buffers())
    if infinite == 0:
        assert net.rates == pytest.approx([0.1 * 0.5**k for k in range(5)])
        assert int(net.network[0][0].norm.num_batches_tracked) == 10  # of a skipped update nothing stays


def test_a_resumed_run_has_the_scale_and_the_weights_of_the_uninterrupted_one(tmp_path):
    def net() -> Net:
        return Overflows(3)

    full, uninterrupted = fit("16-true", net=net(), gradient_accumulation_factor=2)
    first, _ = fit("16-true", net=net(), gradient_accumulation_factor=2, trainer={"max_epochs": 1})
    first.save_checkpoint(tmp_path / "one.ckpt")
    then = net()
    then.infinite = ()
    second, _ = fit("16-true", net=then, gradient_accumulation_factor=2, ckpt_path=tmp_path / "one.ckpt")
    assert equal_states(then, uninterrupted)
    assert second.precision_plugin.state_dict() == full.precision_plugin.state_dict()
    assert second.global_step == full.global_step == 11


@pytest.mark.parametrize(
    ("precision", "scaling", "message"),
    [
        ("32-true", 128.0, "loss_scaling=128.0 makes no sense in precision=32-true"),
        ("64-true", "auto", "loss_scaling=auto makes no sense in precision=64-true"),
        ("bf16-mixed", "auto", "loss_scaling=auto makes no sense in bf16"),
    ],
)
def test_scaling_that_makes_no_sense_is_refused(precision, scaling, message):
    with pytest.raises((PlanError, ValueError), match=message):
        fit(precision, loss_scaling=scaling)
