"""Averages of weights: the moving average during training, in checkpoints and over processes, and averages of checkpoints."""

import copy
import os
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from runs import Net, blocks, classes, equal_states, fit, loader, make_trainer
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm

from lightning_ipu import PlanError
from lightning_ipu.command import cli
from lightning_ipu.command.lifecycle import latest_checkpoint
from lightning_ipu.recipe.averaging import AVERAGE, OF_CHECKPOINTS, TRAINED, AveragedWeights, average_checkpoints


def normed() -> Net:
    return Net(lambda: blocks(norm=True))


class Weights(pl.Callback):
    """State_dicts as they stand after every weight update; needs one update per host step."""

    def __init__(self) -> None:
        self.states = []

    def on_train_start(self, trainer, pl_module) -> None:
        self.note(pl_module)

    def on_train_batch_end(self, trainer, pl_module, *_) -> None:
        self.note(pl_module)

    def note(self, module) -> None:
        self.states.append({name: value.clone() for name, value in module.state_dict().items()})


def moving_average(states: list[dict[str, torch.Tensor]], *, decay: float, every: int = 1, ramp: bool = True) -> dict[str, torch.Tensor]:
    """The definition, in float64, over states after 0, 1, 2, ... weight updates."""
    average = {name: value.double() for name, value in states[0].items()}
    for n, state in enumerate(states[every::every]):
        d = min(decay, (1 + n) / (10 + n)) if ramp else decay
        average = {name: d * value + (1 - d) * state[name].double() for name, value in average.items()}
    counters = {name: value for name, value in states[-1].items() if not value.is_floating_point()}
    return average | counters


def close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.allclose(ours[n].double(), theirs[n].double(), rtol=1e-5, atol=1e-6) for n in ours)


@pytest.mark.parametrize("options", [{"decay": 0.9}, {"decay": 0.6, "every": 3, "ramp": False}], ids=["ramp", "every third"])
@pytest.mark.parametrize("plan", [{"D": 1}, {"D": 4, "R": 2, "A": 2}, {"stock": True}], ids=["D=1", "D=4, R=2, A=2", "stock Lightning"])
def test_the_average_follows_its_definition_inside_a_host_step_and_is_what_is_validated(options, plan, tmp_path):
    train, validate = loader(classes(48), 2, shuffle=not plan.get("stock")), loader(classes(12, seed=6), 4)
    notes, plain = Weights(), normed()
    fit(plain, train, validate, callbacks=[notes], num_sanity_val_steps=0, **{**plan, **({} if plan.get("stock") else {"D": 1})})

    module, callback = normed(), AveragedWeights(**options)
    trainer = make_trainer(callbacks=[callback], num_sanity_val_steps=0, **plan)
    checkpoint = {}
    original = AveragedWeights.on_validation_end

    def keep(self, trainer, pl_module):
        original(self, trainer, pl_module)
        assert equal_states(pl_module, plain)  # the training is that of a run without an average
        checkpoint.update(copy.deepcopy(trainer._checkpoint_connector.dump_checkpoint()))

    callback.on_validation_end = keep.__get__(callback)
    trainer.fit(module, train, validate)
    expected = moving_average(notes.states, **options)
    if plan.get("stock"):  # Lightning calls the hook after the next forward, which has moved BatchNorm's statistics once more
        expected = {name: value for name, value in expected.items() if "running" not in name}
    assert close({name: module.state_dict()[name] for name in expected}, expected)  # where training ends
    assert all(torch.equal(checkpoint["state_dict"][name], value) for name, value in module.state_dict().items())
    assert all(torch.equal(checkpoint[TRAINED][name], value) for name, value in plain.state_dict().items())
    assert checkpoint[AVERAGE]["update"] == trainer.global_step
    scored = make_trainer(**({"stock": True} if plan.get("stock") else {})).validate(module, validate, verbose=False)[0]
    assert trainer.callback_metrics["val_loss"].item() == pytest.approx(scored["val_loss"], rel=1e-6)


def test_the_trained_weights_can_stay_what_is_validated_and_saved():
    train, validate = loader(classes(24), 2), loader(classes(12, seed=6), 4)
    plain, module = normed(), normed()
    theirs = fit(plain, train, validate, num_sanity_val_steps=0)
    trainer = fit(module, train, validate, callbacks=[AveragedWeights(evaluate="trained")], num_sanity_val_steps=0)
    assert equal_states(module, plain) and trainer.callback_metrics["val_loss"] == theirs.callback_metrics["val_loss"]


def test_a_resumed_run_has_the_average_of_one_that_was_not_interrupted(tmp_path):
    train, validate = loader(classes(40), 2, shuffle=True), loader(classes(12, seed=6), 4)
    options = {"D": 3, "max_epochs": 2, "num_sanity_val_steps": 0}
    whole = normed()
    fit(whole, train, validate, callbacks=[AveragedWeights(decay=0.9, every=2)], **options)
    first, path = normed(), tmp_path / "half.ckpt"

    class Save(pl.Callback):
        def on_train_batch_start(self, trainer, *_) -> None:
            if trainer.global_step == 9:
                trainer.save_checkpoint(path)

    fit(first, train, validate, callbacks=[AveragedWeights(decay=0.9, every=2), Save()], **options)
    resumed = normed()
    fit(resumed, train, validate, callbacks=[AveragedWeights(decay=0.9, every=2)], ckpt_path=path, **options)
    assert equal_states(resumed, whole) and equal_states(first, whole)
    with pytest.raises(PlanError, match="half.ckpt holds an average of weights that its run kept: give the callback AveragedWeights"):
        fit(normed(), train, validate, ckpt_path=path, **options)


def test_a_checkpoint_of_the_middle_of_a_validation_holds_the_trained_weights_and_the_average(tmp_path):
    train, validate = loader(classes(24), 2), loader(classes(12, seed=6), 4)

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer, module, *_) -> None:
            self.weights = copy.deepcopy(module.state_dict())

        def on_validation_batch_start(self, trainer, *_) -> None:
            trainer.save_checkpoint(tmp_path / "a.ckpt")

        def on_validation_end(self, trainer, *_) -> None:
            trainer.save_checkpoint(tmp_path / "b.ckpt")

    save = Save()
    fit(normed(), train, validate, callbacks=[AveragedWeights(decay=0.9), save], num_sanity_val_steps=0)
    within, after = (torch.load(tmp_path / name, weights_only=True) for name in ("a.ckpt", "b.ckpt"))
    for states in (within, after):
        assert all(torch.equal(states[TRAINED][name], value) for name, value in save.weights.items())
    assert all(torch.equal(within["state_dict"][name], value) for name, value in after["state_dict"].items())


def test_the_average_of_16_bit_weights_is_kept_in_32_and_saved_in_16():
    module, callback = normed(), AveragedWeights(decay=0.99, ramp=False)
    trainer = make_trainer(callbacks=[callback], precision="bf16-true")
    dumped = {}
    callback.on_train_epoch_end = lambda trainer, _: dumped.update(copy.deepcopy(trainer._checkpoint_connector.dump_checkpoint()))
    train = loader(classes(20, dtype=torch.bfloat16), 2)
    trainer.fit(module, train)
    name = "network.1.weight"
    assert dumped["state_dict"][name].dtype == dumped[TRAINED][name].dtype == torch.bfloat16
    assert dumped[AVERAGE]["average"][name].dtype == torch.float32
    assert not torch.equal(dumped[AVERAGE]["average"][name], dumped[AVERAGE]["average"][name].bfloat16().float())


class Normalised(nn.Module):
    """Both kinds of spectral norm, one of them over the second dimension, and buffers that are no statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.old, self.new = spectral_norm(nn.Linear(8, 8, bias=False)), parametrizations.spectral_norm(nn.Linear(8, 8, bias=False))
        self.turned, self.head = parametrizations.spectral_norm(nn.ConvTranspose1d(8, 8, 1, bias=False)), nn.Linear(8, 3)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.register_buffer("latest", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.latest += 1
        x = self.old(x) + self.new(x) + self.turned(x[..., None])[..., 0]
        return self.head(self.norm(x).clamp(min=self.mask.min()))

    def gains(self) -> list[float]:
        """The largest singular value of each normalised weight."""
        self.eval()
        with torch.no_grad():
            self.old(torch.ones(1, 8))
            return [float(torch.linalg.matrix_norm(w, 2)) for w in (self.old.weight, self.new.weight, self.turned.weight[..., 0])]


def spectral() -> Net:
    return Net(Normalised, lambda p: torch.optim.SGD(p, lr=0.5))


@pytest.mark.parametrize("plan", [{}, {"D": 3, "R": 3}], ids=str)
def test_an_average_has_the_spectral_norm_of_its_own_weights_and_the_latest_of_what_is_no_statistic(plan, tmp_path):
    seen, paths = [], [tmp_path / f"{k}.ckpt" for k in range(3)]

    class Watches(pl.Callback):
        def on_validation_epoch_start(self, trainer, pl_module):
            seen.append((pl_module.network.gains(), pl_module.network.latest.item()))

        def on_train_epoch_end(self, trainer, pl_module):
            trainer.save_checkpoint(paths[trainer.current_epoch])

    module, train = spectral(), loader(classes(36), 2, shuffle=True)
    options = {"max_epochs": 3, "num_sanity_val_steps": 0, **plan}
    fit(module, train, loader(classes(4), 2), callbacks=[AveragedWeights(decay=0.9, ramp=False), Watches()], **options)
    each = 18 // plan.get("R", 1)
    assert [latest for _, latest in seen] == [each, 2 * each, 3 * each]
    for gains in [*(gains for gains, _ in seen), module.network.gains()]:
        assert gains == pytest.approx([1, 1, 1], abs=1e-4)
    saved = spectral()
    saved.load_state_dict(torch.load(paths[-1])["state_dict"])
    assert saved.network.gains() == pytest.approx([1, 1, 1], abs=1e-4)
    assert all(
        vector.norm().item() == pytest.approx(1, abs=1e-5) for name, vector in saved.state_dict().items() if name[-2:] in ("_u", "_v")
    )
    assert saved.network.mask.tolist() == [0, -torch.inf] and not saved.network.mask.isnan().any()

    for kind in ("mean", "exponential"):
        result, _, _ = average_checkpoints(paths, kind=kind)
        saved.load_state_dict(result["state_dict"])
        states = [torch.load(path)["state_dict"] for path in paths]
        assert saved.network.gains() == pytest.approx([1, 1, 1], abs=1e-4)
        assert saved.network.latest == 3 * each and saved.network.mask.tolist() == [0, -torch.inf]
        if kind == "mean":
            for name in ("network.old.weight_orig", "network.norm.running_mean"):
                assert torch.allclose(result["state_dict"][name], sum(state[name] for state in states) / 3, atol=1e-6)


def test_wrong_numbers_are_named():
    for options, message in [
        ({"decay": 1.0}, "decay=1.0 of AveragedWeights must be at least 0 and below 1"),
        ({"every": 0}, "every=0 of AveragedWeights must be at least 1 weight update"),
        ({"evaluate": "both"}, "evaluate='both' of AveragedWeights is unknown; legal are 'average' and 'trained'"),
    ]:
        with pytest.raises(ValueError, match=message):
            AveragedWeights(**options)


# -- averages of checkpoints --------------------------------------------------------------------------------------------------


def write_checkpoints(folder: Path, count: int = 12) -> list[dict[str, torch.Tensor]]:
    """Checkpoints after updates 1, ..., count, in three types; names whose lexical order is not that of the updates."""
    generator, states = torch.Generator().manual_seed(0), []
    for update in range(1, count + 1):
        state = {
            "w": torch.randn(50, generator=generator),
            "half": torch.randn(50, generator=generator).bfloat16(),
            "counter": torch.tensor(10 * update),
        }
        states.append(state)
        checkpoint = {
            "state_dict": state,
            "global_step": update,
            "epoch": update,
            "optimizer_states": [],
            "loops": {},
            "hyper_parameters": {},
        }
        torch.save(checkpoint, folder / f"epoch{update}.ckpt")
    os.link(folder / f"epoch{count}.ckpt", folder / "last.ckpt")
    return states


def test_the_last_n_are_chosen_by_what_checkpoints_say_inside_and_an_earlier_average_is_none_of_them(tmp_path, capsys):
    states = write_checkpoints(tmp_path)
    line = ["--checkpoint-input-path", str(tmp_path), "--weight-avg-N", "3"]
    for _ in range(2):  # the second time there is an average beside them
        assert cli.average(line, prog="resnet_ipu", version=str) == 0
        averaged = torch.load(tmp_path / "averaged.ckpt")
        mark = averaged[OF_CHECKPOINTS]
        assert (mark["updates"], mark["files"]) == ([10, 11, 12], ["epoch10.ckpt", "epoch11.ckpt", "epoch12.ckpt"])
        mean = sum(state["w"].double() for state in states[9:]) / 3
        assert averaged["state_dict"]["w"].dtype == torch.float32 and (averaged["state_dict"]["w"] - mean).abs().max() < 1e-7
        half = (sum(state["half"].double() for state in states[9:]) / 3).bfloat16()
        assert torch.equal(averaged["state_dict"]["half"], half) and averaged["state_dict"]["counter"] == 120
        assert not {"optimizer_states", "loops"} & averaged.keys()
    assert "averaged.ckpt: left out, an average itself" in capsys.readouterr().out
    (tmp_path / "last.ckpt").unlink()
    assert latest_checkpoint(tmp_path) == tmp_path / "epoch12.ckpt"  # no run goes on from an average


def test_the_exponential_average_goes_from_the_oldest_to_the_newest(tmp_path):
    states = write_checkpoints(tmp_path, 4)
    result, files, _ = average_checkpoints(list(tmp_path.glob("*.ckpt")), kind="exponential", decay=0.75)
    expected = states[0]["w"].double()
    for state in states[1:]:
        expected = 0.75 * expected + 0.25 * state["w"].double()
    assert (result["state_dict"]["w"] - expected).abs().max() < 1e-7 and [update for _, update in files] == [1, 2, 3, 4]


def test_what_cannot_be_averaged_is_named(tmp_path, capsys):
    states = write_checkpoints(tmp_path, 2)

    def error(*words: str) -> str:
        assert cli.average(["--checkpoint-input-path", str(tmp_path), *words], prog="resnet_ipu", version=str) == 2
        return capsys.readouterr().err

    assert (
        "there are 2 checkpoints of different weight updates, fewer than the 3 asked for; a run keeps that many with --keep-last 3"
        in error("--weight-avg-N", "3")
    )
    assert "--weight-avg-exp-decay 0.5 needs --weight-avg-strategy exponential" in error("--weight-avg-exp-decay", "0.5")
    assert "--weight-avg-N 0 must be at least 1, or -1" in error("--weight-avg-N", "0")
    assert f"{tmp_path}/last.ckpt is a checkpoint of a run, which would be lost" in error(
        "--checkpoint-output-path", f"{tmp_path}/last.ckpt"
    )
    torch.save({"state_dict": {"w": states[0]["w"]}, "global_step": 2}, tmp_path / "zz.ckpt")
    assert f"{tmp_path}/epoch2.ckpt and {tmp_path}/zz.ckpt both stand after weight update 2 and differ" in error()
    torch.save({"state_dict": {**states[0], "w": torch.zeros(3)}, "global_step": 3}, tmp_path / "zz.ckpt")
    assert "are of different networks: w is (50,) in one and (3,) in the other" in error()
    (tmp_path / "zz.ckpt").write_bytes(b"half")
    assert f"{tmp_path}/zz.ckpt is not a complete file of torch.save" in error()
