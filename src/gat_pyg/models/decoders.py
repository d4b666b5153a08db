"""Link decoders: one or several outputs for each pair of nodes, from the embeddings of both."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import cast

import torch
from torch import Tensor, nn

from .mlp import MLP


class DotProduct(nn.Module):
    r"""The inner product of both embeddings, without parameters (Kipf & Welling, Variational Graph Auto-Encoders).

    .. math::
        s_{ij} = z_i^T z_j

    Example:
        >>> DotProduct()(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0, 1], [1, 1]]))
        tensor([11., 25.])
    """

    def forward(self, z: Tensor, edge_label_index: Tensor) -> Tensor:
        """Return `[L]` for z `[N, C]` and pairs `[2, L]`; O(L C) time and memory."""
        z_src, z_dst = _ends(z, edge_label_index)
        return (z_src * z_dst).sum(-1)

    def of_all_pairs(self, z_src: Tensor, z_dst: Tensor) -> Tensor:
        """Return `[A, B]` for all pairs of the embeddings `[A, C]` and `[B, C]`."""
        return z_src @ z_dst.t()


class Bilinear(nn.Module):
    r"""A bilinear form of both embeddings, one for each output; not symmetric, as directed links need.

    .. math::
        s_{ij}^t = z_i^T \mathbf{W}^t z_j + b^t

    A score is a sum of C^2 products. So the standard deviation of the initial weights is 1 / C: embeddings whose
    entries are independent, with mean 0 and variance 1, have initial scores of variance 1 for any C. By Glorot's rule,
    which is for sums of C products, the variance would be C.

    Args:
        channels: C, the width of the embeddings.
        out_channels: number of outputs T; None for a single one, without a dimension.

    Example:
        >>> Bilinear(4, 3)(torch.randn(5, 4), torch.tensor([[0, 1], [1, 4]])).shape
        torch.Size([2, 3])
    """

    def __init__(self, channels: int, out_channels: int | None = None) -> None:
        super().__init__()
        self.out_channels = out_channels
        self.weight = nn.Parameter(torch.empty(out_channels or 1, channels, channels))
        self.bias = nn.Parameter(torch.empty(out_channels or 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the parameters again: weights uniform with standard deviation 1 / C, biases zero."""
        bound = math.sqrt(3) / self.weight.size(-1)
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.zeros_(self.bias)

    def forward(self, z: Tensor, edge_label_index: Tensor) -> Tensor:
        """Return `[L, T]` or `[L]` for z `[N, C]` and pairs `[2, L]`; O(N C^2 T + L C T) time."""
        _check(z, edge_label_index)
        src, dst = edge_label_index
        projected = torch.einsum("nc,tcd->ntd", z, self.weight)  # once for each node, not for each pair
        out = torch.einsum("ltd,ld->lt", projected.index_select(0, src), z.index_select(0, dst)) + self.bias
        return out if self.out_channels is not None else out.squeeze(1)

    def of_all_pairs(self, z_src: Tensor, z_dst: Tensor) -> Tensor:
        """Return `[A, B]`, the first output for all pairs of the embeddings `[A, C]` and `[B, C]`."""
        return z_src @ self.weight[0] @ z_dst.t() + self.bias[0]


class Perceptron(MLP):
    r"""A multilayer perceptron of the product of both embeddings, or of the two side by side.

    .. math::
        s_{ij} = \mathrm{MLP}(z_i \odot z_j) \qquad \text{or} \qquad \mathrm{MLP}(z_i \Vert z_j)

    The product is symmetric, and is what the Open Graph Benchmark's examples use; "concat" suits directed links and
    edge labels. With `edge_dim`, the features of the pair are appended: :math:`\mathrm{MLP}(z_i \Vert z_j \Vert
    e_{ij})`.

    Under autocast, the last map is computed in the dtype of its weights: in bfloat16, with 8 significant bits, many
    scores would be equal, and no ranking could tell them apart.

    Args:
        channels: C, the width of the embeddings.
        out_channels: number of outputs T; None for a single one, without a dimension.
        hidden_channels: the width of the hidden layers, by default C.
        num_layers: the number of layers.
        dropout: p, for the inputs of all layers but the first.
        act: the name of the activation between layers.
        combine: "product" or "concat".
        edge_dim: D, the number of features of each pair; None if they have none.
        residual: add the input to each hidden layer before its activation, as in the deep decoder of Ma et
            al. (Reconsidering the performance of GAE in link prediction, CIKM 2025).

    Raises:
        ValueError: if an argument is out of range, or `residual` meets hidden layers of another width.

    Example:
        >>> Perceptron(4)(torch.randn(5, 4), torch.tensor([[0, 1], [1, 4]])).shape
        torch.Size([2])
    """

    def __init__(
        self,
        channels: int,
        out_channels: int | None = None,
        hidden_channels: int | None = None,
        num_layers: int = 2,
        dropout: float = 0.0,
        act: str = "relu",
        combine: str = "product",
        edge_dim: int | None = None,
        residual: bool = False,
    ) -> None:
        if combine not in ("product", "concat"):
            raise ValueError(f"combine is {combine!r}, expected 'product' or 'concat'.")
        if num_layers < 1:
            raise ValueError(f"num_layers is {num_layers}, expected at least 1.")
        width = channels * (2 if combine == "concat" else 1) + (edge_dim or 0)
        widths = [width, *[hidden_channels or channels] * (num_layers - 1), out_channels or 1]
        super().__init__(widths, dropout, act, residual)
        self.out_channels, self.combine, self.edge_dim = out_channels, combine, edge_dim

    def forward(  # type: ignore[override]
        self, z: Tensor, edge_label_index: Tensor, edge_label_attr: Tensor | None = None
    ) -> Tensor:
        """Return `[L, T]` or `[L]` for z `[N, C]` and pairs `[2, L]`; memory of O(L) rows of each layer's width.

        Raises:
            ValueError: unless the features `edge_label_attr` are `[L, D]`, or None if the perceptron takes none.
        """
        z_src, z_dst = _ends(z, edge_label_index)
        out = z_src * z_dst if self.combine == "product" else torch.cat([z_src, z_dst], dim=-1)
        _check_features(edge_label_attr, edge_label_index.size(1), self.edge_dim)
        if edge_label_attr is not None:
            out = torch.cat([out, edge_label_attr.to(out.dtype)], dim=-1)
        out = super().forward(out)
        return out if self.out_channels is not None else out.squeeze(-1)

    def _last(self, x: Tensor) -> Tensor:
        with nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):  # it rejects meta tensors
            return super()._last(x.to(next(self.lins[-1].parameters()).dtype))

    def of_all_pairs(self, z_src: Tensor, z_dst: Tensor) -> Tensor:
        """Return `[A, B]` for all pairs of the embeddings `[A, C]` and `[B, C]`; O(A B C) memory."""
        A, B = len(z_src), len(z_dst)
        ends = torch.cartesian_prod(torch.arange(A), torch.arange(A, A + B)).t()
        return self.forward(torch.cat([z_src, z_dst]), ends.to(z_src.device)).view(A, B)


class Popular(nn.Module):
    r"""Another decoder and the popularity of the second node: the logarithm of its in-degree k in the message edges.

    .. math::
        s_{ij} = \mathrm{decoder}(z_i, z_j) + w \, (\log(1 + k_j) - c)

    c is the mean of the logarithm over the second nodes of all edges. At first w is 1, and the last weights of a
    `Perceptron` are 0, so that the scores are those of popularity, which the training corrects.

    Args:
        decoder: a decoder with one output. z has a further column, `log(1 + k) - c`, which it does not get.

    Example:
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.7]])  # the last column is log(1 + k) - c
        >>> Popular(DotProduct())(z, torch.tensor([[0], [1]]))
        tensor([1.7000], grad_fn=<AddBackward0>)
    """

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder, self.weight = decoder, nn.Parameter(torch.ones(()))
        if isinstance(decoder, Perceptron):
            nn.init.zeros_(cast(Tensor, decoder.lins[-1].weight))

    def forward(self, z: Tensor, edge_label_index: Tensor, **features: Tensor | None) -> Tensor:
        """Return `[L]` for z `[N, C + 1]` and pairs `[2, L]`."""
        scores: Tensor = self.decoder(z[:, :-1], edge_label_index, **features)
        return scores + self.weight * z[:, -1].index_select(0, edge_label_index[1])

    def of_all_pairs(self, z_src: Tensor, z_dst: Tensor) -> Tensor:
        """Return `[A, B]` for all pairs of the embeddings `[A, C + 1]` and `[B, C + 1]`."""
        scores: Tensor = self.decoder.of_all_pairs(z_src[:, :-1], z_dst[:, :-1])  # type: ignore[operator]
        return scores + self.weight * z_dst[:, -1]


def link_decoder(name: str, channels: int, out_channels: int | None = None, **options: object) -> nn.Module:
    """Build the decoder "dot", "bilinear" or "mlp", called `decoder(z, edge_label_index)`.

    Args:
        name: name of the decoder.
        channels: C, the width of the embeddings.
        out_channels: number of outputs T; None for a single one, without a dimension.
        **options: further arguments of `Perceptron`.

    Raises:
        ValueError: if there is no such decoder, "dot" is to have several outputs, or a decoder other than "mlp" is to
            take features of the pairs (`edge_dim`).

    Example:
        >>> link_decoder("mlp", 16, num_layers=3)(torch.randn(3, 16), torch.tensor([[0], [2]])).shape
        torch.Size([1])
    """
    if name in ("dot", "bilinear") and options.get("edge_dim") is not None:
        raise ValueError(f"the decoder {name!r} takes no features of the pairs, but edge_dim is given. Use 'mlp'.")
    if name == "dot":
        if out_channels is not None:
            raise ValueError(
                f"the dot product gives one output for each pair, but out_channels is {out_channels}. Use 'bilinear' "
                "or 'mlp'."
            )
        return DotProduct()
    if name == "bilinear":
        return Bilinear(channels, out_channels)
    if name == "mlp":
        return Perceptron(channels, out_channels, **options)  # type: ignore[arg-type]
    raise ValueError(f"there is no link decoder {name!r}, expected dot, bilinear or mlp.")


def _ends(z: Tensor, edge_label_index: Tensor) -> tuple[Tensor, Tensor]:
    """Return the embeddings of the first and of the second node of each pair."""
    _check(z, edge_label_index)
    src, dst = edge_label_index
    return z.index_select(0, src), z.index_select(0, dst)


def _check_features(edge_label_attr: Tensor | None, L: int, D: int | None) -> None:
    if (None if edge_label_attr is None else tuple(edge_label_attr.shape)) != (None if D is None else (L, D)):
        passed = "missing" if edge_label_attr is None else f"of shape {tuple(edge_label_attr.shape)}"
        expected = "none: edge_dim is None" if D is None else f"({L}, {D}), the features of each pair"
        raise ValueError(f"edge_label_attr is {passed}, expected {expected}.")


def _check(z: Tensor, edge_label_index: Tensor) -> None:
    if edge_label_index.dim() != 2 or edge_label_index.size(0) != 2:
        hint = " Did you mean edge_label_index.t()?" if edge_label_index.shape[1:] == (2,) else ""
        raise ValueError(f"edge_label_index has shape {tuple(edge_label_index.shape)}, expected (2, L).{hint}")
    if z.dim() != 2:
        raise ValueError(f"z has shape {tuple(z.shape)}, expected (N, C), an embedding for each node.")
