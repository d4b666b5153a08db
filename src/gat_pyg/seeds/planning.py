"""The plan for a stack: a trial of a few models, the memory of each, and passes that fit in memory."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from lightning import Trainer
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch_geometric.data import Batch, Data

from ..distributed.ranks import rank_zero_print
from ..tasks.model import members
from ..tasks.objective import Objective
from ..tasks.task import Task
from ..training.loading import TaskData
from ..training.signals import _interruptible
from .member import Member
from .module import Stacked, StackedInductive

T = TypeVar("T")
CPU_BUDGET = 1 << 30  # bytes of a pass on a CPU, which gains nothing from larger ones


class StackPlan(NamedTuple):
    """The plan for training models as one: sparse features or not, and what a model saves for its backward pass."""

    sparse: bool
    bytes_per_model: int

    def size(self, device: torch.device, count: int) -> int:
        """Return how many of `count` models to train at once, in passes of equal size; on a GPU, first try all.

        >>> StackPlan(False, bytes_per_model=300 << 20).size(torch.device("cpu"), 10)
        3
        """
        largest = max(1, CPU_BUDGET // max(self.bytes_per_model, 1)) if device.type == "cpu" else count
        passes = -(-count // largest)
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
    models: Sequence[nn.Module], objective: Objective, data: Data, device: torch.device | str = "cpu"
) -> int | str:
    """Try to train two or more models as a stack, on a graph that all splits share or a batch of graphs.

    Each output must be that of the model alone, and an epoch and a test must run.

    Returns:
        The bytes of the tensors that a step saves for its backward pass, divided by the number of models, or the reason
        that the models cannot be stacked.
    """
    if members(models[0]).fit is not None:
        return "it has a fit method of its own"
    kind = StackedInductive if isinstance(data, Batch) else Stacked
    try:
        module = kind(models, [Member(seed, objective) for seed in range(len(models))])
    except ValueError as error:  # they differ in shape
        return str(error).removesuffix(".")
    except RuntimeError as error:  # lazy parameters
        return _vmap_failed(error)
    saved: dict[int, int] = {}  # bytes by the address of the memory

    def save(tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    try:
        module, data = module.to(device), data.clone().to(device)
        module.eval()
        with torch.no_grad():
            example = objective.example(data, "test")
            for number, out in zip(module.rows, module(example), strict=True):
                model = models[number]
                alone = module._call_model(copy.deepcopy(model).to(device).eval(), example)
                largest = float(alone.abs().nan_to_num(posinf=0.0).max())
                if not torch.allclose(out, alone, rtol=0.01, atol=0.01 * largest, equal_nan=True):
                    return "its outputs in a stack differ from those of the model alone"
        module.begin_epoch(0, 0)
        module.train()
        with saved_tensors_hooks(save, lambda tensor: tensor):
            loss, _ = module._loss(data)
        loss.backward()
        module.eval()
        with torch.no_grad():
            for split in ("val", "test"):
                module._counts(data, split)
    except Exception as error:
        return f"memory does not suffice for {len(models)} models" if out_of_memory(error) else _vmap_failed(error)
    return sum(saved.values()) // len(models)


def _vmap_failed(error: Exception) -> str:
    """Return the first sentence of an error of `torch.func.vmap`."""
    text = " ".join(str(error).split()).removeprefix("vmap: ")
    return f"torch.func.vmap fails ({text.partition('. ')[0].removesuffix('.')[:300]})"


def plan_stack(
    models: Sequence[nn.Module], task: Task, batch_size: int, sparse: bool, device: torch.device
) -> StackPlan | str:
    """Plan to train models like these as one; return a sentence with the reason if that is impossible."""
    if task.objective.draws_pairs:
        return f"{task.name} draws other negative links for each seed"
    result = trial(models, task.objective, _largest_batch(task, batch_size, sparse), device)
    if isinstance(result, str):
        return f"{type(models[0]).__name__} cannot be stacked: {result}"
    return StackPlan(sparse, result)


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


def out_of_memory(error: BaseException) -> bool:
    """Return True if an error means that memory has run out, on a GPU or on the CPU."""
    phrases = ("can't allocate memory", "not enough memory", "out of memory", "alloc_failed")
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and any(phrase in str(error).lower() for phrase in phrases)
    )
