"""Training steps captured as CUDA graphs and replayed."""

from __future__ import annotations

import pickle
import random
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader
from torch_geometric.typing import SparseTensor

from ..graph.remembered import ids_state
from ..tasks.model import is_compiled
from ..tasks.objective import Split
from .batching import is_drawn

if TYPE_CHECKING:
    from .modules import Supervised


Step = Callable[[], tuple[Tensor, ...]]
SMALL = 1_000_000  # edges; in larger graphs launches take little of the time, and a CUDA graph too much memory


class CudaGraphs:
    """The steps of a `Transductive`, replayed as CUDA graphs where that is possible.

    `Transductive` states which steps are captured, and when one is captured again.
    """

    def __init__(self, enabled: bool | Literal["auto"]) -> None:
        self.enabled = enabled
        self.reset()

    def reset(self) -> None:
        """Release all CUDA graphs."""
        self._repeated: dict[str, _Repeated] = {}
        self._gradients: Sequence[Tensor | None] | None = None  # those of the last training step, if it was a replay
        self._failed = False  # True after a failed capture: this fit does not try again

    def check(self, module: Supervised) -> None:
        """Raise ValueError if `enabled=True` is impossible."""
        if self.enabled is True and (obstacle := self._obstacle(module)):
            raise ValueError(f"cuda_graphs is true, but {obstacle}. Use cuda_graphs=auto or false.")

    def run(
        self, module: Supervised, split: Split, data: Data | NodeLoader, step: Step, caches: Mapping[Split, Any]
    ) -> tuple[Tensor, ...]:
        """Return the results of a step on a graph, computed or by a replay.

        The first result of a training step is the loss. After a replay, `set_gradients` sets the gradients. `caches`
        holds the inputs of each split's step besides the graph and the module's tensors.
        """
        self._gradients = None

        def with_gradients() -> tuple[Tensor, ...]:
            loss, *others = step()
            gradients = torch.autograd.grad(loss, _trainable(module), allow_unused=True)
            return loss.detach(), *others, *gradients

        captured = self._captured(module, split, data, with_gradients if split == "train" else step, caches)
        if captured is None:
            return step()
        if split == "train":
            loss, sums, *gradients = captured()
            self._gradients = gradients
            return loss, sums.clone()
        return tuple(value.clone() for value in captured())

    def set_gradients(self, module: nn.Module) -> bool:
        """Set the gradients that the last training step computed; return False if it was no replay."""
        if self._gradients is None:
            return False
        for parameter, gradient in zip(_trainable(module), self._gradients, strict=True):
            parameter.grad = gradient
        return True

    def _captured(
        self, module: Supervised, split: Split, data: Data | NodeLoader, step: Step, caches: Mapping[Split, Any]
    ) -> Captured | None:
        """Return the step's CUDA graph, captured when the step repeats; None if the step runs without one."""
        if self.enabled is False or self._failed or isinstance(data, NodeLoader) or is_drawn(data):
            return None
        if module.trainer.state.fn != "fit" or module.trainer.sanity_checking:
            return None
        if self._obstacle(module) or (tensors := _plain_tensors(data)) is None:
            return None
        if self.enabled == "auto" and data.num_edges > SMALL:
            return None
        weights = [*module.parameters(), *module.buffers()]
        state: list[Any] = [(id(value), *ids_state(*_components(value))) for value in tensors]
        state += [(id(value), value.data_ptr(), value.shape, value.requires_grad) for value in weights]
        state += [inner.training for inner in module.modules()]
        repeated = self._repeated.get(split)
        if repeated is None or repeated.data is not data or repeated.state != state:
            self._repeated[split] = _Repeated(data, state, [*tensors, *weights])
            return None
        if repeated.captured is None:
            try:
                repeated.captured = Captured(step, list(module.buffers()))
                repeated.held.append(caches.get(split))
            except Exception as error:  # any error of the driver, or of an operation that cannot be captured
                self._failed = True
                rank_zero_warn(
                    f"The {split} step cannot be captured as a CUDA graph: {_reason(error)}. Training continues "
                    "without capturing, with the same results. Pass cuda_graphs=False (training.cuda_graphs=false in "
                    "the command) to silence this warning."
                )
        return repeated.captured

    @staticmethod
    def _obstacle(module: Supervised) -> str | None:
        """Return the reason that no step of the module can be captured, or None."""
        trainer = module.trainer
        if module.objective.draws_pairs or module.objective.label_rate:
            return "the negative links, or the labels that are read, are sampled in each step"
        if trainer.strategy.root_device.type != "cuda":
            return f"the device is a {trainer.strategy.root_device.type}"
        if trainer.world_size > 1:
            return f"there are {trainer.world_size} processes"
        if not isinstance(trainer.strategy, SingleDeviceStrategy):
            return f"the strategy is {type(trainer.strategy).__name__}, which communicates in the step"
        if trainer.accumulate_grad_batches > 1:
            return "gradients are accumulated over several steps"
        if not str(trainer.precision).endswith("-true"):
            return f"precision is {trainer.precision}, whose casts and scales are not captured"
        if is_compiled(module.model):
            return "the model is compiled"
        for name in ("training_step", "backward"):
            if getattr(type(module), name).__module__ != f"{__package__}.modules":
                return f"{type(module).__name__} has its own {name}, which a replay would skip"
        return None


def _trainable(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


@dataclass
class _Repeated:
    """A step on a graph: the state of its inputs, and its CUDA graph once it has been captured."""

    data: Data
    state: list[Any]
    held: list[Any]  # references, so that no id is reused and a replay reads no freed memory
    captured: Captured | None = None


def _plain_tensors(data: Data) -> list[Tensor] | None:
    """Return the tensors of a graph, or None if torch does not count the changes of one of them."""
    values = [value for _, value in data if isinstance(value, (Tensor, SparseTensor))]
    counted = (type(value) is Tensor and value.layout in _LAYOUTS and not value.is_inference() for value in values)
    return values if all(counted) else None


_LAYOUTS = (torch.strided, torch.sparse_csr)


def _components(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the strided tensors that store a dense or CSR tensor."""
    if tensor.layout == torch.strided:
        return (tensor,)
    return tensor.crow_indices(), tensor.col_indices(), tensor.values()


def _reason(error: Exception) -> str:
    """Return the first line of an error and where it was raised."""
    first = error.__context__ or error  # ending a failed capture raises another error
    message, *_ = f"{type(first).__name__}: {first}".splitlines()
    *_, frame = traceback.extract_tb(first.__traceback__)
    return f"{message} (in {frame.name}, {frame.filename}:{frame.lineno})"


class Captured:
    """A computation as a CUDA graph: captured once, then replayed by a single launch.

    `compute` reads all inputs from the same memory every time and returns tensors; `results` are those of the last
    replay. Random numbers come from the device's default generator, as without a CUDA graph: after the same seed they
    are the same. The capture restores the generator and the `buffers`, the tensors that `compute` changes beside its
    results.

    Raises the errors of the driver and of operations that cannot be captured, such as those that make the host wait for
    the GPU, and RuntimeError if `compute` draws random numbers on the CPU. The device remains usable afterwards.
    """

    def __init__(self, compute: Callable[[], tuple[Tensor, ...]], buffers: Sequence[Tensor] = ()) -> None:
        self.graph = torch.cuda.CUDAGraph()
        before, copies = torch.cuda.get_rng_state(), [buffer.clone() for buffer in buffers]
        try:
            self._warm_up(compute)
            with torch.cuda.stream(torch.cuda.current_stream()):  # torch.cuda.graph restores it only on success
                self.results = self._capture(compute)
        finally:
            torch.cuda.set_rng_state(before)
            for buffer, copy in zip(buffers, copies, strict=True):
                buffer.copy_(copy)

    def _warm_up(self, compute: Callable[[], tuple[Tensor, ...]]) -> None:
        """Call `compute` twice to compile everything, and once more to raise if the host waits for the GPU."""
        stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream), _no_draws():
                compute()
                compute()
                with _no_sync():
                    compute()
        finally:
            current.wait_stream(stream)

    def _capture(self, compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        pool = torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(self.graph, pool=pool):
                return compute()
        except BaseException:
            # Before torch 2.13, the allocator and the default generator stay in the failed capture: empty_cache() and
            # the next random numbers would raise. The generator leaves it when another capture succeeds.
            with suppress(RuntimeError):  # since torch 2.13 the allocator has already left it
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                torch.zeros(1, device="cuda")
            raise

    def __call__(self) -> tuple[Tensor, ...]:
        """Replay it."""
        self.graph.replay()
        return self.results


@contextmanager
def _no_draws() -> Iterator[None]:
    """Context manager: restore the CPU's generators, and raise RuntimeError if one was used: a replay does not."""
    before = _generators()
    try:
        yield
        if pickle.dumps(_generators()) != pickle.dumps(before):
            raise RuntimeError(
                "the step draws random numbers on the CPU, which a replay would not repeat; draw them on the GPU "
                "(device=x.device)"
            )
    finally:
        words, python, numpy = before
        torch.set_rng_state(torch.from_numpy(words))
        random.setstate(python)
        np.random.set_state(numpy)


def _generators() -> tuple[Any, ...]:
    return torch.get_rng_state().numpy(), random.getstate(), np.random.get_state()


@contextmanager
def _no_sync() -> Iterator[None]:
    """Context manager: operations that make the host wait for the GPU raise RuntimeError, if torch detects them."""
    before = torch.cuda.get_sync_debug_mode()
    _set_sync_mode("error")
    try:
        yield
    finally:
        _set_sync_mode(before)


def _set_sync_mode(mode: int | str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode(mode)
