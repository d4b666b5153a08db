"""The free memory of a device, and the peak memory of torch operations."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
