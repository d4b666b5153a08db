"""Linear maps of dense and sparse features, and feature dropout."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn.dense.linear as dense
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from .products import sums
from .sparse import SparseFeatures, is_sparse_features

_LARGE = 1 << 27  # products of two numbers, about 3 ms by MKL, from which oneDNN's code for a new size pays


class Linear(dense.Linear):  # type: ignore[misc]
    """PyG's Linear, for sparse features too: of those, the rows of W^T are weighted and summed.

    Example:
        >>> lin, x = Linear(3, 2), torch.eye(3)
        >>> torch.equal(lin(x.to_sparse_csr()), lin(x))
        True
    """

    def forward(self, x: Tensor) -> Tensor:
        """`[N, F]`, dense or sparse, to dense `[N, F']`."""
        if is_sparse_features(x):
            out = linear(SparseFeatures(x), self.weight.t())
            return out if self.bias is None else out + self.bias.to(out.dtype)
        return F.linear(x, self.weight, self.bias)


def hooked(module: nn.Module) -> bool:
    """Return True if a call of the module does not run the `forward` of its class alone."""
    # `_has_any_global_hook` is private; torch's own compiler calls it, and global hooks have no public query
    before, after = module._forward_pre_hooks or module._backward_pre_hooks, module._forward_hooks
    return bool(before or after or module._backward_hooks or "forward" in vars(module) or _has_any_global_hook())


def is_affine(lin: Any) -> bool:
    """Return True if a linear map computes x W^T + b and nothing else, with a weight that is there."""
    return type(lin) is Linear and lin.in_channels >= 0 and not hooked(lin)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype to which autocast rounds x, None if it does not."""
    device = x.device.type
    rounds = x.dtype != torch.float64 and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if rounds else None


def linear(x: SparseFeatures, weight: Tensor) -> Tensor:
    """x W, `[N, F]` and `[F, D]` to `[N, D]`, or all H products of `[H, N, F]` and `[H, F, D]`.

    Sums are in the dtype of the weights or wider; under autocast the result is in its dtype, as of a dense x.
    Differentiable any number of times in the values and in the weights, the same bits every time; `torch.func.vmap`
    maps over both, with one kernel for all.
    """
    out = sums(x.undropped, weight, x.seed, x.p, x.pattern, False)
    dtype = autocast_dtype(out)
    return out if dtype is None else out.to(dtype)


@functools.cache
def _onednn() -> Any:
    """Return oneDNN's linear map, as Inductor calls it; None if torch has none, or has no MKL in its place."""
    available = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    packet = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if available else None
    return None if packet is None else packet.default


def is_large(x: Tensor, width: int) -> bool:
    """Return True if oneDNN computes the product of x `[N, F]` with a matrix of F x `width`, see `product`."""
    return (
        x.numel() * width >= _LARGE
        and not torch.is_grad_enabled()
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and torch._C._get_mkldnn_enabled()
        and _onednn() is not None
    )


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b, `[N, F]` and `[D, F]` to `[N, D]`, as `F.linear` does.

    On a CPU, oneDNN computes large products outside of autograd. `F.linear` calls MKL, which computes with half the
    width of the vectors of processors that are not Intel's.
    """
    if is_large(x, weight.size(0)):
        if not (weight.is_contiguous() or weight.t().is_contiguous()):  # for which oneDNN has no fast code
            weight = weight.contiguous()
        return _onednn()(x.contiguous(), weight, bias, "none", [], "")  # type: ignore[no-any-return]
    return F.linear(x, weight, bias)
