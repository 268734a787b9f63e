"""One run of a command: LightningCLI with this package's defaults, output directory, display and ways to end.

The short form of a command and its ``fit validate test predict`` both end here, so that both build the same objects.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from jsonargparse import ArgumentError, Namespace
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.cli import LightningArgumentParser, SaveConfigCallback
from pytorch_lightning.loggers import Logger, WandbLogger
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from typing_extensions import override

from lightning_ipu import machine
from lightning_ipu.command import once
from lightning_ipu.command.arguments import add_arguments, check_settings, set_up_machine
from lightning_ipu.command.configs import COMMAND, quote_strings
from lightning_ipu.command.display import RunDisplay
from lightning_ipu.command.lifecycle import RunCheckpoints, SignalHandler, latest_checkpoint
from lightning_ipu.command.messages import is_meant_for_people, keep_quiet, one_line
from lightning_ipu.command.output import CHECKPOINTS, CONFIG, MetricsFile, OutputDirectory, free_name
from lightning_ipu.command.own_classes import clear_error, with_own_classes
from lightning_ipu.command.run_length import limit, run_length
from lightning_ipu.command.saved_settings import compare_settings, settings_in
from lightning_ipu.command.scoring import VAL_ACCURACY, VAL_LOSS, Scoring
from lightning_ipu.command.slowdown import SlowdownWatch
from lightning_ipu.command.words import file_with
from lightning_ipu.errors import UserError
from lightning_ipu.files import atomic_write, read_checkpoint
from lightning_ipu.loop.events import EventsPerEpoch
from lightning_ipu.loop.launcher import Launcher
from lightning_ipu.loop.position import weight_updates_in
from lightning_ipu.precision.names import lightning_precision, name_and_type, resolve
from lightning_ipu.recipe import averaging
from lightning_ipu.strategy import IPUStrategy

OF_A_REPLAY = ("--config", "--resume", "--ckpt_path", "--trainer.default_root_dir")


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
        settle: completes the data module's settings, before anything is built.
        defaults: of LightningCLI's keys, where they are not those of all commands.
        own: which of "model" and "data" are any classes, given by their paths; see `own_classes`.
    """

    prog: str
    model_class: type[pl.LightningModule]
    datamodule_class: type[pl.LightningDataModule]
    links: Sequence[tuple[str, str]]
    facts: Callable[[CommandLine], list[tuple[str, str]]]
    epochs: Callable[[pl.LightningDataModule], tuple[int, str | None]]
    note: Callable[[CommandLine], str | None]
    settle: Callable[[Namespace], None] = lambda data: None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    own: frozenset[str] = frozenset()


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
            (line or CommandLine)(with_own_classes(command, arguments), list(arguments), signals=signals)
        except Exception as error:
            if not is_meant_for_people(error):
                raise
            if Launcher.children is not None:
                Launcher.children.fail()
            started = signals.display is not None and signals.display.started
            once.report(one_line(error), prog=command.prog)
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


class CommandLine(Scoring):
    """LightningCLI for a command; see `run_command`."""

    trains = True  # whether fit writes into the output directory

    def __init__(self, command: Command, arguments: list[str], *, signals: SignalHandler) -> None:
        quote_strings()
        self.command, self.signals, self.words = command, signals, arguments
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
                subclass_mode_model="model" in command.own,
                subclass_mode_data="data" in command.own,
                auto_configure_optimizers=False,
                args=arguments,
            )
        finally:
            if self.output is not None:
                self.output.release()

    @override
    def subcommands(self) -> dict[str, set[str]]:
        """The one that is asked for, which is the first word: all four parsers would take a third of a second more of every start."""
        return {name: skipped for name, skipped in super().subcommands().items() if name == self.words[0]}

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        self.parser_in_use = parser  # the one subcommand's
        add_arguments(parser, prog=self.command.prog, links=self.command.links, defaults=self.command.defaults)

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse, with the settings that a given checkpoint was trained with as defaults, which configurations and typed options override."""
        try:
            super().parse_arguments(parser, args)
        except ArgumentError as error:
            unknown = re.search(r"does not accept option '([\w.]+)'", str(error))
            if unknown and (file := file_with(self.words, unknown[1])):
                raise UserError(f"{file}: {unknown[1]} is no key of {self.command.prog}'s LightningCLI form") from None
            raise clear_error(error) or error from None
        config = self.config[self.config.subcommand]
        check_settings(config)
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
                    raise UserError(f"ckpt_path=last: there is no checkpoint in {checkpoints}")
                self.signals.say(f"There is nothing to resume in {checkpoints.parent}: the run begins.")
        settings_from = path
        if self.config.subcommand != "fit" and not path and config.checkpoint_input_dir:
            settings_from = latest_checkpoint(Path(config.checkpoint_input_dir))
        checkpoint = read_checkpoint(settings_from) if settings_from and Path(settings_from).is_file() else None
        if checkpoint is not None:
            self.averaged = averaging.description(checkpoint)
            if self.goes_on and averaging.OF_CHECKPOINTS in checkpoint:
                raise UserError(
                    f"{path} is an average ({self.averaged}), with no training to go on with: resume from one of its checkpoints"
                )
            known, settings = self.parser_in_use.get_defaults(), self._settings_in(checkpoint, settings_from)
            self.parser_in_use.set_defaults({name: value for name, value in settings.items() if name in known})
            super().parse_arguments(parser, args)
            check_settings(self.config[self.config.subcommand])
        self.ckpt_path = None if path is None else str(path)
        self.settings_from = settings_from
        if self.config.subcommand == "fit" and checkpoint is not None:
            self.resumed = checkpoint
            compare_settings(self.config["fit"], checkpoint, self._settings_in(checkpoint, path))
        config = self.config[self.config.subcommand]
        config.ckpt_path, config.resume = None, False  # of this start, not of the run; Lightning would let its settings override typed ones
        changing = [word for word in args if word.startswith("--") and not word.startswith(OF_A_REPLAY)]
        if changing and not any(word.startswith("--short_options") for word in changing):
            config.short_options = None  # they were another run's

    def _settings_in(self, checkpoint: dict[str, Any], path: str | Path) -> dict[str, Any]:
        known = self.parser_in_use.get_defaults()
        return settings_in(checkpoint, path, prog=self.command.prog, links=self.command.links, known=known, own=self.command.own)

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
        self.command.settle(config.data)
        set_up_machine(**config.machine, processes=self._process_count(on_this_machine=True))
        accelerator = config.trainer.accelerator
        if accelerator == "auto":  # never Apple's or another device that the engine was not made for
            accelerator = "gpu" if torch.cuda.is_available() else "cpu"
        self.accelerator = accelerator
        if config.trainer.precision is not None:
            named, half_type = name_and_type(str(config.trainer.precision))
            if config.precision not in ("auto", named) or (config.half_type == "fp16") > (half_type == "fp16"):
                raise UserError(
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
        if "data" not in self.command.own:
            config.data.dataset = self.datamodule.dataset_name  # a replay must not look for another one
            if getattr(self.datamodule, "classes", None):
                config.data.classes = self.datamodule.classes  # the network's outputs keep their meaning, whatever folders it meets
        length, facts = self._length_and_facts(settings)
        self._watch_nothing_unlogged(settings)
        kwargs |= {**length, "accelerator": self.accelerator, "precision": self.precision, **limit(self.subcommand, settings, self.words)}
        if settings.devices == "auto":
            kwargs["devices"] = 1  # one process serves the whole plan, on the first device of several
        writes = self.subcommand == "fit" and self.trains and not settings.fast_dev_run
        own_loggers = settings.logger in (None, True)
        if own_loggers:
            kwargs["logger"] = False  # an evaluation must not write into the directory of the run that it evaluates
        trainer = super().instantiate_trainer(callbacks=self._callbacks(settings, facts, writes=writes), **kwargs)
        trainer.callbacks.sort(key=lambda callback: not isinstance(callback, EventsPerEpoch))  # first: what it refuses has not begun
        if not isinstance(trainer.strategy, IPUStrategy):
            raise UserError(f"trainer.strategy: {type(trainer.strategy).__name__} has no plan; this command runs under IPUStrategy")
        if not trainer.is_global_zero:  # only now that is known, of the first process of another machine, too
            shown = (self.display, *(callback for callback in trainer.callbacks if isinstance(callback, SlowdownWatch)))
            trainer.callbacks = [callback for callback in trainer.callbacks if callback not in shown]
        elif writes:
            self.output = OutputDirectory(settings.default_root_dir)
            if own_loggers:
                trainer.loggers = self._loggers(self.output.path)
        return trainer

    def _length_and_facts(self, settings: Namespace) -> tuple[dict[str, int], list[tuple[str, str]]]:
        """The Trainer's bounds and the table's rows; an evaluation has neither, and must not look for the training images."""
        config = self.config[self.subcommand]
        if self.subcommand != "fit":
            if config.epochs is not None:
                raise UserError(f"epochs={config.epochs:g} means nothing to {self.subcommand}, which trains nothing")
            return {}, []
        facts = [*self.command.facts(self), *self._training_facts()]
        length, words = run_length(settings, self.datamodule, epochs=config.epochs, usual=self.command.epochs)
        for name, value in length.items():
            config.trainer[name] = value
        config.epochs = None  # config.yaml keeps the Trainer's bounds that follow from it
        if self.resumed is not None:
            facts.append(("resumed", f"goes on after weight update {self.resumed['global_step']:,} of {self.ckpt_path}"))
        if words:
            facts.append(("epochs", words))
        for callback in settings.callbacks or []:
            if isinstance(callback, averaging.AveragedWeights):
                facts.append(("averaged weights", f"decay {callback.decay:g}; validated and saved: the {callback.evaluate} weights"))
        return length, facts

    def _watch_nothing_unlogged(self, settings: Namespace) -> None:
        """Where nothing is validated, keep the latest checkpoint instead of the best by a value that nothing will log."""
        if self.subcommand != "fit":  # nothing is saved, and the validation images may be none of its business
            return
        config = self.config[self.subcommand]
        if settings.limit_val_batches != 0 and getattr(self.datamodule, "num_validation_samples", None) != 0:
            return
        for checkpoint in (config.checkpoint, self.config_init[self.subcommand].checkpoint):
            if (checkpoint.monitor or "").startswith("val_"):
                checkpoint.monitor, checkpoint.filename = None, "update{step}"
                if config.keep_last > 1 or config.events.checkpoints is not None:
                    checkpoint.save_top_k = 0  # several of the latest are kept, under that name

    def _callbacks(self, settings: Namespace, facts: list[tuple[str, str]], *, writes: bool) -> list[Callback]:
        """The user's callbacks, and this command's own: checkpoints, display, the watch for slow phases."""
        config = self.config[self.subcommand]
        callbacks: list[Callback] = list(settings.callbacks or [])
        if settings.enable_progress_bar is not False and not any(isinstance(callback, pl.callbacks.ProgressBar) for callback in callbacks):
            self.display = RunDisplay(
                title=self.command.prog, facts=facts, val_loss=VAL_LOSS, val_accuracy=VAL_ACCURACY, log_interval=config.log_interval
            )
            self.signals.display = self.display
            callbacks.append(self.display)
        callbacks.append(SlowdownWatch())
        if writes:
            kept = {} if "data" in self.command.own else {f"data.{name}": value for name, value in config.data.as_dict().items()}
            kept |= {"precision": config.precision, "half_type": config.half_type, COMMAND: self.command.prog}
            fit = self.config_init[self.subcommand]
            self.checkpoints = RunCheckpoints(
                Path(settings.default_root_dir) / CHECKPOINTS,
                every=fit.checkpoint_every,
                keep=fit.keep_last,
                signals=self.signals,
                settings=kept,
                events=fit.events,
            )
            callbacks.insert(0, self.checkpoints)  # before the display's clock goes on
        return callbacks

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
                raise UserError("wandb needs the package of that name: pip install wandb") from None
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
        with atomic_write(path, "w") as file:
            file.write(config_yaml)

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
        name, _ = name_and_type(self.precision)
        processes = [("processes", f"{count}")] if (count := self._process_count()) > 1 else []
        return [("device", device), *processes, ("precision", f"{name} (Trainer: {self.precision})" if name else self.precision)]

    def _training_facts(self) -> list[tuple[str, str]]:
        """Rows for the table: how the weights are moved, from which seed, and where the results go."""
        options, config = self.model.hparams, self.config[self.subcommand]
        recipe = []
        if "model" not in self.command.own:
            rate = f"{options.learning_rate:g} at its peak, schedule {options.schedule}"
            recipe = [("optimizer", options.optimizer), ("learning rate", rate)]
        return [
            *recipe,
            ("seed", "none" if config.seed_everything is False else f"{config.seed_everything}"),
            ("output directory", config.trainer.default_root_dir),
        ]


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
