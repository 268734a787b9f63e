"""Rows that several commands have in their tables of options, each with one text."""

from __future__ import annotations

from lightning_ipu.command import readers
from lightning_ipu.command.options import RUN, Option
from lightning_ipu.command.readers import choice, positive

NETWORK, DATA, PLAN, TRAINING = "network", "data", "plan", "training"

_STRATEGY = "trainer.strategy"


def no_channels_last(order: str) -> Option:
    """The switch for the order in memory; `order` is the other one, in words."""
    help = f"keep {order} in memory; slower on most devices"
    return Option(name="--no-channels-last", group=NETWORK, key="model.channels_last", sets=False, type=bool, rare=True, help=help)


def seed(of: str, *, group: str = PLAN, key: str | None = None) -> Option:
    """The seed; `of` says of what, for the help."""
    return Option(name="--seed", group=group, key=key, type=readers.seed, default=0, help=f"seed of {of}")


def output_dir(gets: str, *, key: str | None = None, aliases: tuple[str, ...] = ()) -> Option:
    """Where a run writes. Without a key the command's rules read it."""
    default = {"shown": "results"} if key is None else {"default": "results"}
    return Option(
        name="--output-dir", group=RUN, key=key, type=readers.path, metavar="DIR", help=f"gets {gets}", aliases=aliases, **default
    )


def accumulation(*, aliases: tuple[str, ...] = ()) -> Option:
    """Gradient accumulation."""
    return Option(name="--gradient-accumulation-factor", group=PLAN, key=f"{_STRATEGY}.gradient_accumulation_factor", type=positive(), default=1, help="A, micro-batches per replica and weight update", aliases=aliases)  # fmt: skip


def recompute(*, aliases: tuple[str, ...] = ()) -> Option:
    """Recomputation."""
    return Option(name="--recompute", group=PLAN, key=f"{_STRATEGY}.recompute", type=bool, help="recompute activations in the backward pass: less memory, the same numbers", aliases=aliases)  # fmt: skip


def processes(*, key: str | None = None) -> Option:
    """The number of processes."""
    return Option(name="--processes", group=RUN, key=key, type=positive(), shown="1, or torchrun's", help="processes that share out the replicas and stages: a divisor of R, or R times a divisor of the stages")  # fmt: skip


REPLICAS = "R, copies of the network whose gradients are averaged"
STAGES = "virtual IPUs, one for each replica and stage"
ITERATIONS = "D, weight updates per host step at most"
LOG_STEPS = "weight updates between rows of metrics.csv"
DATA_DIR = "where its files are, or are downloaded to"

PIPELINE = Option(name="--pipeline", group=PLAN, type=bool, help="run the stages as a pipeline; without it they run one after the other (sharded): the same numbers")  # fmt: skip
PIPELINE_SCHEDULE = Option(name="--pipeline-schedule", group=PLAN, type=choice("1F1B", "GPipe", "Sequential", "Interleaved", "Grouped"), shown="1F1B", help="order of work in a pipeline; Interleaved, a word of the originals, is 1F1B, and Grouped is GPipe")  # fmt: skip
PRECISION = Option(name="--precision", group=PLAN, key="precision", type=readers.precision_choice, default="auto", help="<compute>.<weights>; auto is 16.32 where the device is fast at bfloat16, else 32.32")  # fmt: skip
MAX_STEPS = Option(name="--max-steps", group=TRAINING, key="trainer.max_steps", type=positive(), help="end after N weight updates")
THEN_TEST = Option(name="--test", group=TRAINING, key="then_test", type=bool, help="score the test set as well, at the end")
STEPS_PER_LOG = Option(name="--steps-per-log", group=RUN, key="trainer.log_every_n_steps", type=positive(), default=10, help=LOG_STEPS)
