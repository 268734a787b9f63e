"""However a fit, an evaluation or a command ends, what it set in the module, the Trainer and the process is put back."""

import os
import signal
import socket
import warnings

import pytest
import torch
from runs import Net, blocks, classes, fit, loader, make_trainer, weights
from torch import nn

from lightning_ipu import PlanError
from resnet_ipu.__main__ import main


class Ending(Net):
    """Ends as it is told, in a place."""

    def __init__(self, place: str | None = None, error: BaseException | None = None) -> None:
        super().__init__(lambda: blocks(dropout=0.3))
        self.place, self.error = place, error

    def end(self, place: str) -> None:
        if place == self.place:
            raise self.error

    def configure_optimizers(self):
        self.end("configure_optimizers")
        optimizer = super().configure_optimizers()
        if self.place == "refused":  # 16.16 rounds parameters by name
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        return optimizer

    def on_fit_start(self):
        self.end("on_fit_start")

    def training_step(self, batch, batch_idx):
        self.end("training_step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.end("validation_step")
        return super().validation_step(batch, batch_idx)

    def on_train_end(self):
        self.end("on_train_end")


def traces(module, trainer) -> dict:
    """What a fit may leave behind."""
    connector, loops = trainer._logger_connector, [trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop]
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return {
        "hooks": [(name, len(getattr(child, kind))) for name, child in module.named_modules() for kind in hooks],
        "types of gradients": [parameter.grad_dtype for parameter in module.parameters()],
        "trainer": [getattr(trainer, name) for name in ("accumulate_grad_batches", "limit_train_batches", "limit_val_batches")],
        "sampler": trainer._accelerator_connector.use_distributed_sampler,
        "in place of methods": [
            sorted(name for name in vars(owner) if callable(getattr(type(owner), name, None)))
            for owner in (*module.modules(), connector, trainer._signal_connector, *loops)
        ],
        "handlers": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "filters": list(warnings.filters),
    }


@pytest.mark.parametrize("place", [None, "configure_optimizers", "on_fit_start", "training_step", "validation_step", "on_train_end"])
def test_a_fit_leaves_nothing_behind(place):
    for error in (ValueError("the end"), SystemExit(3)) if place in ("training_step", "validation_step") else (ValueError("the end"),):
        module, trainer = Ending(place, error), make_trainer(R=2, D=2, recompute=True, limit_train_batches=0.9, val_check_interval=0.5)
        trainer.strategy.connect(module)
        module.trainer = trainer
        before = traces(module, trainer)
        if place is None:
            trainer.fit(module, loader(classes(33), 2), loader(classes(8), 4))
        else:
            with pytest.raises(type(error)):
                trainer.fit(module, loader(classes(33), 2), loader(classes(8), 4))
        after = traces(module, trainer)
        assert before == after, place


def test_a_refused_fit_leaves_the_module_as_it_was_for_the_next_one():
    refused = Ending("refused")
    with pytest.raises((PlanError, ValueError), match="not the module's"):
        fit(refused, loader(classes(16), 2), R=2, recompute=True, precision="bf16-true")
    refused.place = None
    other = Ending()
    for module in (refused, other):
        module.to(torch.bfloat16)
        fit(module, loader(classes(16), 2), R=2, recompute=True, precision="bf16-true")
    assert all(torch.equal(value, weights(other)[name]) for name, value in weights(refused).items())
    assert refused.losses == other.losses
    assert {parameter.grad_dtype for parameter in refused.parameters()} == {torch.bfloat16}


def test_a_command_in_a_program_of_ones_own_puts_back_what_it_set(command_line, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    heard, told = socket.socketpair()
    told.setblocking(False)
    names = ("OMP_NUM_THREADS", "PL_GLOBAL_SEED", "PL_SEED_WORKERS", "MASTER_ADDR", "LOCAL_RANK")

    def settings() -> tuple:
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        variables = {name: os.environ.get(name) for name in names}
        return handlers, warnings.showwarning, list(warnings.filters), variables, torch.get_num_threads(), os.sched_getaffinity(0)

    signal.set_wakeup_fd(told.fileno())
    try:
        before = settings()
        words = "--dataset SAMPLE --size 8 --precision 32.32 --limit-train-batches 2 --limit-val-batches 1 --threads 2"
        statuses = [command_line(main, *line.split())[0] for line in (words, words + " --replication-factor 5000", "--bogus")]
        assert statuses == [0, 2, 2]
        after = settings()
    finally:
        assert signal.set_wakeup_fd(-1) == told.fileno()
        heard.close(), told.close()
    assert after == before
