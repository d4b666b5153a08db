"""Sparse node features: a matrix `[N, F]` whose non-zeros alone are stored."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..philox import draw_seed
from .mask import mask_of
from .pattern import Pattern


class SparseFeatures(Tensor):
    """A sparse matrix `[N, F]` on its way to a layer: a pattern that never changes and values that dropout does.

    It has a shape, dtype and device, and `Linear` takes it. Unlike a torch.sparse CSR matrix it shares its pattern
    with others, and `torch.func` may map over its values. Within `torch.func.grad` torch cannot read a CSR matrix: make
    one of these of it outside.

    Example:
        >>> x = SparseFeatures(torch.eye(3).to_sparse_csr())
        >>> x.shape, x.content
        (torch.Size([3, 3]), tensor([1., 1., 1.]))
    """

    pattern: Pattern
    undropped: Tensor  # [nnz], the values before dropout, or [H, nnz] of H matrices with one pattern
    seed: Tensor | None  # of the dropout, or [H]
    p: float | Tensor  # of the dropout

    @staticmethod
    def __new__(cls, x: Tensor, content: Tensor | None = None) -> SparseFeatures:
        """From a CSR matrix, or from one of these and other values."""
        own: SparseFeatures = Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype, device=x.device)
        own.pattern = x.pattern if isinstance(x, SparseFeatures) else Pattern.of(x)
        own.seed, own.p = (x.seed, x.p) if isinstance(x, SparseFeatures) and content is None else (None, 0.0)
        if content is None:
            content = x.undropped if isinstance(x, SparseFeatures) else x.values()
        own.undropped = content
        return own

    @property
    def content(self) -> Tensor:
        """The values `[nnz]`, or `[H, nnz]` of several. `Linear` never builds these: it masks while summing."""
        return self.undropped if self.seed is None else _dropped(self.undropped, self.seed, self.p)

    @property
    def several(self) -> bool:
        """True for H matrices with one pattern."""
        return self.undropped.dim() > 1 or (self.seed is not None and self.seed.dim() > 0)

    def dropped(self, p: float | Tensor, *times: int) -> SparseFeatures:
        """Dropout of the values, drawn H times where `times` is H: then these are H matrices."""
        own = SparseFeatures(self, self.content)
        seeds = [draw_seed(self.device, p) for _ in range(math.prod(times))]
        seed = torch.stack(seeds).view(times)
        several = bool(times) or torch._C._are_functorch_transforms_active()
        if several:  # drawn where they are summed; else once for all sums
            own.seed, own.p = seed, p
        else:
            own.undropped = _dropped(own.undropped, seed, p)
        return own

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} of sparse features: only dropout and the layers' Linear take them.")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SparseFeatures({tuple(self.shape)}, nnz={self.pattern.col.numel()})"


def is_sparse_features(x: Any) -> bool:
    """Return True if x is a torch.sparse CSR matrix or `SparseFeatures`."""
    return isinstance(x, SparseFeatures) or (isinstance(x, Tensor) and x.layout == torch.sparse_csr)


def adjacency(edge_index: Tensor, edge_weight: Tensor, num_nodes: int) -> SparseFeatures:
    """The matrix `[N, N]` of weighted edges, rows by dst: its `linear` sums over neighbours. Repeated edges add up.

    Raises:
        RuntimeError: if an id is outside of `[0, N)`.

    Example:
        >>> from gat_pyg.features.linear import linear
        >>> matrix = adjacency(torch.tensor([[0, 1], [2, 2]]), torch.tensor([1.0, 10.0]), 3)
        >>> linear(matrix, torch.tensor([[1.0], [2.0], [3.0]])).flatten()
        tensor([ 0.,  0., 21.])
    """
    size = (num_nodes, num_nodes)
    matrix = torch.sparse_coo_tensor(edge_index.flip(0), edge_weight, size, check_invariants=True)
    return SparseFeatures(matrix.to_sparse_csr())


def _dropped(values: Tensor, seed: Tensor, p: float | Tensor) -> Tensor:
    return values * mask_of(seed, values.size(-1), p, values.dtype)
