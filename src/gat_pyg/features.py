"""Sparse node features: a matrix [N, F] of which the non-zeros alone are dropped out, weighted and summed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn.dense.linear as dense
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from torch_geometric.index import index2ptr, ptr2index

from .attention.dropout import draw_seed
from .attention.fused import keep, kept, weighted_rows
from .attention.segment import in_forward_mode
from .edges import ids_state

_INT32_MAX = torch.iinfo(torch.int32).max


@dataclass(frozen=True, eq=False)
class Pattern:
    """Where the non-zeros of a matrix `[rows, columns]` are, row by row (CSR); ids are int32 where they fit.

    Attributes:
        rowptr: `[rows + 1]`; row i holds the non-zeros `rowptr[i]:rowptr[i + 1]`.
        col: `[nnz]`, the column of each.
        num_cols: the number of columns.

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
    _copies: dict[int, Pattern] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, x: Tensor) -> Pattern:
        """The pattern of a torch.sparse CSR matrix, remembered for as long as the matrix lives and is not changed."""
        rowptr, col = x.crow_indices(), x.col_indices()
        if x.is_inference():  # has no version to watch
            return cls._made(rowptr, col, x.size(1))
        state = ids_state(rowptr, col)
        if _REMEMBERED.get(x, (None,))[0] != state:
            _REMEMBERED[x] = state, cls._made(rowptr, col, x.size(1))
        pattern: Pattern = _REMEMBERED[x][1]
        return pattern

    @classmethod
    def _made(cls, rowptr: Tensor, col: Tensor, num_cols: int) -> Pattern:
        # Lightning validates in inference mode; what is made there must serve training too.
        with torch.inference_mode(False):
            wide = max(rowptr.numel(), col.numel(), num_cols) > _INT32_MAX
            dtype = torch.int64 if wide else torch.int32
            return cls(rowptr.detach().to(dtype, copy=True), col.detach().to(dtype, copy=True), num_cols)

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return self.rowptr.numel() - 1

    @cached_property
    def row(self) -> Tensor:
        """`[nnz]`, the row of each non-zero."""
        with torch.inference_mode(False):
            row: Tensor = ptr2index(self.rowptr, output_size=self.col.numel())
            return row

    @cached_property
    def transpose(self) -> tuple[Pattern, Tensor]:
        """The pattern of the transpose, and the place here of each of its non-zeros `[nnz]`."""
        with torch.inference_mode(False):
            col, place = torch.sort(self.col, stable=True)
            rowptr = index2ptr(col.long(), self.num_cols).to(col.dtype)
            return Pattern(rowptr, self.row.index_select(0, place).to(col.dtype), self.num_rows), place

    def copies(self, n: int) -> Pattern:
        """The pattern of n such matrices along the diagonal of a larger one."""
        if n not in self._copies:
            transpose, place = self.transpose
            with torch.inference_mode(False):
                made = self._diagonal(n)
                number = torch.arange(n, device=place.device)[:, None]
                # that of the whole is of those of the parts, so that nothing is sorted
                vars(made)["transpose"] = transpose._diagonal(n), (place + place.numel() * number).flatten()
            self._copies.clear()  # of a stack of models that grows smaller one size is in use at a time
            self._copies[n] = made
        return self._copies[n]

    def _diagonal(self, n: int) -> Pattern:
        nnz, wide = self.col.numel(), n * max(self.col.numel(), self.num_rows, self.num_cols) > _INT32_MAX
        number = torch.arange(n, device=self.col.device, dtype=torch.int64 if wide else self.col.dtype)[:, None]
        rowptr = torch.cat([self.rowptr[:1].to(number.dtype), (self.rowptr[1:] + nnz * number).flatten()])
        return Pattern(rowptr, (self.col + self.num_cols * number).flatten(), n * self.num_cols)


# The patterns already read: matrix -> (state of its ids, Pattern). Nothing in a value may hold the key.
_REMEMBERED = WeakTensorKeyDictionary()


class SparseFeatures(Tensor):
    """A sparse matrix `[N, F]` on its way to a layer: a pattern that never changes and values that dropout does.

    It tells its shape, dtype and device, and `Linear` takes it. Unlike a torch.sparse CSR matrix it shares its pattern
    with others, and `torch.func` may map over its values. Within `torch.func.grad` torch cannot read a CSR matrix: make
    one of these of it outside.

    Example:
        >>> x = SparseFeatures(torch.eye(3).to_sparse_csr())
        >>> x.shape, x.content
        (torch.Size([3, 3]), tensor([1., 1., 1.]))
    """

    pattern: Pattern
    kept: Tensor  # [nnz] before dropout, or [H, nnz] of H matrices with one pattern
    seed: Tensor | None  # of the dropout, or [H]
    p: float

    @staticmethod
    def __new__(cls, x: Tensor, content: Tensor | None = None) -> SparseFeatures:
        """From a CSR matrix, or from one of these and other values."""
        own: SparseFeatures = Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype, device=x.device)
        own.pattern = x.pattern if isinstance(x, SparseFeatures) else Pattern.of(x)
        own.seed, own.p = (x.seed, x.p) if isinstance(x, SparseFeatures) and content is None else (None, 0.0)
        if content is None:
            content = x.kept if isinstance(x, SparseFeatures) else x.values()
        own.kept = content
        return own

    @property
    def content(self) -> Tensor:
        """The values `[nnz]`, or `[H, nnz]` of several; what `Linear` does without, as it drops out while it sums."""
        return self.kept if self.seed is None else _dropped(self.kept, self.seed, self.p)

    @property
    def several(self) -> bool:
        """Whether these are H matrices with one pattern."""
        return self.kept.dim() > 1 or (self.seed is not None and self.seed.dim() > 0)

    def dropped(self, p: float, *times: int) -> SparseFeatures:
        """Dropout of the values, drawn H times where `times` is H: then these are H matrices."""
        own = SparseFeatures(self, self.content)
        seeds = [draw_seed(self.device) for _ in range(math.prod(times))]
        seed = torch.stack(seeds).view(times)
        several = bool(times) or torch._C._are_functorch_transforms_active()
        if several:  # drawn where they are summed; else once for all sums
            own.seed, own.p = seed, p
        else:
            own.kept = _dropped(own.kept, seed, p)
        return own

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} of sparse features: only dropout and the layers' Linear take them.")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SparseFeatures({tuple(self.shape)}, nnz={self.pattern.col.numel()})"


def is_sparse_features(x: Any) -> bool:
    """Whether x is a torch.sparse CSR matrix or `SparseFeatures`."""
    return isinstance(x, SparseFeatures) or (isinstance(x, Tensor) and x.layout == torch.sparse_csr)


def dropout(x: Tensor, p: float, training: bool = True) -> Tensor:
    """Feature dropout on a dense `[N, F]` or, on the non-zeros alone, a sparse one: a zero stays zero either way.

    What is dropped follows from a seed, as in `attention.dropout`; in compiled code torch draws it.

    Raises:
        ValueError: if p is outside [0, 1].

    Example:
        >>> x = dropout(torch.eye(3).to_sparse_csr(), p=0.5)
        >>> set(x.content.tolist()) <= {0.0, 2.0}
        True
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout is {p}, expected a probability in [0, 1].")
    if not training or p == 0.0:
        return x
    if is_sparse_features(x):
        return SparseFeatures(x).dropped(p)
    return F.dropout(x, p) if torch.compiler.is_compiling() else x * keep(x, p)


class Linear(dense.Linear):  # type: ignore[misc]
    """PyG's Linear, for sparse features too: of those, the rows of W^T are weighted and summed.

    Example:
        >>> lin, x = Linear(3, 2), torch.eye(3)
        >>> torch.equal(lin(x.to_sparse_csr()), lin(x))
        True
    """

    def forward(self, x: Tensor) -> Tensor:
        """`[N, F]`, dense or sparse, to dense `[N, F']`."""
        if not torch.jit.is_scripting():  # noqa: SIM102  # TorchScript leaves out such a branch alone
            if is_sparse_features(x):
                out = linear(SparseFeatures(x), self.weight.t())
                return out if self.bias is None else out + self.bias.to(out.dtype)
        return F.linear(x, self.weight, self.bias)


def linear(x: SparseFeatures, weight: Tensor) -> Tensor:
    """x W, `[N, F]` and `[F, D]` to `[N, D]`, or all H products of `[H, N, F]` and `[H, F, D]`.

    Sums are in the dtype of the weights or wider; under autocast the result is in its dtype, as of a dense x.
    Differentiable any number of times in the values and in the weights, the same bits every time; `torch.func.vmap`
    maps over both, with one kernel for all.
    """
    out = _sums(x.kept, weight, x.seed, x.pattern, x.p, False)
    device = weight.device.type
    return out.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else out


def adjacency(edge_index: Tensor, edge_weight: Tensor, num_nodes: int) -> SparseFeatures:
    """The matrix `[N, N]` of weighted edges, rows by dst: its `linear` sums over neighbours. Repeated edges add up.

    Raises:
        RuntimeError: if an id is outside of `[0, N)`.

    Example:
        >>> matrix = adjacency(torch.tensor([[0, 1], [2, 2]]), torch.tensor([1.0, 10.0]), 3)
        >>> linear(matrix, torch.tensor([[1.0], [2.0], [3.0]])).flatten()
        tensor([ 0.,  0., 21.])
    """
    size = (num_nodes, num_nodes)
    matrix = torch.sparse_coo_tensor(edge_index.flip(0), edge_weight, size, check_invariants=True)
    return SparseFeatures(matrix.to_sparse_csr())


# Two sums over the non-zeros, each the derivative of the other, of one matrix or of several with one pattern:
#   out_i = sum_k v_k W_col(k) over row i     and     p_k = <left_row(k), right_col(k)>.
# In forward mode plain torch computes both, as in `attention.segment`.


def _sums(values: Tensor, weight: Tensor, seed: Tensor | None, pattern: Pattern, p: float, back: bool) -> Tensor:
    if not in_forward_mode():
        out: Tensor = _Sums.apply(values, weight, seed, pattern, p, back)
        return out
    values = values if seed is None else _dropped(values, seed, p)
    row, col, num_rows = pattern.row, pattern.col, pattern.num_rows
    if back:
        row, col, num_rows = col, row, pattern.num_cols
    terms = values.unsqueeze(-1) * weight.index_select(-2, col)
    return terms.new_zeros(*terms.shape[:-2], num_rows, terms.size(-1)).index_add(-2, row, terms)


def _products(left: Tensor, right: Tensor, pattern: Pattern) -> Tensor:
    if in_forward_mode():
        return (left.index_select(-2, pattern.row) * right.index_select(-2, pattern.col)).sum(-1)
    out: Tensor = _Products.apply(left, right, pattern)
    return out


class _Sums(torch.autograd.Function):
    """X W `[rows, D]`, or X^T W `[columns, D]` if `back`, of the matrix with these values, dropped out by the seed.

    Values, weight and seed may have an axis in front.
    """

    @staticmethod
    def forward(values: Tensor, weight: Tensor, seed: Tensor | None, pattern: Pattern, p: float, back: bool) -> Tensor:
        out = weighted_rows(values, weight, seed, p, pattern, back)
        if out is not None:
            return out
        if seed is not None:
            return _Sums.forward(_dropped(values, seed, p), weight, None, pattern, p, back)
        if batch := values.shape[:-1] or weight.shape[:-2]:
            values, weight = (t.expand(*batch, *t.shape[-own:]).flatten(0, 1) for t, own in ((values, 1), (weight, 2)))
            made = _Sums.forward(values, weight, None, pattern.copies(*batch), p, back)
            return made.view(*batch, -1, weight.size(-1))
        if back:
            pattern, place = pattern.transpose
            values = values.index_select(0, place)
        return F.embedding_bag(
            pattern.col,
            weight.contiguous(),
            pattern.rowptr,
            mode="sum",
            per_sample_weights=values.contiguous(),
            include_last_offset=True,
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.pattern, ctx.p, ctx.back = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, weight, seed = ctx.saved_tensors
        grad_values = grad_weight = None
        if ctx.needs_input_grad[0]:
            left, right = (weight, grad) if ctx.back else (grad, weight)
            products = _products(left, right, ctx.pattern)
            products = products if seed is None else _dropped(products, seed, ctx.p)
            grad_values = products.sum_to_size(values.shape)
        if ctx.needs_input_grad[1]:
            made = _sums(values, grad, seed, ctx.pattern, ctx.p, not ctx.back)
            grad_weight = made.sum_to_size(weight.shape)
        return grad_values, grad_weight, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
        return _each(_Sums, info.batch_size, in_dims, args, (1, 2, 0))


class _Products(torch.autograd.Function):
    """The inner products of rows `[rows, D]` and `[columns, D]` at the non-zeros: `[nnz]`; or with an axis in front."""

    @staticmethod
    def forward(left: Tensor, right: Tensor, pattern: Pattern) -> Tensor:
        batch = left.shape[:-2] or right.shape[:-2]
        step = max(1, _BLOCK // max(1, left.size(-1) * math.prod(batch)))
        ends = zip(pattern.row.split(step), pattern.col.split(step), strict=True)
        parts = [(left.index_select(-2, row) * right.index_select(-2, col)).sum(-1) for row, col in ends]
        return torch.cat(parts, -1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Pattern], output: Tensor) -> None:
        left, right, ctx.pattern = inputs
        ctx.save_for_backward(left, right)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        left, right = ctx.saved_tensors
        grad_left = grad_right = None
        if ctx.needs_input_grad[0]:
            grad_left = _sums(grad, right, None, ctx.pattern, 0.0, False).sum_to_size(left.shape)
        if ctx.needs_input_grad[1]:
            grad_right = _sums(grad, left, None, ctx.pattern, 0.0, True).sum_to_size(right.shape)
        return grad_left, grad_right, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
        return _each(_Products, info.batch_size, in_dims, args, (2, 2))


def _each(function: Any, n: int, in_dims: Any, args: Any, dims: tuple[int, ...]) -> tuple[Tensor, int]:
    """`function` of all n. Its first arguments have so many `dims` each, and one more where they are several already:
    then both axes become one.
    """
    given, rest = args[: len(dims)], args[len(dims) :]
    front = [t if dim is None else t.movedim(dim, 0) for t, dim in zip(given, in_dims, strict=False)]
    inner = [
        t is not None and t.dim() - own > (dim is not None) for t, dim, own in zip(given, in_dims, dims, strict=False)
    ]
    if not any(inner):
        return function.apply(*front, *rest), 0
    m = next(t.size(-own - 1) for t, own, there in zip(front, dims, inner, strict=True) if there)
    for at, (t, dim, own, there) in enumerate(zip(front, in_dims, dims, inner, strict=False)):
        if dim is not None or there:  # what has neither axis is shared
            t = t if there else t.unsqueeze(t.dim() - own)
            front[at] = t.expand(n, m, *t.shape[t.dim() - own :]).flatten(0, 1)
    out: Tensor = function.apply(*front, *rest)
    return out.unflatten(0, (n, m)), 0


def _dropped(values: Tensor, seed: Tensor, p: float) -> Tensor:
    return values * kept(seed, values.size(-1), p, values.dtype)


_BLOCK = 1 << 22  # numbers gathered at a time
