"""Attention mechanisms: by name, as modules, and as the `Score` that the kernels compute."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter
from torch_geometric.nn.inits import glorot
from torch_geometric.typing import OptTensor

from ..attention.pair import Dot, GATv2
from ..attention.score import Score, widened
from ..features.linear import Linear, hooked, is_affine
from ..kernels.device import result_dtype
from .autograd_node import Affine, without_autocast

ONE_END = "x is (x_src, None), but both ends of an edge are scored. Pass (x_src, x_dst)."


class DotProduct(nn.Module):
    r"""Scaled dot-product scores (Vaswani et al., NeurIPS 2017), a mechanism for `GATConv` without parameters.

    .. math::
        e_{ij} = \langle \mathbf{W} h_i, \mathbf{W} h_j \rangle / \sqrt{C}

    Example:
        >>> DotProduct()(torch.ones(5, 2, 4), torch.ones(5, 2, 4)).shape
        torch.Size([5, 2])
    """

    def forward(self, x_dst: Tensor, x_src: Tensor, edge_attr: OptTensor = None) -> Tensor:
        """`[E, H, C]` of each edge's dst and src to scores `[E, H]`; edge features play no part."""
        return (x_dst * x_src).sum(dim=-1) / math.sqrt(x_src.size(-1))

    def score(self, x_dst: Tensor, x_src: Tensor, edge_attr: OptTensor = None) -> Score | None:
        """The same for all edges at once, from the features of dst and src: `[N, H, C]` each."""
        return Dot(x_dst)


class DynamicAttention(nn.Module):
    r"""GATv2's scores (Brody et al., ICLR 2022), a mechanism for `GATConv`; it has one W where `GATv2Conv` has two.

    .. math::
        e_{ij} = \vec{\mathbf{a}}^T \mathrm{LeakyReLU}(\mathbf{W} h_i + \mathbf{W} h_j + \mathbf{W}_e u_{ij})

    Args:
        heads: number of heads H.
        out_channels: number of channels C per head.
        edge_dim: the number of edge features, if any.
        negative_slope: slope of the LeakyReLU.

    Example:
        >>> DynamicAttention(heads=2, out_channels=4)(torch.ones(5, 2, 4), torch.ones(5, 2, 4)).shape
        torch.Size([5, 2])
    """

    def __init__(self, heads: int, out_channels: int, edge_dim: int | None = None, negative_slope: float = 0.2) -> None:
        super().__init__()
        self.heads = heads
        self.out_channels = out_channels
        self.negative_slope = negative_slope
        self.att = Parameter(torch.empty(1, heads, out_channels))
        self.lin_edge = None if edge_dim is None else glorot_linear(edge_dim, heads * out_channels)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise every parameter again, Glorot uniform."""
        glorot(self.att)
        if self.lin_edge is not None:
            self.lin_edge.reset_parameters()

    def forward(self, x_dst: Tensor, x_src: Tensor, edge_attr: OptTensor = None) -> Tensor:
        """`[E, H, C]` of each edge's dst and src, and its features `[E, D]`, to scores `[E, H]`."""
        return dynamic_score(self, x_dst, x_src, edge_attr)

    def score(self, x_dst: Tensor, x_src: Tensor, edge_attr: OptTensor = None) -> Score | None:
        """The same for all edges at once, from the features of dst and src; None if W_e is not a plain product."""
        return gatv2_score(self, x_dst, edge_attr)


class CosineSimilarity(nn.Module):
    r"""AGNN's scores (Thekumparampil et al., 2018), a mechanism for `GATConv`, with a temperature for each head.

    .. math::
        e_{ij} = \beta \cos(\mathbf{W} h_i, \mathbf{W} h_j)

    Args:
        heads: number of heads H.

    Example:
        >>> CosineSimilarity(heads=2)(torch.ones(5, 2, 4), torch.ones(5, 2, 4)).tolist()[0]
        [1.0, 1.0]
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.beta = Parameter(torch.ones(heads))

    def reset_parameters(self) -> None:
        """Set every beta to 1."""
        torch.nn.init.ones_(self.beta)

    def forward(self, x_dst: Tensor, x_src: Tensor, edge_attr: OptTensor = None) -> Tensor:
        """`[E, H, C]` of each edge's dst and src to scores `[E, H]`; edge features play no part."""
        x_dst, x_src = F.normalize(x_dst, dim=-1), F.normalize(x_src, dim=-1)
        return self.beta * (x_dst * x_src).sum(dim=-1)

    def score(self, x_dst: Tensor, x_src: Tensor, edge_attr: OptTensor = None) -> Score | None:
        """Return the score of all edges: `Dot` of unit vectors, times sqrt(C) to cancel its factor."""
        unit = _unit(x_src)
        query = math.sqrt(x_src.size(-1)) * self.beta[:, None] * (unit if x_dst is x_src else _unit(x_dst))
        dtype = result_dtype(x_dst, x_src, self.beta)
        return Dot(query.to(dtype), key=unit.to(dtype))


# A function of heads, out_channels, edge_dim and negative_slope that builds a module, or None where the layer scores
MECHANISMS: dict[str, Callable[..., nn.Module] | None] = {
    "additive": None,
    "constant": None,
    "dot": lambda *_: DotProduct(),
    "gatv2": DynamicAttention,
    "cosine": lambda heads, *_: CosineSimilarity(heads),
}


def build_mechanism(
    mechanism: str | nn.Module | Callable[..., nn.Module],
    heads: int,
    out_channels: int,
    edge_dim: int | None,
    negative_slope: float,
) -> tuple[nn.Module | None, bool]:
    """Return the module that scores the edges, None if the layer does, and whether it has attention vectors.

    A class or function is called with those of the other arguments, by name, that it takes.

    Raises:
        ValueError: if the name is unknown, or the mechanism cannot have edge features.
    """
    if callable(mechanism) and not isinstance(mechanism, nn.Module):
        options = {"heads": heads, "out_channels": out_channels, "edge_dim": edge_dim, "negative_slope": negative_slope}
        bound = getattr(mechanism, "keywords", {})  # a functools.partial has some
        taken = [name for name in inspect.signature(mechanism).parameters if name in options and name not in bound]
        mechanism = mechanism(**{name: options[name] for name in taken})
    if isinstance(mechanism, nn.Module):
        return mechanism, False
    if not isinstance(mechanism, str) or mechanism not in MECHANISMS:
        known = ", ".join(map(repr, MECHANISMS))
        raise ValueError(f"mechanism is {mechanism!r}, expected {known} or a module, or its class.")
    build, vectors = MECHANISMS[mechanism], mechanism == "additive"
    if build is not None:
        return build(heads, out_channels, edge_dim, negative_slope), vectors
    if edge_dim is not None and not vectors:
        raise ValueError(f"edge_dim is {edge_dim}, but {mechanism} attention has no score for edge features to act on.")
    return None, vectors


def scored_by_layer(mechanism: Any) -> bool:
    """Return True for the names of the paper's two mechanisms, which need no module."""
    return isinstance(mechanism, str) and mechanism in MECHANISMS and MECHANISMS[mechanism] is None


def own_score(mechanism: nn.Module, x_dst: OptTensor, x_src: Tensor, edge_attr: OptTensor) -> Score | None:
    """Return the `score` of a mechanism that has one and whose `forward` is unchanged, else None."""
    classes = type(mechanism).__mro__
    definer = next(cls for cls in classes if "score" in vars(cls) or "forward" in vars(cls))
    if "score" not in vars(definer) or hooked(mechanism):
        return None
    if x_dst is None:
        raise ValueError(ONE_END)
    return mechanism.score(x_dst, x_src, edge_attr)  # type: ignore[operator]


def _unit(x: Tensor) -> Tensor:
    """Return x / |x| in float32 or wider, zeros for a zero vector."""
    return F.normalize(widened(x), dim=-1)


def glorot_linear(in_channels: int, out_channels: int, bias: bool = False) -> Linear:
    """Return a linear map with weights that are Glorot uniform."""
    return Linear(in_channels, out_channels, bias=bias, weight_initializer="glorot")


def per_head(lin: Any, heads: int) -> Tensor:
    """The weight of a projection of the edges, `[H, C, D]`."""
    return lin.weight.view(heads, lin.weight.size(0) // heads, -1)


def is_plain(lin: Any) -> bool:
    """Return True if a layer's linear map computes x W^T and nothing else, with a weight that is there."""
    return (type(lin) is Affine or is_affine(lin)) and lin.bias is None


def unrounded(function: Callable[..., Tensor], x: Tensor, weight: Tensor) -> Tensor:
    """Return a small product of x and a weight in the dtype of the weight, also under autocast."""
    with nullcontext() if weight.is_meta else without_autocast(weight.device.type):
        return function(x if x.dtype == weight.dtype else x.to(weight.dtype), weight)


def gatv2_score(layer: Any, x_dst: OptTensor, edge_attr: OptTensor) -> Score | None:
    """Return the score of a layer's or mechanism's `att` and `lin_edge`; None if W_e is not a plain product."""
    assert x_dst is not None
    if edge_attr is None or layer.lin_edge is None:
        return GATv2(x_dst, layer.att[0], layer.negative_slope)
    if not is_plain(layer.lin_edge):
        return None
    return GATv2(x_dst, layer.att[0], layer.negative_slope, edge_attr, per_head(layer.lin_edge, layer.heads))


def dynamic_score(layer: Any, x_dst: Tensor, x_src: Tensor, edge_attr: OptTensor) -> Tensor:
    """Return GATv2's scores `[E, H]` of the projected features of each edge's ends, `[E, H, C]`, and of its own."""
    x = x_dst + x_src
    if edge_attr is not None and layer.lin_edge is not None:
        x = x + layer.lin_edge(edge_attr).view(-1, layer.heads, layer.out_channels)
    return (F.leaky_relu(x, layer.negative_slope) * layer.att).sum(dim=-1)
