"""The plan for a stack: a trial of a few models, the memory of each, and passes that fit in memory."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from lightning import Trainer
from torch import nn
from torch_geometric.data import Batch, Data

from ..distributed.ranks import rank_zero_print
from ..tasks.model import members
from ..tasks.objective import Objective
from ..tasks.task import Task
from ..training.loading import TaskData
from ..training.signals import _interruptible
from .member import Member
from .memory import Peak, free_memory, out_of_memory
from .module import Stacked, StackedInductive

T = TypeVar("T")
CPU_BUDGET = 1 << 30  # bytes of a pass on a CPU, which gains nothing from larger ones
SHARE = 0.8  # of the free memory that a pass may take by the estimate
VMAP = {  # parts of errors of torch.func.vmap, and what they mean
    ".item()": "it calls .item() on a tensor, which torch.func.vmap does not allow",
    "data-dependent control flow": "it branches on the values of a tensor, which torch.func.vmap does not allow",
    "inplace": "it changes a tensor in place that the models of a stack share",
    "uninitialized parameter": "it has lazy parameters, whose shapes are unknown before the first call",
}


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
        return "gradients would be clipped over all seeds by the trainer, and not each by `training.gradient_clip_val`"
    if not str(trainer.precision).endswith("-true"):
        return f"precision is {trainer.precision}, whose scale would be that of all seeds"
    if trainer.check_val_every_n_epoch != 1:
        return f"validation is every {trainer.check_val_every_n_epoch} epochs, and the stopping rule needs each epoch"
    return None


@_interruptible()
def trial(
    models: Sequence[nn.Module],
    objective: Objective | Sequence[Objective],
    data: Data,
    device: torch.device | str = "cpu",
) -> MemoryEstimate:
    """Try to train two or more models as a stack, on a graph that all splits share or a batch of graphs.

    The objective is that of all models, or there is one for each of them.

    Each output must be that of the model alone, and an epoch and a test must run. Their peak memory divided by the
    number of models is an upper bound for a seed, since seeds share some of it; weights and optimizer are added.
    """
    if members(models[0]).fit is not None:
        return MemoryEstimate("it has a fit method of its own")
    objectives = [objective] * len(models) if isinstance(objective, Objective) else objective
    kind = StackedInductive if isinstance(data, Batch) else Stacked
    try:
        module = kind(models, [Member(seed, each) for seed, each in enumerate(objectives)])
    except ValueError as error:  # they differ in shape
        return MemoryEstimate(str(error).removesuffix("."))
    except RuntimeError as error:  # lazy parameters
        return MemoryEstimate(_vmap_failed(error))
    try:
        module, data = module.to(device), data.clone().to(device)
        module.eval()
        with torch.no_grad():
            for number, out in zip(module.rows, module(data), strict=True):
                model = models[number]
                alone = module._call_model(copy.deepcopy(model).to(device).eval(), data)
                largest = float(alone.abs().nan_to_num(posinf=0.0).max())
                if not torch.allclose(out, alone, rtol=0.01, atol=0.01 * largest, equal_nan=True):
                    return MemoryEstimate("its outputs in a stack differ from those of the model alone")
        module.begin_epoch(0, 0)
        with Peak() as peak:
            for _ in range(2):  # the first run also builds and compiles; its memory does not count
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
            return MemoryEstimate(f"memory does not suffice for {len(models)} models")
        return MemoryEstimate(_vmap_failed(error))
    weights = sum(value.nbytes for value in module.model.weights().values())
    # The parameters, Adam's two moments and the best weights.
    return MemoryEstimate(None, (peak.bytes + 4 * weights) // len(models))


def _vmap_failed(error: Exception) -> str:
    """Return the reason that the error of `torch.func.vmap` is about, or its first sentence."""
    text = " ".join(str(error).split())
    for part, reason in VMAP.items():
        if part in text:
            return reason
    return f"torch.func.vmap fails ({text.partition('. ')[0].removesuffix('.')[:300]})"


class StackPlan(NamedTuple):
    """The plan for training seeds as one: sparse features or not, and the memory of a seed."""

    sparse: bool
    memory: MemoryEstimate


def plan_stack(
    models: Sequence[nn.Module],
    task: Task,
    batch_size: int,
    sparse: bool,
    device: torch.device,
    objective: Objective | Sequence[Objective] | None = None,
) -> StackPlan | str:
    """Plan to train models like these as one; return a sentence with the reason if that is impossible.

    `objective` is as in `trial`, by default the task's.
    """
    if task.objective.draws_pairs:
        return f"{task.name} draws other negative links for each seed"
    memory = trial(models, objective or task.objective, _largest_batch(task, batch_size, sparse), device)
    if memory.obstacle:
        return f"{type(models[0]).__name__} cannot be stacked: {memory.obstacle}"
    return StackPlan(sparse, memory)


def most_different(settings: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the indices of a few settings, the first one's first: for each name, of one that differs from the first.

    They are at least two: the first one is repeated if all are equal.

    >>> most_different([{"lr": 0.1, "dropout": 0.6}, {"lr": 0.2, "dropout": 0.6}, {"lr": 0.1, "dropout": 0.5}])
    [0, 1, 2]
    """
    first, chosen = settings[0], [0]
    for name in dict.fromkeys(name for each in settings for name in each):
        differing = [number for number, each in enumerate(settings) if each.get(name) != first.get(name)]
        if differing and not {*differing} & {*chosen}:
            chosen.append(differing[-1])
    return chosen if len(chosen) > 1 else [0, min(1, len(settings) - 1)]


def _largest_batch(task: Task, batch_size: int, sparse: bool) -> Data:
    """Return the shared graph, or the `batch_size` largest graphs of all splits."""
    if not task.has_many_graphs:
        (graph,) = TaskData(task, sparse=sparse).train_dataloader()
        return graph
    graphs = sorted([*task.train, *task.val, *task.test], key=lambda data: data.num_nodes + data.num_edges)
    return Batch.from_data_list(graphs[-batch_size:])


def in_passes(left: Callable[[], Sequence[T]], size: int, one_pass: Callable[[list[T]], object]) -> None:
    """Call `one_pass(runs)` with `size` runs at a time until `left()` returns none.

    If memory runs out, print a message and continue with half as many. Other errors of `one_pass` are raised.
    """
    while runs := list(left())[:size]:
        try:
            one_pass(runs)
        except Exception as error:
            if len(runs) == 1 or not out_of_memory(error):
                raise
            size = -(-len(runs) // 2)
            rank_zero_print(f"Memory does not suffice for {len(runs)} runs at once: going on with {size}")
        gc.collect()  # a trainer and its module refer to each other, and so keep their memory
