"""Results that are computed once per tensor: by its identity and version."""

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

P = ParamSpec("P")
T = TypeVar("T")
NOT_OVER_THE_GRAPH = (
    "vmap maps over features and parameters, not over the graph. "
    "Loop over the graphs, or join them as torch_geometric.data.Batch does."
)


@contextmanager
def _outside() -> Iterator[None]:
    """Out of inference mode and of torch.func's transforms: what is remembered has to serve everyone else too."""
    with torch._C._DisableFuncTorch(), torch.inference_mode(False), torch.no_grad():
        yield


def once_per_graph(make: Callable[Concatenate[Tensor, P], T]) -> Callable[Concatenate[Tensor, P], T]:
    """`make(edge_index, ...)`, remembered for as long as the graph lives and is not changed, as `neighbourhoods` are.

    The other arguments are hashable, and nothing in what is made may hold the tensor `edge_index` itself.

    >>> num_edges = once_per_graph(lambda edge_index: [edge_index.size(1)])
    >>> edge_index = torch.tensor([[0, 1], [1, 2]])
    >>> num_edges(edge_index), num_edges(edge_index) is num_edges(edge_index)
    ([2], True)
    """
    remembered = WeakTensorKeyDictionary()

    @wraps(make)
    def made_once(edge_index: Tensor, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            return make(edge_index, *args, **kwargs)
        edge_index = _beneath(edge_index)
        if (owner := _owner(edge_index)).is_inference():  # has no version to watch
            return make(edge_index, *args, **kwargs)
        known, made = remembered.get(owner, (None, {}))
        if known != _state(edge_index):
            made = {}
        asked = (type(edge_index), args, *kwargs.items())
        if asked not in made:
            with _outside():
                made[asked] = make(edge_index, *args, **kwargs)
            remembered[owner] = _state(edge_index), made
        found: T = made[asked]
        return found

    return made_once


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
    """What changes with the ids of a graph."""
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
