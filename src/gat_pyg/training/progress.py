"""Epoch metrics as a CSV file and as a progress line."""

from __future__ import annotations

import csv
import io
import logging
import math
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from ..files import add, write_whole
from ..tasks.objective import Objective
from ..terminal import CLEAR, columns
from .stopping import PaperStopping

QUIET = (  # messages of libraries that need no action here
    "There is a performance drop because we have not yet implemented the batching rule",  # torch, of a stack
    r".*LeafSpec.* is deprecated",
    r"The '(train|val|test)_dataloader' does not have many workers",
    r"Sparse CSR tensor support is in beta state",
    r"No (positive|negative) samples in targets",  # torchmetrics, of a few rows: the score is NaN
)


@contextmanager
def quiet() -> Iterator[None]:
    """Context manager: hide Lightning's banners and tips, and the warnings listed in `QUIET`."""
    names = ("lightning.pytorch", "lightning.fabric", "lightning")
    loggers = {name: logging.getLogger(name) for name in names}
    levels = {name: logger.level for name, logger in loggers.items()}
    with warnings.catch_warnings():
        for message in QUIET:
            warnings.filterwarnings("ignore", message)
        try:
            for logger in loggers.values():
                logger.setLevel(logging.WARNING)
            yield
        finally:
            for name, logger in loggers.items():
                logger.setLevel(levels[name])


class _Lines:
    """The lines of a file of metrics: whole lines are appended about once a second."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = 0
        self._columns: list[str] = []
        self._buffer = io.StringIO()
        self._flushed = float("-inf")

    def begin(self) -> None:
        """Discard lines newer than the checkpoint."""
        if not self.path.is_file():
            return
        lines = self.path.read_bytes().splitlines(keepends=True)[: self.rows + 1]
        if self.rows == 0 or len(lines) < self.rows + 1:
            lines = []  # a run from the start, or a checkpoint of another run
        self._columns = next(csv.reader([lines[0].decode()]), []) if lines else []
        write_whole(self.path, lambda beside: beside.write_bytes(b"".join(lines)))

    def add(self, epoch: int, values: Mapping[str, float]) -> None:
        """Add an epoch's line."""
        self.rows += 1
        writer = csv.writer(self._buffer, lineterminator="\n")
        if not self._columns:
            self._columns = ["epoch", *sorted(values)]
            writer.writerow(self._columns)
        row = {"epoch": epoch, **values}
        writer.writerow([f"{row[column]:.7g}" if column in row else "" for column in self._columns])
        if time.monotonic() - self._flushed > 1.0:
            self.flush()

    def flush(self) -> None:
        """Write the lines that are left."""
        self._flushed = time.monotonic()
        if text := self._buffer.getvalue():
            with self.path.open("ab", buffering=0) as file:
                add(file.fileno(), text.encode(), self.path)
            self._buffer = io.StringIO()


class MetricsFile(Callback):
    """One line of `metrics.csv` per epoch: its number, counted from 1, and all logged metrics.

    Whole lines are appended about once a second and before each checkpoint, so the file has every epoch of the
    checkpoint. A resumed run removes the lines of later epochs, which it will write again.

    Args:
        paths: the file; for a stack of models, which overrides `on_train_epoch_end`, that of each of them.
    """

    def __init__(self, *paths: str | Path) -> None:
        self.files = [_Lines(Path(path)) for path in paths]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Discard lines newer than the checkpoint."""
        for file in self.files if trainer.is_global_zero else ():
            file.begin()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Add the epoch's line."""
        if trainer.is_global_zero:
            metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
            self.files[0].add(trainer.current_epoch + 1, metrics)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Write all buffered lines, so that the file has every epoch of the checkpoint."""
        self.on_train_end(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the last lines."""
        for file in self.files:
            file.flush()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write the remaining lines; an error in this does not replace the first one."""
        with suppress(OSError):
            self.on_train_end(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of lines of each file, for the checkpoint."""
        return {"rows": [file.rows for file in self.files]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after a checkpoint's lines."""
        for file, number in zip(self.files, state_dict["rows"], strict=True):
            file.rows = number


# Progress ----------------------------------------------------------------------------------------------------------

WIDTH = 80  # columns that every terminal has


class Progress(Callback):
    """One line of progress: epoch, loss, validation score, the epochs that patience has left, time.

    On a terminal, the line is rewritten a few times a second. It has the fields that fit, in at most 79
    columns: a row that wraps, since it is too long or the window became narrower, would not be cleared.
    Otherwise a new line is printed every `every` seconds.
    """

    def __init__(self, title: str, every: float = 10.0) -> None:
        self.title = title
        self._live = sys.stderr.isatty()
        self._period = 0.2 if self._live else every
        self._next = 0.0
        self._speed: tuple[float, int] = (0.0, 0)
        self._shown: Mapping[str, Tensor] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._next = now = time.monotonic()  # prints the first epoch immediately
        self._speed = now, trainer.current_epoch

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Print the progress within a long epoch."""
        if trainer.num_training_batches > 1 and trainer.is_global_zero and time.monotonic() >= self._next:
            batch = trainer.fit_loop.epoch_loop.batch_progress.current.ready
            self._show(trainer, f" batch {batch}/{trainer.num_training_batches}")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the metrics of an epoch."""
        if not trainer.is_global_zero:
            return
        due = time.monotonic() >= self._next
        if due or trainer.num_training_batches > 1:  # the next line may be printed within the next epoch
            self._shown = dict(trainer.callback_metrics)
        if due:
            self._show(trainer, "")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Clear the line."""
        if self._live and trainer.is_global_zero:
            print(CLEAR, end="", file=sys.stderr, flush=True)

    def parts(self, trainer: Trainer, batch: str) -> list[str]:
        """Return the fields of the line."""
        parts = [self.title, f"epoch {trainer.current_epoch + 1}{batch}"]
        if "train_loss" in self._shown:
            parts.append(f"loss {self._shown['train_loss']:.3g}")
        objective = getattr(trainer.lightning_module, "objective", None)
        if isinstance(objective, Objective) and (name := f"val_{objective.metric.name}") in self._shown:
            score = float(self._shown[name])
            parts.append(f"val {objective.metric.range(score, score)}")
        for rule in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(rule, PaperStopping):
                parts.append(_ending(rule, trainer.current_epoch + 1, trainer.max_epochs))
        return parts

    def seconds_per_epoch(self, trainer: Trainer) -> float | None:
        """Return the mean seconds per epoch since the start, or None in the first epoch."""
        start, first = self._speed
        return (time.monotonic() - start) / (trainer.current_epoch - first) if trainer.current_epoch > first else None

    def _show(self, trainer: Trainer, batch: str) -> None:
        parts = self.parts(trainer, batch)
        if (seconds := self.seconds_per_epoch(trainer)) is not None:
            parts.append(f"{_seconds(seconds)}/epoch")
        if self._live:
            print(f"{CLEAR}{fitted(parts, min(columns(sys.stderr), WIDTH) - 1)}", end="", file=sys.stderr, flush=True)
        else:
            print("  ".join(parts), file=sys.stderr, flush=True)
        self._next = time.monotonic() + self._period


def fitted(parts: Sequence[str], width: int) -> str:
    """Return the first of the fields that fit into a width; if the first one does not, its beginning.

    >>> fitted(["cora", "epoch 12", "loss 0.58"], 16), fitted(["cora"], 3)
    ('cora  epoch 12', 'cor')
    """
    text = parts[0][:width]
    for part in parts[1:]:
        if len(text) + 2 + len(part) > width:
            break
        text += f"  {part}"
    return text


def _ending(rule: PaperStopping, epoch: int, max_epochs: int | None) -> str:
    """Return the epochs without improvement that are left, or `max_epochs` if the training ends there before.

    `epoch` counts from 1. `max_epochs` is None or -1 if there is no limit.

    >>> _ending(PaperStopping(patience=100), epoch=7, max_epochs=-1), _ending(PaperStopping(), epoch=7, max_epochs=9)
    ('patience 100/100', 'ends at 9')
    """
    if max_epochs not in (None, -1) and max_epochs - epoch < rule.left:
        return f"ends at {max_epochs}"
    return f"patience {rule.left}/{rule.patience}" if rule.patience < math.inf else "ends when stopped"


def _seconds(seconds: float) -> str:
    number, unit = (seconds, "s") if seconds >= 1 else (seconds * 1e3, "ms")
    return f"{number:.{1 if number < 10 else 0}f} {unit}"
