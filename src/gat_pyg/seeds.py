"""Many seeds of one model trained as one: each as it would be alone, the shared graph read once for all."""

from __future__ import annotations

import copy
import gc
import itertools
import logging
import math
import signal
import statistics
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TypeVar

import torch
from lightning import Trainer, seed_everything
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch_geometric.data import Data

from .batches import TaskData, sparse_pays
from .data import Task
from .ranks import say
from .stack import Stack
from .training import (
    SCORES,
    Criterion,
    MetricsFile,
    PaperStopping,
    Progress,
    Resumable,
    Transductive,
    handled,
    key_of,
    metrics_of,
    node_sums,
    told,
    train_sums,
)

T = TypeVar("T")

LEAVE = 0.1  # the share of the stack that has to have stopped before those leave it: a smaller stack costs a copy
ROOM = {"cpu": 1 << 30}  # bytes of a pass that are enough: beyond, a CPU gains nothing
SHARE = 0.8  # of the free memory, for what is estimated

QUIET = (  # what Lightning and torch say of themselves, and of a loader that is right here as it is
    r".*LeafSpec.* is deprecated",
    r"The '(train|val|test)_dataloader' does not have many workers",
    r"Sparse CSR tensor support is in beta state",
)


# The stack as Lightning sees it -------------------------------------------------------------------------------------


class Stacked(Transductive):
    """`Transductive` for S models at once: the loss is the sum of their losses, so that each gets its own gradients.

    Adam acts on each number alone, so each model takes the steps that it would take by itself. With dropout of
    gat_pyg's layers too: it follows from the model's seed and the epoch. That of `F.dropout` in other layers is drawn
    for all at once, from the seed of the first: each model has masks of its own, which depend on its place.

    `seeds` names the rows of the stack, `metrics` holds what the last validation or test gave for each.
    """

    model: Stack

    def __init__(
        self,
        models: Sequence[nn.Module],
        seeds: Sequence[int],
        lr: float = 0.005,
        weight_decay: float = 0.0,
        cuda_graphs: bool | Literal["auto"] = "auto",
    ) -> None:
        super().__init__(Stack(models), lr, weight_decay, cuda_graphs)
        self._look_at(models[0])
        self.seeds = list(seeds)
        self.metrics: list[dict[str, float]] = []

    def begin_epoch(self, seed: int, epoch: int) -> None:
        """Let each model's dropout depend on its own seed and the epoch alone, whatever ``seed`` is."""
        self._hold(torch.tensor([key_of(own, epoch) for own in self.seeds]))

    def forward(self, data: Data) -> Tensor:
        """The logits [S, N, K] of a graph's nodes."""
        out: Tensor
        if self._key is None or not self.training:
            out = self.model.each(lambda model: self._given(model, data))
        else:
            out = self.model.each(lambda model, key: self._drawn(model, data, key), self._key)
        return out

    def _loss(self, data: Data) -> tuple[Tensor, Tensor]:
        """The sum of the losses, and what the epoch adds up for each: (loss, known) [S, 2]."""
        data = self._seen(data, "train")
        out = self(data)
        loss, sums = vmap(train_sums, (0, None))(*self.labelled(out, data, "train"))
        if self._penalty is not None:
            loss = loss + self.model.each(lambda model, out: model.method("penalty", out, data), out)
        return loss.sum(), sums

    def _counts(self, data: Data, split: Any) -> Tensor:
        data = self._seen(data, split)
        sums: Tensor = vmap(node_sums, (0, None))(*self.labelled(self(data), data, split))
        return sums

    def _metrics(self, *splits: str) -> dict[str, float]:
        """Turn the sums into each model's metrics; what Lightning is told is their mean."""
        sums = self._pooled(*splits)
        self.metrics = [metrics_of(dict(zip(sums, own, strict=True))) for own in zip(*sums.values(), strict=True)]
        return {name: statistics.fmean(own[name] for own in self.metrics) for name in self.metrics[0]}

    def keep(self, seeds: Sequence[int]) -> None:
        """Let the models of all other seeds leave, with what the optimizer knows of them."""
        places = [self.seeds.index(seed) for seed in seeds]
        rows = torch.tensor(places, device=self.device)
        self.model.select(rows)
        for optimizer in self.trainer.optimizers if self._trainer else ():
            for state in optimizer.state.values():
                state |= {key: value.index_select(0, rows) for key, value in state.items() if value.dim() > 0}
        self.seeds = list(seeds)
        self.metrics = [self.metrics[place] for place in places] if self.metrics else []
        self._key = None
        self._captured.clear()

    def fill(self, weights: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Become the models of these seeds, with these weights."""
        self.model.fill(list(weights.values()))
        self.seeds = list(weights)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Note whose the rows are."""
        checkpoint["seeds"] = list(self.seeds)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Let those leave that had left; ValueError where the checkpoint is of other seeds or shapes."""
        there = checkpoint.get("seeds", [])
        if not there or not set(there) <= set(self.seeds):
            raise ValueError(
                f"The checkpoint is of the seeds {there or 'of no stack'}, this stack of {self.seeds}. Resume with the "
                "settings that the run was started with, or start anew without ckpt_path."
            )
        self.keep(there)
        super().on_load_checkpoint(checkpoint)


# When each stops, and what is left of it ----------------------------------------------------------------------------


class EachStopping(Callback):
    """`PaperStopping` for each seed of a stack: its rule, its best weights and its seconds.

    Seeds that have stopped leave the stack as soon as they are a share ``leave`` of it. After the fit the module is the
    stack of all seeds again, each with the weights that its rule kept last.

    A seed's share of an epoch's seconds is that of the seeds still running, so that over all seeds they add up to the
    time that went by. Raises ValueError as `PaperStopping` does.
    """

    def __init__(
        self,
        seeds: Iterable[int],
        patience: int = 100,
        criterion: Criterion = "both",
        leave: float = LEAVE,
    ) -> None:
        self.rules = {seed: PaperStopping(patience, criterion) for seed in seeds}
        self.leave = leave
        self.seconds = dict.fromkeys(self.rules, 0.0)
        self.kept: dict[str, Tensor] = {}  # the best weights of the seeds in the stack, [S, ...]
        self.left: dict[int, dict[str, Tensor]] = {}  # those of the seeds that have left, on the CPU
        self._clock = 0.0

    def running(self) -> list[int]:
        """The seeds that have not stopped."""
        return [seed for seed, rule in self.rules.items() if rule.left > 0]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock, and stop at once when a resumed run had come to its end."""
        self.kept = {key: value.to(pl_module.device) for key, value in self.kept.items()}
        self._clock = time.perf_counter()
        trainer.should_stop = trainer.should_stop or not self.running()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Apply each seed's rule to its validation."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        module = _stacked(pl_module)
        now = time.perf_counter()
        running = set(self.running())
        better = []
        for row, (seed, metrics) in enumerate(zip(module.seeds, module.metrics, strict=True)):
            if seed not in running:
                continue
            rule = self.rules[seed]
            score = next(metrics[f"val_{name}"] for name in SCORES if f"val_{name}" in metrics)
            if rule.update(score, metrics["val_loss"]) or not rule.best_epoch:  # until one is kept, the last ones are
                better.append(row)
            if not math.isfinite(metrics["val_loss"]):
                parameters = (value[row] for value in module.parameters() if value.requires_grad)
                rule.stop_diverged(parameters, f"Seed {seed}")
            self.seconds[seed] += (now - self._clock) / len(running)
        self._keep(module, better)
        self._clock = now
        trainer.should_stop = trainer.should_stop or not self.running()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let those that have stopped leave, where they are enough."""
        module = _stacked(pl_module)
        running = [seed for seed in module.seeds if self.rules[seed].left > 0]
        gone = len(module.seeds) - len(running)
        if running and gone and gone >= self.leave * len(module.seeds):
            self._part(module, [seed for seed in module.seeds if seed not in running])
            rows = torch.tensor([module.seeds.index(seed) for seed in running], device=module.device)
            self.kept = {key: value.index_select(0, rows) for key, value in self.kept.items()}
            module.keep(running)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the weights kept last back into the module, in the order of the seeds."""
        module = _stacked(pl_module)
        if self.kept:
            self._part(module, module.seeds)
            module.fill({seed: self.left[seed] for seed in self.rules})
            self.kept = {}
        if never := [seed for seed, rule in self.rules.items() if rule.epoch and not rule.best_epoch]:
            rank_zero_warn(
                f"Seeds {', '.join(map(str, never))}: no epoch was kept, since the validation loss or score was not "
                "finite in any. The weights are those of the last epoch. A smaller lr may help."
            )

    @torch.no_grad()
    def _keep(self, module: Stacked, rows: list[int]) -> None:
        """Take the weights of these rows as the best ones of their seeds."""
        weights = module.model.weights()
        if not self.kept:
            self.kept = {key: value.clone() for key, value in weights.items()}
        elif rows:
            copy_rows = _copy_each_row if module.device.type == "cpu" else _copy_all_rows
            copy_rows(self.kept, weights, rows)

    def _part(self, module: Stacked, seeds: Sequence[int]) -> None:
        """Take the best weights of some seeds out of the stack's."""
        rows = [module.seeds.index(seed) for seed in seeds]
        index = torch.tensor(rows, device=module.device)
        taken = {key: value.index_select(0, index).cpu() for key, value in self.kept.items()}
        for row, seed in enumerate(seeds):
            self.left[seed] = {key: value[row].clone() for key, value in taken.items()}

    def state_dict(self) -> dict[str, Any]:
        """All of it, for the checkpoint."""
        rules = {seed: rule.state_dict() for seed, rule in self.rules.items()}
        return {"rules": rules, "seconds": dict(self.seconds), "kept": self.kept, "left": self.left}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint's state."""
        for seed, state in state_dict["rules"].items():
            self.rules[seed].load_state_dict(state)
        self.seconds, self.kept, self.left = (dict(state_dict[key]) for key in ("seconds", "kept", "left"))


def _copy_each_row(to: Mapping[str, Tensor], source: Mapping[str, Tensor], rows: Sequence[int]) -> None:
    """Copy some rows one by one, which on a CPU takes a sixth of the time of `index_select`."""
    for row, (key, value) in itertools.product(rows, source.items()):
        to[key][row].copy_(value[row])


def _copy_all_rows(to: Mapping[str, Tensor], source: Mapping[str, Tensor], rows: Sequence[int]) -> None:
    """Copy some rows with one kernel per tensor, since launching one per row takes a GPU longer."""
    first = next(iter(to.values()))
    mask = torch.zeros(first.size(0), dtype=torch.bool).index_fill_(0, torch.tensor(rows), True).to(first.device)
    for key, value in to.items():
        torch.where(mask.view(-1, *[1] * (value.dim() - 1)), source[key], value, out=value)


def _stacked(module: LightningModule) -> Stacked:
    if not isinstance(module, Stacked):
        raise TypeError(f"{type(module).__name__} is no stack of seeds, expected gat_pyg.seeds.Stacked.")
    return module


class EachMetrics(Callback):
    """A `MetricsFile` for each seed, with the epochs until it stopped. It comes before `EachStopping`."""

    def __init__(self, paths: Mapping[int, str | Path], stopping: EachStopping) -> None:
        self.files = {seed: MetricsFile(path) for seed, path in paths.items()}
        self.stopping = stopping

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the lines that the checkpoint knows of."""
        for file in self.files.values():
            file.on_train_start(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Add the epoch's line of each seed that took part."""
        module, epoch = _stacked(pl_module), trainer.current_epoch + 1
        for seed, metrics in zip(module.seeds, module.metrics, strict=True):
            if self.stopping.rules[seed].epoch == epoch:
                self.files[seed].add(epoch, metrics)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Write the lines that the checkpoint will know of."""
        for file in self.files.values():
            file.on_save_checkpoint(trainer, pl_module, checkpoint)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the last lines."""
        for file in self.files.values():
            file.on_train_end(trainer, pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write what there is."""
        for file in self.files.values():
            file.on_exception(trainer, pl_module, exception)

    def state_dict(self) -> dict[str, Any]:
        """How many lines each has, for the checkpoint."""
        return {"files": {seed: file.state_dict() for seed, file in self.files.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on behind a checkpoint's lines."""
        for seed, state in state_dict["files"].items():
            self.files[seed].load_state_dict(state)


class EachProgress(Progress):
    """One line that tells the epoch, the seeds running and stopped, the spread of their validation, the time left."""

    def __init__(self, title: str, stopping: EachStopping, every: float = 10.0) -> None:
        super().__init__(title, every)
        self.stopping = stopping

    def parts(self, trainer: Trainer, batch: str) -> list[str]:
        """What the line tells."""
        module, rules = _stacked(trainer.lightning_module), self.stopping.rules
        running = [(rules[seed], own) for seed, own in zip(module.seeds, module.metrics, strict=True)]
        running = [(rule, own) for rule, own in running if rule.left > 0]
        parts = [f"{self.title}: epoch {trainer.current_epoch + 1}"]
        parts.append(f"{len(running)} running, {len(rules) - len(running)} stopped")
        for name in SCORES:
            if running and f"val_{name}" in running[0][1]:
                scores = [own[f"val_{name}"] for _, own in running]
                low, high = told(name, min(scores)), told(name, max(scores))
                spread = low if low == high else f"{low.removesuffix(' %')} to {high.split(' ', 1)[1]}"
                parts.append(f"val {spread}")
        if running and (seconds := self.seconds_per_epoch(trainer)):
            epochs = max(rule.left for rule, _ in running)  # each better epoch adds to it
            epochs = min(epochs, trainer.max_epochs - trainer.current_epoch - 1) if trainer.max_epochs else epochs
            parts.append(f"at least {_duration(seconds * epochs)} left")
        return parts


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


# How many at once ---------------------------------------------------------------------------------------------------


def in_passes(left: Callable[[], Sequence[int]], size: int, one_pass: Callable[[list[int]], object]) -> None:
    """Call ``one_pass(seeds)`` with ``size`` of the seeds that ``left()`` tells until there are none.

    Where memory runs out, go on with half as many at a time and say so. Raises what ``one_pass`` raises otherwise.
    """
    while seeds := list(left())[:size]:
        try:
            one_pass(seeds)
        except Exception as error:
            if len(seeds) == 1 or not out_of_memory(error):
                raise
            size = -(-len(seeds) // 2)
            say(f"Memory does not suffice for {len(seeds)} seeds at once: going on with {size}")
        gc.collect()  # a trainer and its module hold each other, and with them the memory


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory has run out, on a GPU or on the CPU."""
    words = ("can't allocate memory", "not enough memory", "out of memory", "alloc_failed")
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
    )


def free_memory(device: torch.device) -> int | None:
    """The bytes that are free for more, as the device, or on a CPU the system and its control groups, say; else None.

    >>> free_memory(torch.device("cpu")) != 0
    True
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if device.type != "cpu":
        return None
    found = []
    with suppress(OSError, ValueError, KeyError):
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        found.append(1024 * int(lines["MemAvailable"].split()[0]))
    for limit, used, groups in _GROUPS:
        for folder in groups():
            with suppress(OSError, ValueError):  # no such file; "max", which is no number
                taken = int((folder / used).read_text()) - _cached(folder)
                found.append(max(int((folder / limit).read_text()) - taken, 1))
    return min(found, default=None)


def _cached(folder: Path) -> int:
    """The bytes that a control group uses for files, and that it gives back when they are needed."""
    with suppress(OSError, ValueError):
        lines = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return sum(int(lines.get(f"{state}_file", 0)) for state in ("active", "inactive"))
    return 0


def _group_folders(root: str, controller: str) -> Callable[[], Iterator[Path]]:
    """This process's control group and those around it."""

    def folders() -> Iterator[Path]:
        with suppress(OSError):
            for line in Path("/proc/self/cgroup").read_text().splitlines():
                _, controllers, path = line.split(":", 2)
                if controller in controllers.split(","):
                    own = Path(root, path.lstrip("/"))
                    yield from (own, *(folder for folder in own.parents if folder.is_relative_to(root)))

    return folders


_GROUPS = (
    ("memory.max", "memory.current", _group_folders("/sys/fs/cgroup", "")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", _group_folders("/sys/fs/cgroup/memory", "memory")),
)


class Peak(TorchDispatchMode):
    """The most bytes that the tensors of all operations within it held at once, what they were given included.

    What a kernel has made outside of torch is seen when the next operation is given it. So that what was there before
    does not count, let the same operations run twice, with ``start_over()`` between.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._now = self._most = self._before = 0
        self._known: set[int] = set()

    @property
    def bytes(self) -> int:
        """The most since the last start."""
        return self._most - self._before

    def start_over(self) -> None:
        """Count from here on what comes on top of what there is."""
        self._most = self._before = self._now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in _plain_tensors((args, kwargs, out)):
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self._known:
                self._known.add(key)
                self._now += size
                self._most = max(self._most, self._now)
                weakref.finalize(storage, self._freed, key, size)
        return out

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._now -= size


def _plain_tensors(tree: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
            with suppress(NotImplementedError, RuntimeError):  # a wrapper around others has no storage
                leaf.untyped_storage()
                yield leaf


@dataclass(frozen=True)
class Fit:
    """Whether a model can be stacked, or ``why_not``, and the bytes that a seed takes at most."""

    why_not: str | None = None
    each: int = 0

    def seeds(self, device: torch.device, wanted: int, free: int | None = None) -> int:
        """How many of the seeds wanted to train at once: what fits the memory and is of use, in equal passes.

        >>> Fit(each=1000).seeds(torch.device("cpu"), 10, free=4_000)
        3
        """
        free = free_memory(device) if free is None else free
        rooms = [room for room in (free and int(SHARE * free), ROOM.get(device.type)) if room is not None]
        passes = -(-wanted // max(1, min([wanted, *(room // max(self.each, 1) for room in rooms)])))
        return -(-wanted // passes)


def why_not_by(trainer: Trainer) -> str | None:
    """Why a trainer cannot train seeds as one, or None."""
    if trainer.gradient_clip_val:
        return "gradients would be clipped over all seeds"
    if not str(trainer.precision).endswith("-true"):
        return f"precision is {trainer.precision}, whose scale would be that of all seeds"
    if trainer.check_val_every_n_epoch != 1:
        return f"validation is every {trainer.check_val_every_n_epoch} epochs, and the rule of each looks at every one"
    return None


@contextmanager
def _heeded() -> Iterator[None]:
    """Interrupt what is within it, and at its end once more: a compiler's callbacks may lose what is raised in them."""
    came: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        came.append(number)
        raise KeyboardInterrupt

    try:
        with handled(interrupt):
            yield
    finally:
        if came:
            signal.raise_signal(came[0])


@_heeded()
def trial(models: Sequence[nn.Module], data: Data, device: torch.device | str = "cpu") -> Fit:
    """Try two models or more on the data as a stack.

    Each has to give what it gives by itself, and an epoch and a test have to run. Their peak of memory by the number of
    models is more than a seed will take beside others, who share a part; weights and optimizer come on top.
    """
    if hasattr(models[0], "fit"):
        return Fit("it fits itself")
    try:
        module = Stacked(models, range(len(models))).to(device)
        data = data.clone().to(device)
        module.eval()
        with torch.no_grad():
            for model, one in zip(models, module(data), strict=True):
                alone = module._given(copy.deepcopy(model).to(device).eval(), data)
                largest = float(alone.abs().nan_to_num(posinf=0.0).max())
                if not torch.allclose(one, alone, rtol=0.01, atol=0.01 * largest, equal_nan=True):
                    return Fit("in a stack it does not give what it gives by itself")
        module.begin_epoch(0, 0)
        with Peak() as peak:
            for _ in range(2):  # what is built or compiled at first is no part of it
                peak.start_over()
                module.train()
                module._loss(data)[0].backward()
                module.zero_grad()
                module.eval()
                with torch.no_grad():
                    for split in ("val", "test"):
                        module._counts(data, split)
    except Exception as error:
        if out_of_memory(error):
            return Fit(f"memory does not suffice for {len(models)} seeds")
        return Fit(f"torch.func.vmap cannot stack it ({' '.join(str(error).split())[:300]})")
    weights = sum(value.nbytes for value in module.model.weights().values())
    return Fit(None, (peak.bytes + 4 * weights) // len(models))  # the parameters, Adam's two moments, those kept


# Without the command ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What came out of one seed: ``value`` and ``val`` are the test and the validation score of the weights kept."""

    seed: int
    metric: str  # "accuracy" in percent, or "micro_f1"
    value: float
    val: float
    epochs: int
    best_epoch: int  # counted from 1
    seconds: float


def outcomes(module: Stacked, stopping: EachStopping) -> list[Outcome]:
    """What came out of each seed, after the fit and the test of the stack."""
    found = []
    for seed, metrics in zip(module.seeds, module.metrics, strict=True):
        rule = stopping.rules[seed]
        metric = next(name for name in SCORES if f"test_{name}" in metrics)
        scores = metrics[f"test_{metric}"], rule.kept_score
        found.append(Outcome(seed, metric, *scores, rule.epoch, rule.best_epoch, stopping.seconds[seed]))
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """Keep Lightning's banners and tips from the screen; its warnings stay, but for those in ``QUIET``."""
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


@quiet()
def train(
    make_model: Callable[[], nn.Module],
    task: Task,
    seeds: Iterable[int] = range(10),
    *,
    lr: float = 0.005,
    weight_decay: float = 0.0,
    patience: int = 100,
    criterion: Criterion = "both",
    max_epochs: int = 100_000,
    seeds_per_pass: int | Literal["auto"] = "auto",
    progress: bool = True,
    **trainer: Any,
) -> tuple[list[Outcome], Stack]:
    """Train the model with every seed, as many at once as fit memory; the outcomes and the stack of trained models.

    ``make_model()`` is called after `seed_everything(s)`: seed s starts from the weights that it has in a single run,
    and takes the same steps but for rounding, where dropout is that of gat_pyg's layers. Each stops by the paper's
    rule, and the stack has the weights that were kept last.

    Args:
        make_model: gives a fresh model, called as `Transductive` calls one.
        task: a task of one graph.
        seeds: each a number from 0 to 2^32 - 1.
        lr, weight_decay: as of `Transductive`.
        patience, criterion: as of `PaperStopping`.
        max_epochs: where a seed ends that has not stopped.
        seeds_per_pass: how many to train at once; "auto" asks the device for its memory.
        progress: whether to tell how it goes.
        **trainer: of Lightning's Trainer, for a single device; its callbacks come before those of the stack.

    Raises:
        ValueError: if the task has many graphs, the models are one and the same or cannot be stacked, the trainer would
            treat seeds as one or start processes, or a number is none that can be: the message says why.

    Example:
        >>> import gat_pyg.data, gat_pyg.models
        >>> make = lambda: gat_pyg.models.GAT(64, [8], 10, heads=[8, 1], dropout=0.6)
        >>> found, stack = train(make, gat_pyg.data.digits(), range(2), max_epochs=1, progress=False)
        >>> [one.seed for one in found], len(stack)
        ([0, 1], 2)
    """
    seeds = list(seeds)
    if not seeds or len(set(seeds)) < len(seeds) or not all(0 <= seed < 2**32 for seed in seeds):
        raise ValueError(f"seeds are {seeds}, expected at least one, from 0 to 2^32 - 1, and none twice.")
    if seeds_per_pass != "auto" and seeds_per_pass < 1:
        raise ValueError(f"seeds_per_pass is {seeds_per_pass}, expected 'auto' or a number of seeds, at least 1.")
    if not task.transductive:
        raise ValueError(f"{task.name} has many graphs, and seeds are stacked on one. Train them one by one.")

    def models(some: Sequence[int]) -> list[nn.Module]:
        return [seeded(seed, make_model) for seed in some]

    options: dict[str, Any] = {
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        **trainer,
    }
    given = options.pop("callbacks", None) or []
    alone = Trainer(**options)
    if alone.world_size > 1:
        raise ValueError(f"The trainer has {alone.world_size} processes, expected one: each would train all seeds.")
    if why_not := why_not_by(alone):
        raise ValueError(f"Seeds cannot be trained as one: {why_not}. Train them one by one.")
    device = alone.strategy.root_device
    tried = models((seeds * 2)[:2])
    if {id(weight) for weight in tried[0].parameters()} & {id(weight) for weight in tried[1].parameters()}:
        raise ValueError("make_model() gave the weights that it had given before, expected a fresh model at each call.")
    sparse = sparse_pays(task, tried[0], device.type, stacked=True)
    fit = trial(tried, next(iter(TaskData(task, sparse=sparse).train_dataloader())), device)
    if fit.why_not:
        raise ValueError(f"{type(tried[0]).__name__} cannot be stacked: {fit.why_not}. Train its seeds one by one.")
    found: dict[int, Outcome] = {}
    trained: dict[int, nn.Module] = {}

    def one_pass(some: list[int]) -> None:
        module = Stacked(models(some), some, lr, weight_decay)
        stopping = EachStopping(some, patience, criterion)
        callbacks: list[Callback] = [given] if isinstance(given, Callback) else list(given)
        callbacks += [stopping, Resumable(None, some[0])]
        callbacks += [EachProgress(f"{task.name}, {len(some)} seeds", stopping)] if progress else []
        data = TaskData(task, sparse=sparse)
        loop = Trainer(max_epochs=max_epochs, callbacks=callbacks, **options)
        loop.fit(module, datamodule=data)
        loop.test(module, datamodule=data, verbose=False)
        module.cpu()
        for place, outcome in enumerate(outcomes(module, stopping)):
            found[outcome.seed], trained[outcome.seed] = outcome, module.model[place].eval()

    size = fit.seeds(device, len(seeds)) if seeds_per_pass == "auto" else seeds_per_pass
    in_passes(lambda: [seed for seed in seeds if seed not in found], size, one_pass)
    return [found[seed] for seed in seeds], Stack([trained[seed] for seed in seeds]).eval()


def seeded(seed: int, make_model: Callable[[], T]) -> T:
    """What is made at the start of a run with this seed, which `seed_everything` takes.

    >>> seeded(3, lambda: torch.rand(2)).equal(seeded(3, lambda: torch.rand(2)))
    True
    """
    seed_everything(seed, workers=True, verbose=False)
    return make_model()
