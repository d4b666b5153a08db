"""A cache of results by the tensor from which they are computed: its identity and elements, for its lifetime."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.utils.weak import WeakTensorKeyDictionary
from torch_geometric import EdgeIndex
from torch_geometric.typing import SparseTensor

from .memory import checksum

K = TypeVar("K")
P = ParamSpec("P")
T = TypeVar("T")
NOT_OVER_THE_GRAPH = (
    "vmap maps over features and parameters, not over the graph. "
    "Loop over the graphs, or join them as torch_geometric.data.Batch does."
)

# tensor -> [state of its elements, {(function, type, arguments) -> result}]
_RESULTS = WeakTensorKeyDictionary()


def remembered(make: Callable[Concatenate[K, P], T]) -> Callable[Concatenate[K, P], T]:
    """Decorate a function of a tensor or graph, so that it computes each result once.

    The first argument is a tensor, or an adjacency in any form that `neighbourhoods` takes. A result is cached until
    this argument is freed or its elements change. On a CPU every change is noticed, by a checksum: also one through
    NumPy, a memory map, DLPack, shared memory or `.data`, or by a collective operation of torch.distributed. On other
    devices torch's version counter is read, which counts torch's operations in place on the tensor and its views: after
    a change through `.data`, DLPack, another library's kernel or a collective operation, pass a new tensor, as
    `edge_index.clone()`. The first argument may also be an immutable object such as `Edges`, which then stores the
    results itself. The other arguments are hashable, or tensors, whose changes count too. Results are computed outside
    of inference mode and of torch.func's transforms, so that every later caller can use them. There is no cache in
    compiled code, for tensors without elements (meta and fake), nor on other devices for inference tensors, which have
    no version.

    While a CUDA graph is captured, a new result is a RuntimeError: it would have no contents before a replay.

    A result must not refer to the tensor from which it is computed, or neither would ever be freed.

    >>> num_edges = remembered(lambda edge_index: [edge_index.size(1)])
    >>> edge_index = torch.tensor([[0, 1], [1, 2]])
    >>> num_edges(edge_index), num_edges(edge_index) is num_edges(edge_index)
    ([2], True)
    """

    @wraps(make)
    def lookup(key: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        is_mutable = isinstance(key, (Tensor, SparseTensor))
        if is_traced(key) if is_mutable else torch.compiler.is_compiling():
            return make(key, *args, **kwargs)
        key = _beneath(key) if is_mutable else key
        others = [value for value in args if isinstance(value, Tensor)]
        if not all(t.is_cpu or not t.is_inference() for t in ([_owner(key), *others] if is_mutable else others)):
            return make(key, *args, **kwargs)
        stored = _stored(key) if is_mutable else vars(key).setdefault("_results", [None, {}])
        results, call = stored[1], (make, type(key), args, *ids_state(*others), *kwargs.items())
        if call not in results:
            with _lasting(_owner(key) if is_mutable else key):
                results[call] = make(key, *args, **kwargs)
            if is_mutable and not _owner(key).is_cpu:
                stored[0] = _state(key)  # again: PyG's functions may increment the version of a COO matrix
        result: T = results[call]
        return result

    return lookup


def is_traced(graph: Any) -> bool:
    """Return True if nothing but shapes may be read: in compiled code, and of a meta or fake tensor."""
    if torch.compiler.is_compiling():
        return True
    if type(graph) is Tensor and not torch._C._functorch.is_functorch_wrapped_tensor(graph):
        return graph.is_meta  # without the many questions of `is_fake`
    return isinstance(graph, Tensor) and (graph.is_meta or is_fake(graph))


def set_result(function: Any, key: Tensor, result: Any) -> None:
    """Set the cached result of a function of a tensor, and drop all other results of this tensor."""
    _RESULTS[_owner(key)] = [_state(key), {(function.__wrapped__, type(key), ()): result}]


def get_result(function: Any, key: Tensor | SparseTensor) -> Any:
    """Return the result that `set_result` stored for a tensor, or None; also from within a function of that tensor."""
    stored = _RESULTS.get(_owner(key))
    return None if stored is None else stored[1].get((function.__wrapped__, type(key), ()))


def _stored(key: Tensor | SparseTensor) -> list[Any]:
    """Return the state of a tensor and its cached results; there are none if it has changed since."""
    owner, state = _owner(key), _state(key)
    stored: list[Any] | None = _RESULTS.get(owner)
    if stored is None or stored[0] != state:
        stored = _RESULTS[owner] = [state, {}]
    return stored


class _outside:
    """Context manager: leave inference mode and torch.func's transforms, for results that all callers can use."""

    # torch's own context managers, and those of generators, take longer than the structures of a small graph
    def __enter__(self) -> None:
        within = torch.is_inference_mode_enabled() or torch._C._are_functorch_transforms_active()
        self.left = _left() if within else None
        if self.left is not None:
            self.left.__enter__()
        self.enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *error: Any) -> None:
        torch._C._set_grad_enabled(self.enabled)
        if self.left is not None:
            self.left.__exit__(*error)


class _lasting(_outside):
    """Context manager: `_outside`, for a result that is cached; a RuntimeError while a CUDA graph is captured.

    On CUDA it is computed on the default stream of the graph's device, to which its memory then belongs, as that of
    data does, and awaited: other streams, which find it in the cache, know of no event to wait for.
    """

    def __init__(self, graph: Any) -> None:
        tensor = graph if isinstance(graph, Tensor) else next(v for v in vars(graph).values() if isinstance(v, Tensor))
        self.device, self.default = tensor.device, cast(Any, None)

    def __enter__(self) -> None:
        if self.device.type == "cuda":
            current, default = torch.cuda.current_stream(self.device), torch.cuda.default_stream(self.device)
            with torch.cuda.device(self.device):
                if torch.cuda.is_current_stream_capturing():
                    raise RuntimeError(
                        "a structure of the graph would be cached while a CUDA graph is captured, and it has no "
                        "contents before a replay. Run the whole step, forward and backward, once before the capture."
                    )
            if current != default:
                default.wait_stream(current)
                self.default = torch.cuda.stream(default)
                self.default.__enter__()
        super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self.default is not None:
            self.default.__exit__(*error)
            torch.cuda.default_stream(self.device).synchronize()


@contextmanager
def _left() -> Iterator[None]:
    with torch._C._DisableFuncTorch(), torch.inference_mode(False):
        yield


def _owner(adjacency: Tensor | SparseTensor) -> Tensor:
    """Return the tensor whose lifetime is that of the graph."""
    if isinstance(adjacency, SparseTensor):
        col: Tensor = adjacency.storage.col()
        return col
    return adjacency.as_tensor() if isinstance(adjacency, EdgeIndex) else adjacency


def _beneath(adjacency: Any) -> Any:
    """Return the graph without the wrappers of torch.func's transforms.

    A wrapper has no memory of its own and ends with its transform, while the neighbourhoods stay in the cache.

    Raises:
        NotImplementedError: if `torch.func.vmap` maps over it.
    """
    functorch = torch._C._functorch
    if isinstance(adjacency, SparseTensor):  # cannot be created within a transform
        return adjacency
    ids = adjacency.as_tensor() if isinstance(adjacency, EdgeIndex) else adjacency
    if not functorch.is_functorch_wrapped_tensor(ids):
        return adjacency
    while functorch.is_functorch_wrapped_tensor(ids):
        if functorch.is_batchedtensor(ids):
            raise NotImplementedError(NOT_OVER_THE_GRAPH)
        ids = functorch.get_unwrapped(ids)
    return ids


def ids_state(*ids: Tensor) -> list[tuple[Any, ...]]:
    """Return a state that changes when one of these tensors is written to or has its memory replaced.

    It has their checksums; on devices other than a CPU, where these would cost a sync, their versions.
    """
    return [(checksum(t) if t.is_cpu else t._version, t.data_ptr(), t.shape, t.stride()) for t in ids]


def _state(adjacency: Tensor | SparseTensor) -> list[tuple[Any, ...]]:
    """Return the state of the tensors that store the ids of a graph."""
    if type(adjacency) is Tensor and adjacency.layout == torch.strided:
        return ids_state(adjacency)
    with torch._C._DisableFuncTorch():  # within a transform, even a real COO matrix returns wrapped indices
        if isinstance(adjacency, SparseTensor):
            return ids_state(adjacency.storage.rowptr(), adjacency.storage.col())
        if adjacency.layout == torch.sparse_coo:
            return ids_state(adjacency._indices())
        if adjacency.layout == torch.sparse_csr:
            return ids_state(adjacency.crow_indices(), adjacency.col_indices())
        if adjacency.layout == torch.sparse_csc:
            return ids_state(adjacency.ccol_indices(), adjacency.row_indices())
        return ids_state(_owner(adjacency))
