"""The way of a layer through PyG's message passing, where each edge's message is needed."""

# PyG's templates read the source of this module and import all its names: no `__all__`.

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric import is_compiling
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.typing import Adj, OptTensor, Size, SparseTensor, torch_sparse
from torch_geometric.utils import add_self_loops, is_sparse, remove_self_loops

from ..features.linear import hooked
from ..graph.remembered import _outside
from ..philox import draw_kept, draw_seed
from .checks import check_features, refuse_matrix
from .loops import features_with_loops, replace_loops, weights_with_loops
from .mechanisms import is_plain

# The projected features of src `[N_src, H, C]` and of dst `[N_dst, H, C]`, then those of src that are scored, its keys
Ends = tuple[Tensor, OptTensor, Tensor]


class MessageConv(MessagePassing):
    """A layer's messages: self-loops, weights and dropped edges, around the `edge_updater` and `propagate` of PyG.

    A layer defines `_messages(ends, edge_index, edge_attr, edge_weight, size)`, which calls these, and returns the
    output `[N_dst, H, C]` and alpha `[E, H]`.
    """

    def _needs_messages(self, x: Any, edge_index: Any, edge_attr: OptTensor, weights: bool) -> bool:
        """Return True if torch.jit.trace, an explainer, a hook, a subclass or another aggregation needs messages."""
        attributes, aggregation = self.__dict__, self._modules["aggr_module"]
        return (
            torch.jit.is_tracing()
            or (self.explain is True and self._edge_mask is None)
            or self.decomposed_layers > 1
            or type(aggregation) is not SumAggregation
            or hooked(aggregation)
            or (self.flow == "target_to_source" and not isinstance(x, Tensor))
            or any(map(attributes.get, _HOOKS))
            or self._overrides_a_step()
            or (edge_attr is not None and self.lin_edge is not None and not is_plain(self.lin_edge))
            or (is_sparse(edge_index) and (self.edge_dim is not None or edge_attr is not None))
        )

    def _overrides_a_step(self) -> bool:
        """Return True if a step of message passing is neither this package's, nor PyG's or made from its template."""
        attributes, kind = self.__dict__, type(self)
        # torch 2.10 cannot compile `self.message.__module__`
        steps = tuple([attributes[step] if step in attributes else getattr(kind, step) for step in _STEPS])
        known = _are_known.__wrapped__ if is_compiling() else _are_known
        return not known(steps, f"{kind.__module__}_{kind.__name__}")

    def _by_messages(
        self, ends: Ends, edge_index: Adj, edge_attr: OptTensor, edge_weight: OptTensor, size: Size
    ) -> tuple[Tensor, Adj, OptTensor]:
        """Run PyG's message passing; `ends` are the projected features, the other arguments those of the call.

        Returns:
            The output `[N_dst, H, C]`, the adjacency with loops and alpha `[E, H]` in its order, 0 for dropped edges.
        """
        x_src, x_dst, _ = ends
        num_src, num_dst = x_src.size(0), x_src.size(0) if x_dst is None else x_dst.size(0)
        if size is not None:
            num_src, num_dst = size
        num_loops = min(num_src, num_dst)
        dropping = self.training and self.edge_dropout > 0.0
        if isinstance(edge_index, SparseTensor) or edge_index.layout != torch.strided:
            if edge_weight is not None or dropping:
                refuse_matrix()
            edge_index, edge_attr = self._matrix(edge_index, edge_attr, num_loops)
            out, alpha = self._messages(ends, edge_index, edge_attr, None, size)
            return out, edge_index, alpha

        edge_index = edge_index.long()  # PyG has a wrong gradient for int32 ids (PyG 2.8.1 with torch 2.13)
        if edge_weight is not None:
            edge_weight = weights_with_loops(self, edge_weight, edge_index.size(1), num_loops)
        if self.add_self_loops:
            graph = edge_index
            edge_index, rows = replace_loops(graph, num_loops)
            if edge_attr is not None:
                check_features(edge_attr, graph.size(1))
                edge_attr = features_with_loops(self, graph, edge_attr, num_src, num_dst).index_select(0, rows)
            edge_weight = None if edge_weight is None else edge_weight.index_select(0, rows)
        if not dropping:
            out, alpha = self._messages(ends, edge_index, edge_attr, edge_weight, size)
            return out, edge_index, alpha

        with _outside():
            kept = draw_kept(draw_seed(edge_index.device), int(edge_index.size(1)), 1, self.edge_dropout).squeeze(1)
        rows = (kept | (edge_index[0] == edge_index[1])).nonzero().squeeze(1)
        edge_attr, edge_weight = (None if each is None else each[rows] for each in (edge_attr, edge_weight))
        out, alpha = self._messages(ends, edge_index[:, rows], edge_attr, edge_weight, size)
        if alpha is not None:
            alpha = alpha.new_zeros(edge_index.size(1), alpha.size(1)).index_copy(0, rows, alpha)
        return out, edge_index, alpha

    def _matrix(self, adjacency: Any, edge_attr: OptTensor, num_loops: int) -> tuple[Any, OptTensor]:
        """Return a sparse adjacency with loops, as PyG's message passing takes it, and the features of its edges."""
        of_torch = isinstance(adjacency, Tensor)
        if self.add_self_loops and (edge_attr if of_torch else self.edge_dim) is not None:
            name, kind = ("edge_attr", "sparse matrix") if of_torch else ("edge_dim", "SparseTensor")
            raise NotImplementedError(
                f"{name} with add_self_loops needs an edge list, and edge_index is a {kind}. "
                "Pass edge_index of shape (2, E), or add_self_loops=False."
            )
        if isinstance(adjacency, SparseTensor):
            return torch_sparse.set_diag(adjacency) if self.add_self_loops else adjacency, edge_attr
        if edge_attr is not None and adjacency.layout in (torch.sparse_csr, torch.sparse_csc):
            edge_attr = _features_by_row(adjacency, edge_attr)
        if adjacency.layout == torch.sparse_csc:
            adjacency = adjacency.to_sparse_csr()
        if self.add_self_loops:
            adjacency, _ = add_self_loops(remove_self_loops(adjacency)[0], num_nodes=num_loops)
        return adjacency, edge_attr

    def message(self, x_j: Tensor, alpha: Tensor) -> Tensor:
        """A term of equation (4): `[E, H, C]` of each edge's src, weighted by `[E, H]`."""
        return alpha.unsqueeze(-1) * x_j


_STEPS = [
    *("propagate", "message", "explain_message", "aggregate", "message_and_aggregate", "update"),
    *("edge_updater", "edge_update"),
]
_HOOKS = [
    f"_{step}_forward_{when}"
    for step in ("propagate", "edge_update", "message", "aggregate")
    for when in ("pre_hooks", "hooks")
]


@functools.lru_cache
def _are_known(steps: tuple[Callable[..., Any], ...], template: str) -> bool:
    """Return True if all steps of message passing are this package's, PyG's, or from the module that PyG generated."""
    known = __package__, MessagePassing.__module__, template
    return not any(hasattr(step, "__wrapped__") or not (step.__module__ or "").startswith(known) for step in steps)


def _features_by_row(matrix: Tensor, edge_attr: Tensor) -> Tensor:
    """The features of the edges of a CSR or CSC matrix, in the order of its values, by row."""
    num_edges = matrix.values().size(0)
    if edge_attr.size(0) != num_edges:
        raise ValueError(f"edge_attr has {edge_attr.size(0)} rows, but the sparse matrix has {num_edges} edges.")
    if matrix.layout == torch.sparse_csr:
        return edge_attr
    place, shape = torch.arange(num_edges, device=matrix.device), tuple(matrix.shape[:2])
    by_column = torch.sparse_csc_tensor(matrix.ccol_indices(), matrix.row_indices(), place, shape)
    return edge_attr.index_select(0, by_column.to_sparse_csr().values())
