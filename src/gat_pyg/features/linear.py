"""Linear maps of dense and sparse features, and feature dropout."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import torch_geometric.nn.dense.linear as dense
from torch import Tensor

from .products import _sums
from .sparse import SparseFeatures, is_sparse_features


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
    out = _sums(x.undropped, weight, x.seed, x.p, x.pattern, False)
    device = weight.device.type
    return out.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else out
