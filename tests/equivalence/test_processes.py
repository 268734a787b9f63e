"""The placement decides nothing but the speed: on 2 and 4 processes, with stages or replicas apart, the numbers are those of one."""

import os
from pathlib import Path

import averaged
import filled
import hooked
import logged
import numpy as np
import processes
import pytest
import pytorch_lightning as pl
import reported
import shaped
import stopped
import torch
import warm
from plain_loop import train
from processes import CASES, Spread, dataset, run
from runs import classes, difference, loader, make_trainer, weights
from torch.nn import functional as F

from lightning_ipu import machine
from lightning_ipu.recipe.averaging import TRAINED


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the two launches left: one with two processes, one with four."""
    path = tmp_path_factory.mktemp("processes")
    root = Path(__file__).parents[2]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    for count in (2, 4):
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
        done = warm.run([*launcher, processes.__file__, str(path)], env=environment, timeout=400, spares=count)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return path


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case["name"] for case in CASES])
def test_processes_train_what_one_process_and_a_plain_loop_train(number, folder):
    case, theirs = CASES[number], torch.load(folder / f"{number}.pt", weights_only=False)
    module, trainer = run(case, 1)
    ours = processes.outcome(module, trainer)

    # Two addends have one order: only beyond two processes with replicas may a sum be rounded in another.
    replicas_elsewhere = case["R"] > 2 or (case["R"] > 1 and "gradient_clip_val" in case)
    norms_apart = "gradient_clip_val" in case
    tolerance = {True: 1e-9, False: 1e-6}[case.get("precision") == "64-true"] if replicas_elsewhere or norms_apart else 0
    assert difference(theirs["weights"], ours["weights"]) <= tolerance
    assert difference(theirs["buffers"], ours["buffers"]) <= tolerance if ours["buffers"] else not theirs["buffers"]
    assert theirs["optimizer"].keys() == ours["optimizer"].keys()
    for key, state in ours["optimizer"].items():
        for name, value in state.items():
            if value is not None:
                assert torch.allclose(theirs["optimizer"][key][name], value, rtol=1e3 * tolerance, atol=10 * tolerance), (key, name)
    assert theirs["metrics"] == pytest.approx(ours["metrics"], rel=10 * tolerance or 1e-15)
    assert all(metrics == theirs["metrics"] for metrics in theirs["everyone's metrics"])
    assert theirs["metrics"]["one"] == theirs["metrics"]["val_one"] == 1
    assert theirs["metrics"]["val_index"] == (case.get("validation", 21) - 1) / 2
    assert theirs["rows"] == list(range(21))
    for rank, shown in enumerate(theirs["shown"]):
        parts = max(1, case["processes"] // case["R"])
        skipped = rank // parts * max(1, case["R"] // case["processes"]) * case["A"]  # micro-batches of replicas before this process's
        epochs = [module.seen[: len(module.seen) // 2], module.seen[len(module.seen) // 2 :]]
        per_epoch = len(shown) // 2
        for place, (number, indices) in enumerate(shown):
            assert number == (0 if per_epoch == 1 else place % 2 * case["R"] * case["A"])
            assert indices == epochs[place // per_epoch][number + skipped]
    copies = case["processes"] if "pipeline_splits" not in case and "num_stages" not in case else min(case["R"], case["processes"])
    assert sum(theirs["everyone's bytes"]) <= copies * ours["held"] * 1.1  # of parameters and optimizer state: each stage in one place

    if (
        not case.get("noise")
        and case["network"] not in ("dropout", "drawing", "checkpointed", "checkpointed norms")
        and "gradient_clip_val" not in case
    ):
        reference = Spread(case["network"], case["optimizer"])
        samples = dataset(case, len(trainer.train_dataloader.dataset))
        reference.to(samples.tensors[0].dtype)
        train(
            reference.network,
            optimizer := processes.OPTIMIZERS[case["optimizer"]](reference.parameters()),
            lambda network, batch: F.cross_entropy(network(batch[0]), batch[1]),
            [samples[indices] for indices in module.seen],
            replicas=case["R"],
            accumulation=case["A"],
        )
        assert len(module.seen) == 4 * case["R"] * case["A"] and optimizer.state
        normed = case["network"] in ("normed", "resnet")
        close = 1e-9 if case.get("precision") == "64-true" else 4e-4 if normed else 1e-6
        assert difference(theirs["weights"], {name: value.detach() for name, value in reference.named_parameters()}) < close


@pytest.mark.parametrize("name", shaped.CASES)
def test_micro_batches_of_differing_shapes_train_and_score_what_one_process_and_a_plain_loop_do(name, folder):
    case = shaped.CASES[name]
    theirs = torch.load(folder / f"shaped-{case['processes']}.pt")[name]
    if "dropout" in case:
        ours = shaped.run(name, devices=1)
        assert difference(theirs["weights"], ours["weights"]) == 0 and theirs["validated"] == ours["validated"]
        return
    training, validation = shaped.loaders(case)
    module = shaped.Module()
    optimizer = module.configure_optimizers()

    def batches(samples):
        return [shaped.collate(samples[start : start + 6]) for start in range(0, len(samples), 6)]

    micro_batches = batches(training)[:-1]  # the last has 4 samples
    assert len({words.shape for words, _ in micro_batches}) > 2
    train(module.network, optimizer, shaped.loss_of, micro_batches, replicas=case.get("R", 1), accumulation=case["A"])
    assert difference(theirs["weights"], weights(module)) < 1e-6

    scores = []
    for samples in validation:
        with torch.no_grad():
            losses = [(shaped.loss_of(module.network.eval(), batch).item(), len(batch[1])) for batch in batches(samples)]
        scores.append(sum(loss * size for loss, size in losses) / sum(size for _, size in losses))
    assert theirs["validated"] == pytest.approx(scores, rel=1e-5) and theirs["tested"] == pytest.approx(scores, rel=1e-5)
    assert theirs["predicted"] == [int((words != 0).sum()) for batch, _ in batches(validation[0]) for words in batch.T]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("plan", list(hooked.PLANS))
def test_what_hooks_draw_and_decide_is_the_same_on_two_processes(plan, late, folder):
    ours, theirs = hooked.run(1, plan, late), torch.load(folder / "hooked.pt", weights_only=False)[plan, late]
    per_update = {"replicas": 16, "pipeline": 8}[plan]
    assert ours["updates"] == theirs["updates"] == (3 if late else 41 // per_update + 1)
    assert theirs["draws"] == ours["draws"] and len(set(ours["draws"])) == len(ours["draws"]) == 3 * ours["updates"]
    assert theirs["metrics"] == pytest.approx(ours["metrics"], rel=1e-15)
    samples = [k for k in range(ours["updates"] * per_update) if k % 5 or plan == "pipeline"]
    assert ours["metrics"]["index"] == pytest.approx(sum(samples) / len(samples))
    assert ours["metrics"]["val_index"] == pytest.approx(sum(k for k in range(30) if k % 5) / 24)
    assert difference(theirs["weights"], ours["weights"]) == 0


def test_what_a_pipeline_cannot_honour_is_refused_by_all_processes_in_one_line(folder):
    messages = torch.load(folder / "refusals.pt")
    wanted = {
        "several calls": "2 times",
        "no call": "does not call self",
        "a loss on other stages": "of an earlier stage directly",
        "tied weights": "network.first.weight",
        "statistics in a checkpoint": "changes again in the backward pass, in a torch.utils.checkpoint of the network's own; under"
        " pipeline_schedule=1F1B",
        "statistics in a checkpoint, grouped": "pipeline_schedule=GPipe the order of these changes would depend",
        "a layer for some shapes": "uses 'network.sometimes.bias' in stage 0 for some shapes",
        "functional randomness": "draws random numbers by dropout",
        "1F1B with too few micro-batches": "gradient_accumulation_factor of at least 2, not 1",
        "a layer before the call": "uses 'embed.bias' before it calls self(...)",
        "a weight of an earlier stage": "uses 'network.0.0.linear.weight' before it calls self(...)",
        "too many balanced stages": "num_stages=4 needs 3 cuts",
        "what an earlier stage left": "reads 'network.0.0.linear.extra', which the forward sets in an earlier stage",
        "SyncBatchNorm": "'network.0.0.norm' is a SyncBatchNorm",
        "a parameter moved in a step": "changes the parameter 'slow.weight'",
        "replicas that drift apart": "'slow.weight' is no longer the same in all replicas",
        "gradient norms in a pipeline": "self.log('norm', ...) in on_before_optimizer_step is not the same in all processes",
        "all_gather in a step": "all_gather in a training or evaluation step",
        "sparse gradients": "sparse gradients cannot be averaged over processes",
        "a share of a share": "train_dataloader has a DistributedSampler",
        "a stream": "IterableDataset is trained on by one process only",
        "loaders at once": "CombinedLoader with mode='min_size'",
        "no DataLoader": "a range is evaluated by one process only",
        "drawn batches": "validation_step(dataloader_iter) draws",
        "a callback that prunes": "the callback ModelPruning changes which parameters are trained",
        "a callback that thaws": "the callback Thawing changes which parameters are trained",
        "three replicas": "legal numbers of processes are 1, 3",
    }
    for name, words in wanted.items():
        assert words in messages[name] and "\n" not in messages[name], (name, messages[name])


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system binds no process")
def test_each_process_keeps_to_its_share_of_the_cores_while_it_trains(folder):
    cores, every = torch.load(folder / "cores.pt"), os.sched_getaffinity(0)
    shares = [set().union(*machine.share_of_cores(place, 2)) or every for place in (0, 1)]
    assert cores[True] == [(share, every) for share in shares]
    assert cores[False] == [(every, every)] * 2


def test_a_checkpoint_of_two_stages_on_two_replicas_knows_of_neither(folder):
    number = next(number for number, case in enumerate(CASES) if case["name"] == "2 x 2")
    checkpoint = torch.load(folder / "two-by-two.ckpt", weights_only=False)
    theirs = torch.load(folder / f"{number}.pt", weights_only=False)
    plain = Spread("normed", "momentum").network
    plain.load_state_dict({name.removeprefix("network."): value for name, value in checkpoint["state_dict"].items() if "auroc" not in name})
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    assert difference({f"network.{name}": value for name, value in plain.named_parameters()}, theirs["weights"]) == 0

    case = CASES[number]
    module = Spread("normed", "momentum")
    validated = make_trainer().validate(
        module, loader(dataset(case, 21, seed=6), 4), ckpt_path=folder / "two-by-two.ckpt", verbose=False, weights_only=False
    )
    assert validated[0]["val_loss"] == pytest.approx(theirs["metrics"]["val_loss"], rel=1e-6)
    training = loader(dataset(case, 4 * case["R"] * case["A"] * 2 + 5), 4, shuffle=True)
    trainer = make_trainer(R=2, A=2, max_epochs=3)
    trainer.fit(module, training, ckpt_path=folder / "two-by-two.ckpt", weights_only=False)
    assert trainer.global_step == 6 and isinstance(trainer, pl.Trainer)


def test_a_pipeline_averages_weights_and_mixes_images_as_one_process_does(folder):
    one, two = averaged.run(1), torch.load(folder / "averaged.pt")
    for key in ("state_dict", TRAINED, "end"):
        assert one[key].keys() == two[key].keys() and all(torch.equal(one[key][name], two[key][name]) for name in one[key]), key
    assert not torch.equal(one["state_dict"]["network.fc.weight"], one[TRAINED]["network.fc.weight"])
    assert one["metrics"] == pytest.approx(two["metrics"], rel=1e-12)


@pytest.mark.parametrize("plan", logged.PLANS)
def test_what_is_logged_is_the_same_on_two_processes(plan, folder):
    one, two = logged.run(1, plan), torch.load(folder / "logged.pt")[plan]
    (ours,), (theirs, others) = one["metrics"], two["metrics"]
    whole = plan != "validated in stages"  # where every process but the last of a replica has no loss of its own
    apart = {name: (ours.pop(name), theirs.pop(name), others.pop(name)) for name in ("apart",)}
    assert theirs == pytest.approx(ours, rel=1e-6, nan_ok=True) and others == pytest.approx(theirs, rel=0, nan_ok=True)
    assert ours["validated"] == ours["ended"] == 24 + 12 and ours["val_sum/dataloader_idx_0"] == 24 and ours["samples"] == 24
    assert len(one["rows"]) == len(two["rows"])
    for our_row, their_row in zip(one["rows"], two["rows"], strict=True):
        assert their_row == pytest.approx(our_row, rel=1e-6, nan_ok=True)
    assert sum(two["ends"]) == one["ends"][0] * (1 if whole else 2)
    assert apart["apart"][1] != apart["apart"][2] and not one["warnings"]
    assert len(two["warnings"]) == 1 and "'apart'" in two["warnings"][0] and "\n" not in two["warnings"][0]


@pytest.mark.parametrize("plan", reported.PLANS)
def test_the_picture_of_a_validation_shows_the_samples_of_all_processes(plan, folder):
    one, two = reported.run(1, plan), torch.load(folder / "reported.pt", weights_only=False)[plan]
    for drawn in (one, two):
        order, places = np.argsort(drawn["t"][:, 0]), np.argsort(drawn["truth"][:, 0])
        np.testing.assert_array_equal(drawn["t"][order], drawn["truth"][places])
        np.testing.assert_allclose(drawn["p"][order], one["p"][np.argsort(one["t"][:, 0])], rtol=1e-5)
    assert two["r2"] == pytest.approx(one["r2"], rel=1e-6)


@pytest.mark.parametrize("plan", stopped.PLANS)
def test_of_two_signals_in_one_update_all_processes_take_sigterm_and_stop_after_it(plan, folder):
    signals, updates, groups = torch.load(folder / "stopped.pt", weights_only=False)[plan]
    assert signals == [15, 15] and updates == [4, 4]
    assert groups[0] == groups[1]  # the first run's, after it and after the second


@pytest.mark.parametrize("hook", stopped.DECISIONS)
@pytest.mark.parametrize("plan", stopped.PLANS)
def test_what_one_process_decides_in_a_hook_holds_in_all_after_the_same_update(plan, hook, folder):
    expected = stopped.DECISIONS[hook]
    assert stopped.decide(1, plan, hook) == [expected]
    assert torch.load(folder / "decisions.pt")[plan, hook] == [expected, expected]


@pytest.mark.parametrize("plan", filled.PLANS)
def test_buffers_that_are_filled_later_and_whole_numbers_do_not_depend_on_the_processes(plan, folder):
    R, A = filled.PLANS[plan].get("R", 1), filled.PLANS[plan]["A"]
    x, average, largest = classes(64).tensors[0].view(-1, R, A, 4, 8), None, torch.tensor([-(2**62), 0])
    for update in x:
        averages, seen = [average] * R, []
        for replica, micro_batches in enumerate(update):
            for micro_batch in micro_batches:
                mean, before = micro_batch.mean(0), averages[replica]
                averages[replica] = mean if before is None else 0.9 * before + 0.1 * mean
                seen.append(int(micro_batch.sum(0).argmax()))
        average = sum(averages) / R
        largest = torch.tensor([int(largest[0]) + sum(seen[:A]), seen[A - 1]])

    (one,) = filled.run(1, plan)
    assert all(torch.allclose(one[f"network.0.{name}"], average, atol=1e-6) for name in ("average", "late"))
    assert one["network.0.largest"].equal(largest)
    for state in torch.load(folder / "filled.pt")[plan]:
        assert state.keys() == one.keys() and difference(state, one) <= (1e-6 if R > 2 else 0)
        assert all(state[name].equal(one[name]) for name in one if not one[name].is_floating_point())
