"""What a run leaves behind: its output directory, kept from other runs, and ``metrics.csv``."""

from __future__ import annotations

import csv
import io
import itertools
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from pytorch_lightning.loggers.logger import Logger
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from typing_extensions import override

from lightning_ipu.files import OutputDirectoryError, atomic_write, named_when_full, writing_to

try:
    import fcntl
except ImportError:  # not a POSIX system: directories are then not locked
    fcntl = None  # type: ignore[assignment]

CONFIG, METRICS, CHECKPOINTS, SCORES = "config.yaml", "metrics.csv", "checkpoints", "validation.csv"
TRAIN_REPORT, EVAL_REPORT = "train_report.txt", "eval_report.txt"


class OutputDirectory:
    """The one directory that a run writes to, locked against other runs on this machine until `release`.

    Raises OutputDirectoryError where the directory cannot be made or written, or is in use.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with writing_to(self.path):
            self._lock: IO[str] = open(self.path / ".lock", "a+")  # noqa: SIM115 - held until the process ends
        if fcntl is not None:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._lock.seek(0)
                holder = self._lock.read().strip()
                self._lock.close()
                raise OutputDirectoryError(
                    f"the output directory {self.path} is in use by {f'process {holder}' if holder else 'another process'};"
                    " choose another one or wait until it has ended"
                ) from None
            except OSError:  # a file system without locks: the run is worth more than its protection
                pass

    def begin(self) -> None:
        """Write this process's id into the lock file, for the messages of other runs."""
        with named_when_full(self.path / ".lock"):
            os.ftruncate(self._lock.fileno(), 0)
            os.write(self._lock.fileno(), f"{os.getpid()}\n".encode())

    def release(self) -> None:
        """Unlock the directory."""
        self._lock.close()

    def set_aside_earlier_run(self) -> Path | None:
        """Move what an earlier run left here into ``earlier-1``, ``earlier-2``, ...; returns that directory, None if there was nothing.

        Only the names that a run writes are moved; other files stay where they are.
        """
        found = [name for name in self._written_names() if (self.path / name).exists()]
        if not found:
            return None
        aside = free_name(self.path / "earlier")
        aside.mkdir()
        for name in found:
            (self.path / name).rename(aside / name)
        return aside

    def _written_names(self) -> list[str]:
        patterns = ("config-*.yaml", "validation-*.csv", "*_report-*.txt")
        kept = [path.name for pattern in patterns for path in sorted(self.path.glob(pattern))]
        return [CONFIG, METRICS, CHECKPOINTS, SCORES, TRAIN_REPORT, EVAL_REPORT, *kept]

    def holds(self, path: str | Path) -> bool:
        """Whether ``path`` lies inside this directory."""
        return self.path.resolve() in Path(path).resolve().parents


class MetricsFile(Logger):
    """Lightning logger that appends one row per weight update to ``metrics.csv``; a column is added with the first value of its name.

    Everything logged at one step (a training step, the validation after it, the epoch's averages) shares a row, so ``step``, the number of
    weight updates, is strictly increasing. A row is written once its step is over, at every checkpoint and at the end.
    """

    def __init__(self, directory: str | Path) -> None:
        super().__init__()
        self._directory = Path(directory)
        self._file: IO[str] | None = None
        self._columns: list[str] = []
        self._row: dict[str, Any] = {}  # of the step that is not over
        self._last_step: int | None = None  # of the rows in the file
        self._kept_until: int | None = None  # step from which on rows of an earlier start are cut off

    @property
    def path(self) -> Path:
        return self._directory / METRICS

    @property
    @override
    def name(self) -> str:
        return ""  # with an empty version: Lightning puts checkpoints straight into save_dir/checkpoints

    @property
    @override
    def version(self) -> str:
        return ""

    @property
    @override
    def save_dir(self) -> str:
        return str(self._directory)

    @override
    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: config.yaml and the checkpoints hold them."""

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add values to the row of ``step`` (weight updates); without a step, to the row that is open."""
        if step is None:
            step = self._row.get("step", 0)
        if self._file is None:
            self._open()
        if self._row and step > self._row["step"]:
            self._write_row()
        if not self._row and self._last_step is not None and step <= self._last_step:
            self._amend(step, metrics)
        elif self._row and step < self._row["step"]:
            self._amend(step, metrics)
        else:
            self._row.update(metrics, step=step)

    def go_on_after(self, updates: int) -> None:
        """The run resumes after so many weight updates: rows of later ones are removed as soon as something is logged."""
        self._kept_until = updates

    def flush(self) -> None:
        """Write the row that is open; more may still be added to it."""
        self._write_row()

    @override
    @rank_zero_only
    def finalize(self, status: str) -> None:
        self._write_row()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._columns, rows = self._read() if self.path.exists() else (["step", "epoch"], [])
        kept = [row for row in rows if self._kept_until is None or int(row["step"]) < self._kept_until]
        self._kept_until = None  # done: rows that come from now on are this run's
        self._rewrite(kept)
        self._last_step = int(kept[-1]["step"]) if kept else None

    def _write_row(self) -> None:
        if not self._row:
            return
        row, self._row = self._row, {}
        if new := [name for name in row if name not in self._columns]:
            self._columns += new
            self._rewrite(self._read()[1])
        assert self._file is not None
        try:
            with named_when_full(self.path):
                csv.writer(self._file).writerow([_text(row.get(name)) for name in self._columns])
                self._file.flush()
        except OSError:
            with suppress(OSError):  # it would try once more
                self._file.close()
            self._file = None
            raise
        self._last_step = row["step"]

    def _amend(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add values to a row that is written already."""
        self._columns += [name for name in metrics if name not in self._columns]
        rows = {int(row["step"]): row for row in self._read()[1]}
        rows.setdefault(step, {"step": str(step)}).update({name: _text(value) for name, value in metrics.items()})
        self._rewrite([rows[key] for key in sorted(rows)])

    def _read(self) -> tuple[list[str], list[dict[str, str]]]:
        with self.path.open(newline="") as file:
            reader = csv.DictReader(file)
            rows = [row for row in reader if None not in row.values()]  # a run that was killed may leave half a line
            return list(reader.fieldnames or ["step", "epoch"]), rows

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        """Replace the file by one with all columns; a reader sees the old file or the new one, never a part."""
        if self._file is not None:
            self._file.close()
            self._file = None
        text = io.StringIO()
        csv.writer(text).writerows([self._columns, *([row.get(name) or "" for name in self._columns] for row in rows)])
        with atomic_write(self.path, "w") as file:
            file.write(text.getvalue())
        self._file = self.path.open("a", newline="")


def write_scores(directory: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write what checkpoints scored to ``validation.csv``, one row for each; an earlier file is moved aside."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows({name: value if isinstance(value, str) else _text(value) for name, value in row.items()} for row in rows)
    path = directory / SCORES
    set_aside(path)
    with atomic_write(path, "w") as file:
        file.write(text.getvalue())
    return path


def free_name(path: Path) -> Path:
    """The first of ``name-1.suffix``, ``name-2.suffix``, ... that does not exist."""
    return next(place for n in itertools.count(1) if not (place := path.with_name(f"{path.stem}-{n}{path.suffix}")).exists())


def set_aside(path: Path) -> None:
    """Rename a file, if there is one, to a free name."""
    if path.exists():
        path.rename(free_name(path))


def _text(value: Any) -> str:
    if value is None:
        return ""
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else f"{float(value):.8g}"
