"""The one cache of what is computed once per tensor: by its identity and version, for as long as it lives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from torch_geometric import EdgeIndex
from torch_geometric.typing import SparseTensor

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

    The first argument is a tensor, or an adjacency in any form that `neighbourhoods` takes, and a result is kept for as
    long as it lives and is not changed in place. A write that torch cannot see, through NumPy's view of the memory or
    `.data`, needs a new tensor. It may also be an object that never changes, as `Edges`, which then holds the results
    itself. The other arguments are hashable. Results are computed outside of inference mode and of torch.func's
    transforms, since they have to serve everyone else too. Nothing is kept for an inference tensor, which has no
    version, nor by a compiler.

    A result must not hold the tensor that it is computed from, or neither would ever be freed.

    >>> num_edges = remembered(lambda edge_index: [edge_index.size(1)])
    >>> edge_index = torch.tensor([[0, 1], [1, 2]])
    >>> num_edges(edge_index), num_edges(edge_index) is num_edges(edge_index)
    ([2], True)
    """

    @wraps(make)
    def lookup(key: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            return make(key, *args, **kwargs)
        is_mutable = isinstance(key, (Tensor, SparseTensor))
        key = _beneath(key) if is_mutable else key
        if is_mutable and _owner(key).is_inference():
            return make(key, *args, **kwargs)
        stored = _stored(key) if is_mutable else vars(key).setdefault("_results", [None, {}])
        results, call = stored[1], (make, type(key), args, *kwargs.items())
        if call not in results:
            with _outside():
                results[call] = make(key, *args, **kwargs)
            if is_mutable:
                stored[0] = _state(key)  # read again: PyG's tools touch the version of a COO matrix
        result: T = results[call]
        return result

    return lookup


def set_result(function: Any, key: Tensor, result: Any) -> None:
    """Set the result of a remembered function of a tensor, and forget everything else that was computed from it."""
    _RESULTS[_owner(key)] = [_state(key), {(function.__wrapped__, type(key), ()): result}]


def _stored(key: Tensor | SparseTensor) -> list[Any]:
    """The state of a tensor and the results computed from it; none if it has been changed since."""
    owner, state = _owner(key), _state(key)
    stored: list[Any] | None = _RESULTS.get(owner)
    if stored is None or stored[0] != state:
        stored = _RESULTS[owner] = [state, {}]
    return stored


@contextmanager
def _outside() -> Iterator[None]:
    """Out of inference mode and of torch.func's transforms: what is computed here serves everyone else too."""
    with torch._C._DisableFuncTorch(), torch.inference_mode(False), torch.no_grad():
        yield


def _owner(adjacency: Tensor | SparseTensor) -> Tensor:
    """The tensor that lives as long as the graph does."""
    if isinstance(adjacency, SparseTensor):
        col: Tensor = adjacency.storage.col()
        return col
    return adjacency.as_tensor() if isinstance(adjacency, EdgeIndex) else adjacency


def _beneath(adjacency: Any) -> Any:
    """Return the graph without the wrappers of torch.func's transforms: within one, every operation returns a wrapper.

    The wrapper has no memory to read and ends with its transform, while the neighbourhoods are remembered.

    Raises:
        NotImplementedError: if `torch.func.vmap` maps over it.
    """
    functorch = torch._C._functorch
    if isinstance(adjacency, SparseTensor):  # cannot be made within a transform
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
    """Return what changes when one of these tensors is written to or has its memory replaced."""
    return [(part._version, part.data_ptr(), part.shape, part.stride()) for part in ids]


def _state(adjacency: Tensor | SparseTensor) -> list[tuple[Any, ...]]:
    """The identity and version of everything that holds the ids of a graph."""
    with torch._C._DisableFuncTorch():  # within a transform, a COO matrix of memory returns indices without
        if isinstance(adjacency, SparseTensor):
            return ids_state(adjacency.storage.rowptr(), adjacency.storage.col())
        if adjacency.layout == torch.sparse_coo:
            return ids_state(adjacency._indices())
        if adjacency.layout == torch.sparse_csr:
            return ids_state(adjacency.crow_indices(), adjacency.col_indices())
        if adjacency.layout == torch.sparse_csc:
            return ids_state(adjacency.ccol_indices(), adjacency.row_indices())
        return ids_state(_owner(adjacency))
