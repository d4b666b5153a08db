"""Memory of a stack of models: a trial, an estimate per seed, and passes that fit in memory."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning import Trainer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch_geometric.data import Batch, Data

from ..distributed.ranks import rank_zero_print
from ..tasks.model import members
from ..tasks.objective import Objective
from ..tasks.task import Task
from ..training.loading import TaskData
from ..training.signals import _interruptible
from .module import Stacked, StackedInductive

CPU_BUDGET = 1 << 30  # bytes of a pass on a CPU, which gains nothing from larger ones
SHARE = 0.8  # of the free memory that a pass may take by the estimate


def in_passes(left: Callable[[], Sequence[int]], size: int, one_pass: Callable[[list[int]], object]) -> None:
    """Call `one_pass(seeds)` with `size` seeds at a time until `left()` returns none.

    If memory runs out, print a message and continue with half as many. Other errors of `one_pass` are raised.
    """
    while seeds := list(left())[:size]:
        try:
            one_pass(seeds)
        except Exception as error:
            if len(seeds) == 1 or not out_of_memory(error):
                raise
            size = -(-len(seeds) // 2)
            rank_zero_print(f"Memory does not suffice for {len(seeds)} seeds at once: going on with {size}")
        gc.collect()  # a trainer and its module refer to each other, and so keep their memory


def out_of_memory(error: BaseException) -> bool:
    """Return True if an error means that memory has run out, on a GPU or on the CPU."""
    phrases = ("can't allocate memory", "not enough memory", "out of memory", "alloc_failed")
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and any(phrase in str(error).lower() for phrase in phrases)
    )


def free_memory(device: torch.device) -> int | None:
    """Return the free bytes of the device, or on a CPU of the system and its control groups; None if unknown.

    >>> free_memory(torch.device("cpu")) != 0
    True
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if device.type != "cpu":
        return None
    limits = []
    with suppress(OSError, ValueError, KeyError):
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        limits.append(1024 * int(lines["MemAvailable"].split()[0]))
    for limit, usage, groups in _GROUPS:
        for folder in groups():
            with suppress(OSError, ValueError):  # no such file, or the text "max"
                used = int((folder / usage).read_text()) - _cached(folder)
                limits.append(max(int((folder / limit).read_text()) - used, 1))
    return min(limits, default=None)


def _cached(folder: Path) -> int:
    """Return the bytes of a control group's file cache, which the system frees on demand."""
    with suppress(OSError, ValueError):
        lines = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return sum(int(lines.get(f"{state}_file", 0)) for state in ("active", "inactive"))
    return 0


def _group_folders(root: str, controller: str) -> Callable[[], Iterator[Path]]:
    """Return a function that yields the folders of this process's control group and of the groups that contain it."""

    def folders() -> Iterator[Path]:
        with suppress(OSError):
            for line in Path("/proc/self/cgroup").read_text().splitlines():
                _, controllers, path = line.split(":", 2)
                if controller in controllers.split(","):
                    group = Path(root, path.lstrip("/"))
                    yield from (group, *(folder for folder in group.parents if folder.is_relative_to(root)))

    return folders


_GROUPS = (
    ("memory.max", "memory.current", _group_folders("/sys/fs/cgroup", "")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", _group_folders("/sys/fs/cgroup/memory", "memory")),
)


class Peak(TorchDispatchMode):
    """Context manager: measures the peak memory of the tensors that torch operations read or return.

    Memory that a kernel allocates outside of torch counts from the next operation that reads it. To leave out memory
    that was allocated before, run the same operations twice, with `start_over()` in between.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._now = self._peak = self._start = 0
        self._known: set[int] = set()

    @property
    def bytes(self) -> int:
        """The peak since the last start, in bytes."""
        return self._peak - self._start

    def start_over(self) -> None:
        """Start a new measurement: only memory allocated from now on counts."""
        self._peak = self._start = self._now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in _plain_tensors((args, kwargs, out)):
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self._known:
                self._known.add(key)
                self._now += size
                self._peak = max(self._peak, self._now)
                weakref.finalize(storage, self._freed, key, size)
        return out

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._now -= size


def _plain_tensors(tree: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
            with suppress(NotImplementedError, RuntimeError):  # a wrapper subclass has no storage
                leaf.untyped_storage()
                yield leaf


@dataclass(frozen=True)
class MemoryEstimate:
    """The result of a trial: the reason that models cannot be stacked, or None, and a bound on a seed's memory."""

    obstacle: str | None = None
    bytes_per_seed: int = 0

    def seeds(self, device: torch.device, count: int, free: int | None = None) -> int:
        """Return how many of `count` seeds to train at once: as many as fit in memory, in passes of equal size.

        >>> MemoryEstimate(bytes_per_seed=1000).seeds(torch.device("cpu"), 10, free=4_000)
        3
        """
        free = free_memory(device) if free is None else free
        budgets = [] if free is None else [int(SHARE * free)]
        budgets += [CPU_BUDGET] if device.type == "cpu" else []
        largest = min([count, *(budget // max(self.bytes_per_seed, 1) for budget in budgets)])
        passes = -(-count // max(1, largest))
        return -(-count // passes)


def trainer_obstacle(trainer: Trainer) -> str | None:
    """Return the reason that a trainer cannot train several seeds as one, or None."""
    if trainer.gradient_clip_val:
        return "gradients would be clipped over all seeds"
    if not str(trainer.precision).endswith("-true"):
        return f"precision is {trainer.precision}, whose scale would be that of all seeds"
    if trainer.check_val_every_n_epoch != 1:
        return f"validation is every {trainer.check_val_every_n_epoch} epochs, and the stopping rule needs each epoch"
    return None


@_interruptible()
def trial(
    models: Sequence[nn.Module], objective: Objective, data: Data, device: torch.device | str = "cpu"
) -> MemoryEstimate:
    """Try to train two or more models as a stack, on a graph that all splits share or a batch of graphs.

    Each output must be that of the model alone, and an epoch and a test must run. Their peak memory divided by the
    number of models is an upper bound for a seed, since seeds share some of it; weights and optimizer are added.
    """
    if members(models[0]).fit is not None:
        return MemoryEstimate("it has a fit method of its own")
    try:
        kind = StackedInductive if isinstance(data, Batch) else Stacked
        module = kind(models, range(len(models)), objective).to(device)
        data = data.clone().to(device)
        module.eval()
        with torch.no_grad():
            for model, out in zip(models, module(data), strict=True):
                alone = module._call_model(copy.deepcopy(model).to(device).eval(), data)
                largest = float(alone.abs().nan_to_num(posinf=0.0).max())
                if not torch.allclose(out, alone, rtol=0.01, atol=0.01 * largest, equal_nan=True):
                    return MemoryEstimate("its outputs in a stack differ from those of the model alone")
        module.begin_epoch(0, 0)
        with Peak() as peak:
            for _ in range(2):  # what is built or compiled in the first run does not count
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
            return MemoryEstimate(f"memory does not suffice for {len(models)} seeds")
        return MemoryEstimate(f"torch.func.vmap cannot stack it ({' '.join(str(error).split())[:300]})")
    weights = sum(value.nbytes for value in module.model.weights().values())
    # The parameters, Adam's two moments and the best weights.
    return MemoryEstimate(None, (peak.bytes + 4 * weights) // len(models))


class StackPlan(NamedTuple):
    """The plan for training seeds as one: sparse features or not, and the memory of a seed."""

    sparse: bool
    memory: MemoryEstimate


def plan_stack(
    models: Sequence[nn.Module], task: Task, batch_size: int, sparse: bool, device: torch.device
) -> StackPlan | str:
    """Plan to train models like these two as one; return a sentence with the reason if that is impossible."""
    if task.objective.item == "link":
        return f"{task.name} draws other negative links for each seed"
    memory = trial(models, task.objective, _largest_batch(task, batch_size, sparse), device)
    if memory.obstacle:
        return f"{type(models[0]).__name__} cannot be stacked: {memory.obstacle}"
    return StackPlan(sparse, memory)


def _largest_batch(task: Task, batch_size: int, sparse: bool) -> Data:
    """Return the shared graph, or the `batch_size` largest graphs of all splits."""
    if not task.has_many_graphs:
        (graph,) = TaskData(task, sparse=sparse).train_dataloader()
        return graph
    graphs = sorted([*task.train, *task.val, *task.test], key=lambda data: data.num_nodes + data.num_edges)
    return Batch.from_data_list(graphs[-batch_size:])
