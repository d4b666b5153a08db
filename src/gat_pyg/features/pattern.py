"""The places of the non-zeros of a sparse feature matrix."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch_geometric.index import index2ptr, ptr2index

from ..graph.remembered import _lasting, remembered

_INT32_MAX = torch.iinfo(torch.int32).max


@dataclass(frozen=True, eq=False)
class Pattern:
    """The positions of the non-zeros of a matrix `[rows, columns]`, in CSR form; ids are int32 if they fit.

    Attributes:
        rowptr: `[rows + 1]`; row i holds the non-zeros `rowptr[i]:rowptr[i + 1]`.
        col: `[nnz]`, the column of each.
        num_cols: the number of columns.
        by_torch: compute products by torch alone, without the kernels of this package.

    Example:
        >>> pattern = Pattern.of(torch.tensor([[0.0, 2.0, 3.0], [0.0, 0.0, 4.0]]).to_sparse_csr())
        >>> pattern.rowptr.tolist(), pattern.col.tolist()
        ([0, 2, 3], [1, 2, 2])
        >>> transpose, place = pattern.transpose
        >>> transpose.rowptr.tolist(), transpose.col.tolist(), place.tolist()
        ([0, 0, 1, 3], [0, 0, 1], [0, 1, 2])
    """

    rowptr: Tensor
    col: Tensor
    num_cols: int
    by_torch: bool = False

    @classmethod
    def of(cls, x: Tensor) -> Pattern:
        """The pattern of a torch.sparse CSR matrix, remembered with it."""
        return _pattern_of(x)

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return self.rowptr.numel() - 1

    @cached_property
    def row(self) -> Tensor:
        """`[nnz]`, the row of each non-zero."""
        with _lasting(self):
            row: Tensor = ptr2index(self.rowptr, output_size=self.col.numel())
            return row

    @cached_property
    def transpose(self) -> tuple[Pattern, Tensor]:
        """The pattern of the transpose, and the place here of each of its non-zeros `[nnz]`."""
        with _lasting(self):
            col, place = torch.sort(self.col, stable=True)
            rowptr = index2ptr(col.long(), self.num_cols).to(col.dtype)
            return Pattern(rowptr, self.row.index_select(0, place).to(col.dtype), self.num_rows, self.by_torch), place


@remembered
def _pattern_of(x: Tensor) -> Pattern:
    rowptr, col = x.crow_indices(), x.col_indices()
    dtype = torch.int64 if max(rowptr.numel(), col.numel(), x.size(1)) > _INT32_MAX else torch.int32
    return Pattern(rowptr.to(dtype, copy=True), col.to(dtype, copy=True), x.size(1))
