"""An estimate of the number of models that fit in memory at once."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch_geometric.data import Data

from ..distributed.ranks import rank_zero_print
from ..tasks.objective import Objective
from ..training.signals import _heeded
from .module import Stacked

ROOM = {"cpu": 1 << 30}  # bytes of a pass that are enough: beyond, a CPU gains nothing
SHARE = 0.8  # of the free memory, for what is estimated


def in_passes(left: Callable[[], Sequence[int]], size: int, one_pass: Callable[[list[int]], object]) -> None:
    """Call `one_pass(seeds)` with `size` of the seeds that `left()` returns until there are none.

    Where memory runs out, go on with half as many at a time and print it. Raises what `one_pass` raises otherwise.
    """
    while seeds := list(left())[:size]:
        try:
            one_pass(seeds)
        except Exception as error:
            if len(seeds) == 1 or not out_of_memory(error):
                raise
            size = -(-len(seeds) // 2)
            rank_zero_print(f"Memory does not suffice for {len(seeds)} seeds at once: going on with {size}")
        gc.collect()  # a trainer and its module hold each other, and with them the memory


def out_of_memory(error: BaseException) -> bool:
    """Return True if an error means that memory has run out, on a GPU or on the CPU."""
    words = ("can't allocate memory", "not enough memory", "out of memory", "alloc_failed")
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
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
    does not count, let the same operations run twice, with `start_over()` between.
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
class MemoryEstimate:
    """An estimate: the reason a model cannot be stacked, or None, and the bytes that a seed takes at most."""

    why_not: str | None = None
    each: int = 0

    def seeds(self, device: torch.device, wanted: int, free: int | None = None) -> int:
        """Return the number of seeds to train at once: those that fit in memory, in equal passes.

        >>> MemoryEstimate(each=1000).seeds(torch.device("cpu"), 10, free=4_000)
        3
        """
        free = free_memory(device) if free is None else free
        rooms = [room for room in (free and int(SHARE * free), ROOM.get(device.type)) if room is not None]
        passes = -(-wanted // max(1, min([wanted, *(room // max(self.each, 1) for room in rooms)])))
        return -(-wanted // passes)


def why_not_by(trainer: Trainer) -> str | None:
    """Return the reason a trainer cannot train seeds as one, or None."""
    if trainer.gradient_clip_val:
        return "gradients would be clipped over all seeds"
    if not str(trainer.precision).endswith("-true"):
        return f"precision is {trainer.precision}, whose scale would be that of all seeds"
    if trainer.check_val_every_n_epoch != 1:
        return f"validation is every {trainer.check_val_every_n_epoch} epochs, and the rule of each looks at every one"
    return None


@_heeded()
def trial(models: Sequence[nn.Module], objective: Objective, data: Data, device: torch.device | str = "cpu") -> MemoryEstimate:
    """Try two models or more on the data as a stack.

    Each has to give what it gives by itself, and an epoch and a test have to run. Their peak of memory by the number of
    models is more than a seed will take beside others, who share a part; weights and optimizer come on top.
    """
    if hasattr(models[0], "fit"):
        return MemoryEstimate("it fits itself")
    try:
        module = Stacked(models, range(len(models)), objective).to(device)
        data = data.clone().to(device)
        module.eval()
        with torch.no_grad():
            for model, one in zip(models, module(data), strict=True):
                alone = module._given(copy.deepcopy(model).to(device).eval(), data)
                largest = float(alone.abs().nan_to_num(posinf=0.0).max())
                if not torch.allclose(one, alone, rtol=0.01, atol=0.01 * largest, equal_nan=True):
                    return MemoryEstimate("in a stack it does not give what it gives by itself")
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
            return MemoryEstimate(f"memory does not suffice for {len(models)} seeds")
        return MemoryEstimate(f"torch.func.vmap cannot stack it ({' '.join(str(error).split())[:300]})")
    weights = sum(value.nbytes for value in module.model.weights().values())
    return MemoryEstimate(None, (peak.bytes + 4 * weights) // len(models))  # the parameters, Adam's two moments, those kept
