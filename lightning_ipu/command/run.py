"""One run of a command: LightningCLI with this package's defaults, output directory, display and ways to end.

The short form of a command and its ``fit validate test predict`` both end here, so that both build the same objects.
"""

from __future__ import annotations

import dis
import logging
import os
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from jsonargparse import ArgumentError
from jsonargparse.typing import PositiveFloat, PositiveInt
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from pytorch_lightning.loggers import Logger, WandbLogger
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from rich.console import Console
from typing_extensions import override

from lightning_ipu import machine
from lightning_ipu.command import cli
from lightning_ipu.command.configs import COMMAND, quote_strings
from lightning_ipu.command.display import RunDisplay, closing_lines, counted, score_table
from lightning_ipu.command.lifecycle import LAST, SETTINGS, BestCheckpoint, RunCheckpoints, SignalHandler, latest_checkpoint, stages_of
from lightning_ipu.command.output import (
    CHECKPOINTS,
    CONFIG,
    MetricsFile,
    OutputDirectory,
    check_writable,
    free_name,
    write_atomically,
    write_scores,
)
from lightning_ipu.command.readers import LARGEST_SEED
from lightning_ipu.command.slowdown import SlowdownWatch
from lightning_ipu.command.words import file_with
from lightning_ipu.files import atomic_write, read_checkpoint
from lightning_ipu.loop.events import EventsPerEpoch
from lightning_ipu.loop.launcher import Launcher
from lightning_ipu.loop.position import KEY, check_numbers, weight_updates_in
from lightning_ipu.plan import Plan
from lightning_ipu.precision.names import lightning_precision, precision_name, resolve
from lightning_ipu.recipe import averaging
from lightning_ipu.strategy import IPUStrategy

__all__ = ["Command", "CommandLine", "keep_quiet", "run_command"]

VAL_LOSS, VAL_ACCURACY = "val_loss", "val_accuracy"
OF_A_REPLAY = ("--config", "--resume", "--ckpt_path", "--trainer.default_root_dir")
_LIMITS = {
    "fit": ("limit_train_batches", "train on"),
    "validate": ("limit_val_batches", "validate"),
    "test": ("limit_test_batches", "test"),
    "predict": ("limit_predict_batches", "predict"),
}
PATHS = ("trainer.default_root_dir", "ckpt_path", "checkpoint_input_dir", "data.data_dir", "data.index_dir", "model.pretrained")
MOVABLE = ("data.data_dir", "data.index_dir", "data.num_workers")  # settings that a run may go on with others of, unremarked


@dataclass(frozen=True, kw_only=True)
class Command:
    """What one package's command consists of.

    Args:
        prog: its name in messages.
        model_class, datamodule_class: as LightningCLI takes them; their arguments are the keys ``model.*`` and ``data.*``.
        links: (attribute of the data module, argument of the model) that are the same thing.
        facts: rows for the table at the start, as (name, value); the first says which network it is.
        epochs: how many to train where nothing says how many, and why, in words, where that is worth a line.
        note: a line to end with that must not be missed, None without one.
        defaults: of LightningCLI's keys, where they are not those of all commands.
    """

    prog: str
    model_class: type[pl.LightningModule]
    datamodule_class: type[pl.LightningDataModule]
    links: Sequence[tuple[str, str]]
    facts: Callable[[CommandLine], list[tuple[str, str]]]
    epochs: Callable[[pl.LightningDataModule], tuple[int, str | None]]
    note: Callable[[CommandLine], str | None]
    defaults: Mapping[str, Any] = field(default_factory=dict)


def run_command(command: Command, arguments: Sequence[str], *, line: type[CommandLine] | None = None) -> int:
    """Run LightningCLI arguments under ``command``; returns the exit status.

    ``line`` is a class that does something else with what it builds. What a person can put right (a setting, a
    file) ends in one line, with status 2 before the run has begun and 1 after; faults of the program keep their traceback.
    """
    signals = SignalHandler()
    with _own_settings(), keep_quiet(command.prog):
        rank_zero_only.rank = machine.started_rank()  # until the Trainer knows: Lightning takes leftovers in the environment for it
        signals.install()
        signals.listen()
        try:
            (line or CommandLine)(command, list(arguments), signals=signals)
        except Exception as error:
            if not _is_meant_for_people(error):
                raise
            if Launcher.children is not None:
                Launcher.children.fail()
            started = signals.display is not None and signals.display.started
            cli.report(_one_line(error), prog=command.prog)
            return 1 if started else 2
        finally:
            signals.release()
    return 0


@contextmanager
def _own_settings() -> Iterator[None]:
    """Put back what a run sets in its process: threads, the variables for them and for seeds, and which process this is taken for."""
    names = ("OMP_NUM_THREADS", "PL_GLOBAL_SEED", "PL_SEED_WORKERS")
    variables = {name: os.environ.get(name) for name in names}
    threads, rank = torch.get_num_threads(), rank_zero_only.rank
    try:
        yield
    finally:
        for name, value in variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        torch.set_num_threads(threads)
        rank_zero_only.rank = rank


class CommandLine(LightningCLI):
    """LightningCLI for a command; see `run_command`."""

    trains = True  # whether fit writes into the output directory

    def __init__(self, command: Command, arguments: list[str], *, signals: SignalHandler) -> None:
        quote_strings()
        self.command, self.signals = command, signals
        self.output: OutputDirectory | None = None
        self.display: RunDisplay | None = None
        self.resumed: dict[str, Any] | None = None  # the checkpoint that a fit goes on from
        self.averaged: str | None = None  # what the weights of the given checkpoint are an average of
        self.checkpoints: RunCheckpoints | None = None
        try:
            super().__init__(
                command.model_class,
                command.datamodule_class,
                save_config_callback=SaveConfig,
                save_config_kwargs={"line": self},
                trainer_defaults={
                    "strategy": {"class_path": "lightning_ipu.strategy.IPUStrategy"},
                    "default_root_dir": "results",
                    "log_every_n_steps": 10,
                    "num_sanity_val_steps": 0,
                    "enable_model_summary": False,
                },
                seed_everything_default=0,
                parser_kwargs={"prog": f"python -m {command.prog}", "exit_on_error": False},
                auto_configure_optimizers=False,
                args=arguments,
            )
        finally:
            if self.output is not None:
                self.output.release()

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--precision",
            type=Literal["auto", "16.16", "16.32", "32.32", "16", "32"],
            default="auto",
            help="<compute>.<weights>; auto is 16.32 where the device is fast at bfloat16, else 32.32. Saved as it was resolved.",
        )
        parser.add_argument(
            "--half_type",
            type=Literal["bf16", "fp16"],
            default="bf16",
            help="the 16-bit type of precision 16.16 and 16.32; fp16 is for GPUs",
        )
        parser.add_argument(
            "--resume", type=bool, default=False, help="go on with the run in default_root_dir; begin it where there is none yet"
        )
        parser.add_argument(
            "--checkpoint_every", type=PositiveInt | None, default=None, help="weight updates between checkpoints; null: one per epoch"
        )
        parser.add_argument("--keep_last", type=PositiveInt, default=1, help="latest checkpoints that are kept")
        parser.add_argument(
            "--then_validate",
            type=bool,
            default=False,
            help="after fit, score the final weights, unless it ended with a validation of them, and the checkpoints made per epoch",
        )
        parser.add_argument("--then_test", type=bool, default=False, help="after fit, score the test set")
        parser.add_argument(
            "--short_options",
            type=dict | None,
            default=None,
            help="short options that this configuration was made from; --resume reads them",
        )
        parser.add_argument(f"--{COMMAND}", type=str, default=self.command.prog, help="the command that this configuration belongs to")
        parser.add_argument(
            "--epochs",
            type=PositiveFloat | None,
            help="passes over the training set, fractions allowed: with one the run ends after round(epochs x weight updates per epoch)."
            " In place of trainer.max_epochs; saved as what it comes to.",
        )
        parser.add_argument(
            "--log_interval",
            type=PositiveFloat | None,
            help="seconds between lines that say how far a run is; null is 10, and beside a terminal's moving line none",
        )
        parser.add_argument(
            "--checkpoint_input_dir",
            type=str | None,
            default=None,
            help="score every checkpoint in it, in the order of their weight updates",
        )
        parser.add_argument("--clean_dir", type=bool, default=False, help="delete checkpoints made per epoch once they have been scored")
        parser.add_argument("--wandb", type=bool, default=False, help="log to Weights & Biases as well; offline with WANDB_MODE=offline")
        parser.add_argument("--wandb_run_name", type=str | None, default=None, help="name of the run there")
        parser.add_argument("--wandb_tags", type=list[str] | None, default=None, help="tags of the run there")
        parser.add_function_arguments(set_up_machine, "machine", skip={"processes"})
        for attribute, argument in self.command.links:
            parser.link_arguments(f"data.{attribute}", f"model.{argument}", apply_on="instantiate")
        parser.add_lightning_class_args(BestCheckpoint, "checkpoint")
        parser.add_lightning_class_args(EventsPerEpoch, "events")
        parser.set_defaults(
            {
                "checkpoint.monitor": VAL_ACCURACY,
                "checkpoint.mode": "max",
                "checkpoint.filename": "best-update{step}",
                "checkpoint.auto_insert_metric_name": False,
                "checkpoint.enable_version_counter": False,  # a resumed run writes the same file again
                **self.command.defaults,
            }
        )

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse, with the settings that a given checkpoint was trained with as defaults, which configurations and typed options override."""
        self.words = list(args)
        try:
            super().parse_arguments(parser, args)
        except ArgumentError as error:
            unknown = re.search(r"does not accept option '([\w.]+)'", str(error))
            if unknown and (file := file_with(self.words, unknown[1])):
                raise MisconfigurationException(f"{file}: {unknown[1]} is no key of {self.command.prog}'s LightningCLI form") from None
            raise
        config = self.config[self.config.subcommand]
        self._check(config)
        path = config.get("ckpt_path")
        restarted = (
            machine.launcher() == "torchrun" and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        )  # torchrun starts the same command line again
        self.goes_on = self.config.subcommand == "fit" and (bool(path) or config.resume or restarted)
        if path == "last" or self.goes_on and not path:
            checkpoints = Path(config.trainer.default_root_dir) / CHECKPOINTS
            path = latest_checkpoint(checkpoints)
            if path is None:
                if self.config.subcommand != "fit":
                    raise MisconfigurationException(f"ckpt_path=last: there is no checkpoint in {checkpoints}")
                self.signals.say(f"There is nothing to resume in {checkpoints.parent}: the run begins.")
        settings_from = path
        if self.config.subcommand != "fit" and not path and config.checkpoint_input_dir:
            settings_from = latest_checkpoint(Path(config.checkpoint_input_dir))
        checkpoint = read_checkpoint(settings_from) if settings_from and Path(settings_from).is_file() else None
        if checkpoint is not None:
            self.averaged = averaging.description(checkpoint)
            if self.goes_on and averaging.OF_CHECKPOINTS in checkpoint:
                raise MisconfigurationException(
                    f"{path} is an average ({self.averaged}), with no training to go on with: resume from one of its checkpoints"
                )
            self._subcommand_parsers[self.config.subcommand].set_defaults(self._settings_in(checkpoint, settings_from))
            super().parse_arguments(parser, args)
            self._check(self.config[self.config.subcommand])
        self.ckpt_path = None if path is None else str(path)
        self.settings_from = settings_from
        if self.config.subcommand == "fit" and checkpoint is not None:
            self.resumed = checkpoint
            self._compare_settings(checkpoint, path)
        config = self.config[self.config.subcommand]
        config.ckpt_path, config.resume = None, False  # of this start, not of the run
        changing = [word for word in args if word.startswith("--") and not word.startswith(OF_A_REPLAY)]
        if changing and not any(word.startswith("--short_options") for word in changing):
            config.short_options = None  # they were another run's

    @staticmethod
    def _check(config: Any) -> None:
        """Refuse what Lightning, numpy or the system would take for something else, or die of."""
        seed = config.seed_everything
        if not isinstance(seed, bool) and not 0 <= seed <= LARGEST_SEED:
            raise MisconfigurationException(f"seed_everything={seed} must lie between 0 and {LARGEST_SEED}")
        if config.trainer.default_root_dir is None:
            raise MisconfigurationException(
                "trainer.default_root_dir=null: the results need a directory; write ./null for one of that name"
            )
        for name in PATHS:
            if (value := config.get(name)) is None:
                continue
            if not str(value).strip():
                raise MisconfigurationException(f"{name} is empty: give a path")
            config[name] = type(value)(os.path.expanduser(value))

    def _compare_settings(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        """Refuse to go on with another plan or model, and say which settings of the data are others.

        The plan comes first: a learning rate that follows from it is no cause, and would be named as one.
        """
        config, different = self.config["fit"], {}
        if (saved := checkpoint.get(KEY, {}).get("numbers")) is not None and hasattr(config.trainer.strategy, "init_args"):
            factors = {name: config.trainer.strategy.init_args[name] for name in ("replication_factor", "gradient_accumulation_factor")}
            check_numbers(saved, Plan(micro_batch_size=config.data.micro_batch_size, **factors))
        for name, before in self._settings_in(checkpoint, path).items():
            section, _, key = name.partition(".")
            now = config.get(name)
            if now == before or name in MOVABLE or section not in ("model", "data"):
                continue
            if section == "model":
                different[name] = now, before
            else:
                warnings.warn(f"the run goes on with {name} {now}; so far it was {before}", stacklevel=2)
        if different:
            now = ", ".join(f"{name} is {now}" for name, (now, _) in different.items())
            before = ", ".join(str(before) for _, before in different.values())
            raise MisconfigurationException(
                f"{now}, but the run to be resumed has {before}: give {before}, or begin a new run without resuming"
            )

    def _settings_in(self, checkpoint: dict[str, Any], path: str | Path) -> dict[str, Any]:
        """The settings that a checkpoint was trained with, by LightningCLI's keys; those of another command are refused."""
        prog, linked = self.command.prog, {argument for _, argument in self.command.links} | {"_instantiator"}
        settings = {f"model.{name}": value for name, value in checkpoint.get("hyper_parameters", {}).items() if name not in linked}
        settings |= checkpoint.get(SETTINGS, {})
        if (command := settings.get(COMMAND, prog)) != prog:
            raise MisconfigurationException(f"{path} is a checkpoint of {command}, not of {prog}: python -m {command} takes it")
        known = self._subcommand_parsers[self.config.subcommand].get_defaults()
        if unknown := [name for name in settings if name not in known]:
            raise MisconfigurationException(f"{path} is no checkpoint of {prog}, which has no setting {', '.join(unknown[:3])}")
        return settings

    def _parse_ckpt_path(self) -> None:
        """Lightning would let a checkpoint's settings override those of the command line, in silence."""

    # -- settling what was left open, before anything is built

    @override
    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        machine.forget_leftovers()  # the strategy does so itself, but where it is given as "ipu" Lightning looks for a launcher before
        if self.subcommand != "fit":  # which needs no callback's state
            warnings.filterwarnings("ignore", message=".*callbacks used to create the checkpoint need to be provided")
        if (
            self.subcommand != "fit"
            and config.data.get("index_dir")
            and not any(word.startswith("--data.index_dir") for word in self.words)
        ):
            # The run's list of its images serves again, but none is left in the directory that an evaluation happens to run in.
            folder = self.settings_from and Path(self.settings_from).parent
            config.data.index_dir = str(folder.parent) if folder and folder.name == CHECKPOINTS else None
        set_up_machine(**config.machine, processes=self._process_count(on_this_machine=True))
        accelerator = config.trainer.accelerator
        if accelerator == "auto":  # never Apple's or another device that the engine was not made for
            accelerator = "gpu" if torch.cuda.is_available() else "cpu"
        self.accelerator = accelerator
        if config.trainer.precision is not None:
            named = precision_name(str(config.trainer.precision))
            if config.precision not in ("auto", named) or (config.half_type == "fp16") > str(config.trainer.precision).startswith("16"):
                raise MisconfigurationException(
                    f"precision {config.precision} (half_type {config.half_type}) and trainer.precision {config.trainer.precision} say different"
                    " things; give one of them"
                )
            self.precision = str(config.trainer.precision)
        else:
            kind = "gpu" if accelerator in ("gpu", "cuda") else "cpu"
            config.precision = resolve(config.precision, accelerator=kind, half_type=config.half_type)
            self.precision = lightning_precision(config.precision, config.half_type)

    @override
    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        config, settings = self.config[self.subcommand], self.config_init[self.subcommand].trainer
        if hasattr(self.datamodule, "dataset_name"):
            config.data.dataset = self.datamodule.dataset_name  # a replay must not look for another one
        if getattr(self.datamodule, "classes", None):
            config.data.classes = self.datamodule.classes  # the network's outputs keep their meaning, whatever folders it meets
        facts: list[tuple[str, str]] = []
        if self.subcommand == "fit":  # an evaluation shows no table, and must not look for the training images
            facts = [*self.command.facts(self), *self._training_facts()]
            length, words = self._run_length()
            for name, value in length.items():
                config.trainer[name] = value
            config.epochs = None  # what it came to is what config.yaml keeps
            kwargs |= length
            if self.resumed is not None:
                facts.append(("resumed", f"goes on after weight update {self.resumed['global_step']:,} of {self.ckpt_path}"))
            if words:
                facts.append(("epochs", words))
        elif config.epochs is not None:
            raise MisconfigurationException(f"epochs={config.epochs:g} means nothing to {self.subcommand}, which trains nothing")
        for callback in settings.callbacks or []:
            if isinstance(callback, averaging.AveragedWeights) and self.subcommand == "fit":
                facts.append(("averaged weights", f"decay {callback.decay:g}; validated and saved: the {callback.evaluate} weights"))
        kwargs |= {"accelerator": self.accelerator, "precision": self.precision}
        if settings.devices == "auto":
            kwargs["devices"] = 1  # one process serves the whole plan, on the first device of several

        if self.subcommand == "fit" and (settings.limit_val_batches == 0 or getattr(self.datamodule, "num_validation_samples", None) == 0):
            for checkpoint in (config.checkpoint, self.config_init[self.subcommand].checkpoint):
                if (checkpoint.monitor or "").startswith("val_"):  # which nothing will log: the latest is kept, not the best
                    checkpoint.monitor, checkpoint.filename = None, "update{step}"
                    if config.keep_last > 1 or config.events.checkpoints is not None:
                        checkpoint.save_top_k = 0  # several of the latest are kept, under that name

        kwargs |= self._limit(settings)
        directory = Path(settings.default_root_dir)
        callbacks: list[Callback] = list(settings.callbacks or [])
        if settings.enable_progress_bar is not False and not any(isinstance(callback, pl.callbacks.ProgressBar) for callback in callbacks):
            self.display = RunDisplay(
                title=self.command.prog, facts=facts, val_loss=VAL_LOSS, val_accuracy=VAL_ACCURACY, log_interval=config.log_interval
            )
            self.signals.display = self.display
            callbacks.append(self.display)
        callbacks.append(SlowdownWatch())
        writes = self.subcommand == "fit" and self.trains and not settings.fast_dev_run
        own_loggers = settings.logger in (None, True)
        if own_loggers:
            kwargs["logger"] = False  # an evaluation must not write into the directory of the run that it evaluates
        if writes:
            kept = {f"data.{name}": value for name, value in config.data.as_dict().items()} | {"precision": config.precision}
            kept |= {"half_type": config.half_type, COMMAND: self.command.prog}
            fit = self.config_init[self.subcommand]
            self.checkpoints = RunCheckpoints(
                directory / CHECKPOINTS,
                every=fit.checkpoint_every,
                keep=fit.keep_last,
                signals=self.signals,
                settings=kept,
                events=fit.events,
            )
            callbacks.insert(0, self.checkpoints)  # before the display's clock goes on
        trainer = super().instantiate_trainer(callbacks=callbacks, **kwargs)
        trainer.callbacks.sort(key=lambda callback: not isinstance(callback, EventsPerEpoch))  # first: what it refuses has not begun
        if not isinstance(trainer.strategy, IPUStrategy):
            raise MisconfigurationException(
                f"trainer.strategy: {type(trainer.strategy).__name__} has no plan; this command runs under IPUStrategy"
            )
        if not trainer.is_global_zero:  # only now that is known, of the first process of another machine, too
            shown = (self.display, *(callback for callback in trainer.callbacks if isinstance(callback, SlowdownWatch)))
            trainer.callbacks = [callback for callback in trainer.callbacks if callback not in shown]
        elif writes:
            self.output = OutputDirectory(directory)
            if own_loggers:
                trainer.loggers = self._loggers(directory)
        return trainer

    def _limit(self, settings: Any) -> dict[str, float]:
        """The Trainer's limit on what is to be done; of a run that was not validated all is, now that somebody asks for it."""
        for name in ("max_epochs", "max_steps"):
            if self.subcommand == "fit" and settings[name] == 0:
                raise MisconfigurationException(f"trainer.{name}=0 trains nothing; give at least 1")
        name, what = _LIMITS[self.subcommand]
        if settings[name] != 0:
            return {}
        if self.subcommand == "fit" or any(word.startswith(f"--trainer.{name}") for word in self.words):
            raise MisconfigurationException(f"trainer.{name}=0 leaves nothing to {what}; leave it out, or give at least 1")
        return {name: 1.0}

    def _run_length(self) -> tuple[dict[str, int], str | None]:
        """The Trainer's bounds where they are not its own settings, and how many epochs the run has, in words, where it is known."""
        config, trainer, data = self.config[self.subcommand], self.config_init[self.subcommand].trainer, self.datamodule
        bounded = trainer.max_epochs is not None or trainer.max_steps != -1 or trainer.max_time is not None
        epochs = config.epochs
        if epochs is None and bounded:
            return {}, f"{trainer.max_epochs:,}" if (trainer.max_epochs or 0) > 0 else None
        if epochs is None:
            epochs, reason = self.command.epochs(data)
            return {"max_epochs": epochs}, f"{epochs:,}, {reason}" if reason else f"{epochs:,}"
        if bounded:
            raise MisconfigurationException(
                f"epochs={epochs:g} and trainer.max_epochs, max_steps or max_time say different things; give one"
            )
        if epochs == float("inf"):
            raise MisconfigurationException("epochs=inf has no end; give trainer.max_epochs=-1 for a run that is to be stopped by hand")
        if epochs == int(epochs):
            return {"max_epochs": int(epochs)}, f"{int(epochs):,}"
        if trainer.limit_train_batches not in (None, 1.0):
            raise MisconfigurationException(
                f"epochs={epochs:g}: parts of an epoch do not go with trainer.limit_train_batches; use max_steps"
            )
        if (samples := getattr(data, "num_train_samples", None)) is None:
            raise MisconfigurationException(
                f"epochs={epochs:g}: the length of an epoch of {type(data).__name__} is not known; use max_steps"
            )
        plan = trainer.strategy.plan if isinstance(trainer.strategy, IPUStrategy) else Plan()  # a strategy by its registered name
        plan = replace(plan, micro_batch_size=data.micro_batch_size)
        updates = max(1, round(epochs * plan.updates_in(samples)))
        return {"max_epochs": -1, "max_steps": updates}, f"{epochs:g}, that is {updates:,} weight updates"

    def _loggers(self, directory: Path) -> list[Logger]:
        """``metrics.csv``, and Weights & Biases where it is asked for."""
        config = self.config[self.subcommand]
        loggers: list[Logger] = [MetricsFile(directory)]
        if config.wandb:
            try:
                directory.mkdir(parents=True, exist_ok=True)
                named = {"project": self.command.prog, "name": config.wandb_run_name, "tags": config.wandb_tags}
                loggers.append(WandbLogger(save_dir=directory, config=config.as_dict(), **named))
            except ModuleNotFoundError:
                raise MisconfigurationException("wandb needs the package of that name: pip install wandb") from None
        return loggers

    def begin_output(self, config_yaml: str) -> None:
        """Make room in the output directory, now that a run really begins, and write its configuration.

        An earlier run in it is moved aside, unless it is the one that is continued: then only a different configuration is.
        """
        assert self.output is not None
        self.output.begin()
        if self.goes_on and (self.resumed is None or self.output.holds(self.ckpt_path)):
            for logger in self.trainer.loggers:
                if isinstance(logger, MetricsFile):
                    logger.go_on_after(0 if self.resumed is None else weight_updates_in(self.resumed))
        else:
            if aside := self.output.set_aside_earlier_run():
                self.signals.say(f"An earlier run was in {self.output.path}: it is in {aside} now.")
        path = self.output.path / CONFIG
        if path.exists() and path.read_text() != config_yaml:
            path.rename(free_name(path))
        write_atomically(path, config_yaml)

    def _process_count(self, *, on_this_machine: bool = False) -> int:
        """Processes that run this command: torchrun's, or as many as the Trainer starts."""
        if machine.launcher() == "torchrun":
            return int(os.environ["LOCAL_WORLD_SIZE" if on_this_machine else "WORLD_SIZE"])
        trainer = self.config[self.subcommand].trainer
        devices = max(1, int(trainer.devices)) if str(trainer.devices).isdigit() else 1  # 0 is for the Trainer to refuse
        return devices if on_this_machine else devices * trainer.num_nodes

    @property
    def short_options(self) -> dict[str, Any]:
        """The short options that the run was started with, also where its configuration is replayed."""
        return self.config[self.subcommand].short_options or {}

    def machine_facts(self) -> list[tuple[str, str]]:
        """Rows for the table: the device and the precision."""
        if self.accelerator == "cpu":
            threads = torch.get_num_threads()
            device = f"CPU, {threads} thread{'s' if threads > 1 else ''}"
        else:
            device = torch.cuda.get_device_name() if torch.cuda.is_available() else self.accelerator
        name = precision_name(self.precision)
        processes = [("processes", f"{count}")] if (count := self._process_count()) > 1 else []
        return [("device", device), *processes, ("precision", f"{name} (Trainer: {self.precision})" if name else self.precision)]

    def _training_facts(self) -> list[tuple[str, str]]:
        """Rows for the table: how the weights are moved, from which seed, and where the results go."""
        options, config = self.model.hparams, self.config[self.subcommand]
        return [
            ("optimizer", options.optimizer),
            ("learning rate", f"{options.learning_rate:g} at its peak, schedule {options.schedule}"),
            ("seed", "none" if config.seed_everything is False else f"{config.seed_everything}"),
            ("output directory", config.trainer.default_root_dir),
        ]

    # -- what follows

    def fit(self, **arguments: Any) -> None:
        """Lightning's ``fit``, from the checkpoint that `parse_arguments` has found."""
        self.trainer.fit(**{**arguments, "ckpt_path": self.ckpt_path})

    def after_fit(self) -> None:
        if self.resumed is not None and self.checkpoints is not None and not self.checkpoints.trained:
            done = f"{counted(self.trainer.global_step, 'weight update')}, {counted(self.trainer.current_epoch, 'epoch')}"
            self._close([f"already complete: {done} in {self.ckpt_path}; nothing was changed"])
            return
        final = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        validated = self.display is not None and self.display.validated_at == self.trainer.global_step
        validates = self.config.fit.then_validate and self.trainer.limit_val_batches != 0
        scored_below = validates and not self.config.fit.checkpoint_input_dir and self.trainer.global_step in self._made_per_epoch()
        if scored_below or not self.trainer.strategy.broadcast(validated):
            final.pop(VAL_LOSS, None), final.pop(VAL_ACCURACY, None)
            if validates and not scored_below:
                scores = self.trainer.validate(self.model, datamodule=self.datamodule, verbose=False)
                final = scores[0] if scores else {}
        self._close(
            closing_lines(throughput=self.display and self.display.throughput, accuracy=final.get(VAL_ACCURACY), loss=final.get(VAL_LOSS))
        )
        if self.config.fit.then_test:
            scores = self._only(self.trainer.test(self.model, datamodule=self.datamodule, verbose=False), "test")
            lines = closing_lines(accuracy=scores.get("test_accuracy"), loss=scores.get("test_loss"))
            self._close([f"test {line}" for line in lines])
        if validates:  # last, since it leaves other weights behind
            rows = self._score_checkpoints()
            if scored_below:
                self._close(closing_lines(accuracy=rows[-1].get(VAL_ACCURACY), loss=rows[-1].get(VAL_LOSS)))
        self._close(self._places())
        if note := self.command.note(self):
            self._close([note])

    def _places(self) -> list[str]:
        """Where a training has left what, in one line."""
        if self.output is None or self.checkpoints is None:
            return []
        last, best = self.checkpoints.directory / LAST, self.trainer.checkpoint_callback
        parts = [f"last checkpoint {last}"] if last.exists() else []
        if isinstance(best, BestCheckpoint) and best.monitor is not None and best.best_model_path:
            if (path := self.checkpoints.directory / Path(best.best_model_path).name).exists():
                parts.append(f"best {path} ({best.monitor} {float(best.best_model_score):.4f})")
        return [f"results in {self.output.path}{': ' if parts else ''}{', '.join(parts)}"]

    def validate(self, **arguments: Any) -> None:
        """Lightning's ``validate`` with this command's closing lines in place of its table."""
        if self.ckpt_path is None and self._score_checkpoints():
            self._close_evaluation([])
            return
        self._warn_of_random_weights()
        scores = self._only(self.trainer.validate(**{**arguments, "ckpt_path": self.ckpt_path, "verbose": False}), "validate")
        self._close_evaluation(closing_lines(accuracy=scores.get(VAL_ACCURACY), loss=scores.get(VAL_LOSS)))

    def test(self, **arguments: Any) -> None:
        """Lightning's ``test`` with this command's closing lines in place of its table."""
        self._warn_of_random_weights()
        scores = self._only(self.trainer.test(**{**arguments, "ckpt_path": self.ckpt_path, "verbose": False}), "test")
        self._close_evaluation(closing_lines(accuracy=scores.get("test_accuracy"), loss=scores.get("test_loss")))

    def predict(self, **arguments: Any) -> None:
        """Lightning's ``predict``; what it returns is saved in ``predictions.pt``, in the order of the data, an earlier file aside."""
        self._warn_of_random_weights()
        if self.trainer.is_global_zero:
            check_writable(self.trainer.default_root_dir)
        batches = self.trainer.predict(**{**arguments, "ckpt_path": self.ckpt_path, "return_predictions": True})
        self._only(batches, "predict")
        tensors = bool(batches) and all(isinstance(batch, torch.Tensor) for batch in batches)
        predictions = torch.cat(batches) if tensors else batches
        path = Path(self.trainer.default_root_dir) / "predictions.pt"
        if self.trainer.is_global_zero:
            if path.exists():
                path.rename(free_name(path))
            with atomic_write(path) as file:
                torch.save(predictions, file)
            if tensors and hasattr(self.datamodule, "write_predictions"):
                self.datamodule.write_predictions(predictions, path.with_suffix(".csv"))
        shape = " x ".join(map(str, predictions.shape)) if tensors else f"{len(batches)} batches"
        self._close_evaluation([f"predictions: {path} ({shape})"])

    def _only(self, results: Sequence[Any] | None, what: str) -> Any:
        """What an evaluation of the one loader gave; an error where the data had nothing to evaluate."""
        if not results:
            raise MisconfigurationException(f"there is nothing to {what}: {self.datamodule.description} has no samples for it")
        return results[0]

    def _score_checkpoints(self) -> list[dict[str, Any]]:
        """Validate all checkpoints in ``checkpoint_input_dir``, or those that the run made per epoch: a table, ``validation.csv``, and rows."""
        config, made = self.config[self.subcommand], self._made_per_epoch()
        paths = list(made.values())
        if (folder := config.checkpoint_input_dir) is not None:
            if not Path(folder).is_dir():
                raise MisconfigurationException(f"checkpoint_input_dir: there is no directory {folder}")
            paths = sorted(Path(folder).glob("*.ckpt"))
            if not paths:
                warnings.warn(f"there is no checkpoint (*.ckpt) in {folder}", stacklevel=2)
        if paths and self.trainer.is_global_zero:
            check_writable(self.trainer.default_root_dir)
        rows: list[dict[str, Any]] = []
        loggers = self.trainer.loggers
        for updates, epochs, path in stages_of(paths):
            is_final = updates == self.trainer.global_step and path in made.values()
            self.trainer.loggers = loggers if is_final else []  # whose x axis stands at the run's end
            scores = self._only(
                self.trainer.validate(self.model, datamodule=self.datamodule, ckpt_path=str(path), verbose=False), "validate"
            )
            rows.append({"step": updates, "epochs": epochs, "checkpoint": path.name, **scores})
        self.trainer.loggers = loggers
        if rows and self.trainer.is_global_zero:
            path = write_scores(Path(self.trainer.default_root_dir), rows)
            Console().print(score_table(rows))
            self._close([f"the same in {path}"])
        if rows and config.clean_dir and self.trainer.is_global_zero:
            for path in made.values():
                path.unlink()
        return rows

    def _made_per_epoch(self) -> dict[int, Path]:
        """The checkpoints that the run has kept for their frequency per epoch, by their weight updates."""
        kept = self.checkpoints is not None and self.checkpoints.events.checkpoints is not None
        return self.checkpoints.numbered() if kept else {}

    def _warn_of_random_weights(self) -> None:
        if self.ckpt_path is None and not getattr(self.model, "pretrained", None):
            warnings.warn(f"{self.subcommand} without --ckpt_path: the weights are RANDOM, not trained", stacklevel=2)

    def _close_evaluation(self, lines: list[str]) -> None:
        note = self.command.note(self)
        weights = [f"weights: {self.averaged}"] if self.averaged else []
        self._close([*weights, *lines, *([note] if note else [])])

    def _close(self, lines: list[str]) -> None:
        if lines and self.trainer.is_global_zero:
            print("\n".join(lines), flush=True)


class SaveConfig(SaveConfigCallback):
    """Writes ``config.yaml`` when training begins: a run that was refused before that must not touch what is there."""

    def __init__(self, *args: Any, line: CommandLine, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.line = line

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Nothing yet."""

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.line.output is not None and trainer.is_global_zero:
            if trainer.strategy.stage_costs:  # stages that were chosen by measurement stay where they are in a replay
                self.config.trainer.strategy.init_args.pipeline_splits = trainer.strategy.pipeline_splits
            self.line.begin_output(self.parser.dump(self.config, skip_none=False))


def set_up_machine(threads: int | None = None, keep_freed_memory: bool = True, *, processes: int = 1) -> None:
    """Make the settings that move the speed and no number, before anything big is allocated.

    Args:
        threads: threads of one operation; null is OMP_NUM_THREADS, or this process's share of the cores that it may use.
        keep_freed_memory: tell glibc to keep big blocks of memory instead of handing them back to the system.
        processes: that share this machine's cores.
    """
    if keep_freed_memory:
        machine.keep_freed_memory()
    machine.set_threads(threads, processes=processes)


# -- messages -----------------------------------------------------------------------------------------------------------------

_MISFIT = "Error(s) in loading state_dict"  # how torch begins when a checkpoint is another network's

_CHATTER = (
    "does not have many workers",  # data sets here are whole in memory: workers would slow them down
    "could not find the monitored key",  # a run that ended before its first validation
    "is smaller than the logging interval",  # every epoch logs its average
    "exists and is not empty",  # what was there has been moved aside
    "args parameter is intended to run from within Python",
    "Consider setting `persistent_workers=True`",
    "samples are left out of every epoch",  # the table says so
    "host steps hold at most",  # so it does
    "Total length of `list` across ranks is zero",  # no validation was asked for
    "isinstance(treespec, LeafSpec)",  # a note from torch to Lightning
)


@contextmanager
def keep_quiet(prog: str) -> Iterator[None]:
    """Silence Lightning's remarks on devices, tips and sanity; show warnings as one line each."""

    def wanted(record: logging.LogRecord) -> bool:
        lightnings_own = {"pytorch_lightning", "lightning_fabric"} & set(Path(record.pathname).parts)
        return record.levelno > logging.INFO or not (lightnings_own or any(words in record.getMessage() for words in _CHATTER))

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: str | None = None
    ) -> None:
        print(f"{prog}: warning: {' '.join(str(message).split())}", file=file or sys.stderr)

    names = ("pytorch_lightning", "lightning_fabric", "lightning.pytorch", "lightning.fabric")
    handlers = [handler for name in names for handler in logging.getLogger(name).handlers]
    with ExitStack() as undo:
        for handler in handlers:
            if type(handler) is logging.StreamHandler:  # Lightning's own, not one that somebody listens with
                handler.addFilter(wanted)
                undo.callback(handler.removeFilter, wanted)
        undo.enter_context(warnings.catch_warnings())
        for words in _CHATTER:
            warnings.filterwarnings("ignore", message=f".*{re.escape(words)}")
        warnings.showwarning = show
        if hasattr(sys.stdout, "reconfigure"):  # names of files may hold bytes that are no text: they are shown, as on stderr, not refused
            undo.callback(sys.stdout.reconfigure, errors=sys.stdout.errors)
            sys.stdout.reconfigure(errors="backslashreplace")
        yield


def _is_meant_for_people(error: Exception) -> bool:
    """Whether the error was raised on purpose, by this project or Lightning, about something that its user can put right.

    A ValueError that a slip of ours caused deep in torch, or by a faulty expression here, is not: that needs its traceback.
    """
    if isinstance(error, (MisconfigurationException, ArgumentError)) or str(error).startswith(_MISFIT):
        return True
    if _missing_package(error) is not None:
        return True
    if isinstance(error, OSError):
        return error.filename is not None or _raised_here(error)
    return isinstance(error, ValueError) and _raised_here(error)


def _missing_package(error: Exception) -> str | None:
    """What a class that a configuration names says of a package that it needs and that is not installed."""
    named, cause = re.search(r"Problem with given class_path '([\w.]+)'", str(error)), error
    while named and cause is not None:
        if isinstance(cause, ModuleNotFoundError):
            return f"{named[1]}: {cause}"
        cause = cause.__cause__ or cause.__context__
    return None


def _raised_here(error: Exception) -> bool:
    """Whether a ``raise`` statement in this project's packages or in Lightning made the error."""
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    package = trace.tb_frame.f_globals.get("__name__", "").partition(".")[0]
    by_statement = trace.tb_frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return by_statement and (package.endswith("_ipu") or package in ("pytorch_lightning", "lightning_fabric", "__main__"))


def _one_line(error: Exception) -> str:
    if str(error).startswith(_MISFIT):
        return f"the checkpoint does not fit the network: {textwrap.shorten(str(error).splitlines()[1], 160)}"
    return " ".join((_missing_package(error) or str(error)).split()) or type(error).__name__
