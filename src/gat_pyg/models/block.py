"""A block of a network: what surrounds the attention of a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric import EdgeIndex
from torch_geometric.nn.resolver import activation_resolver, normalization_resolver
from torch_geometric.utils import is_torch_sparse_tensor

from ..features.dropout import dropout
from ..graph.layers import accepts_size, is_reversed
from ..graph.remembered import remembered
from .mlp import MLP

Graphs = tuple[Tensor | None, int | None] | None  # the graph of each node and their number; None: norms do not use them


class Block(nn.Module):
    r"""The parts around the attention of a layer: norm, skip connection, activation, dropout and feed-forward layers.

    The attention layer Att and the norm n are arguments of each call: a network has them as `convs` and `norms`, with
    the parameter names of PyG's networks. D is dropout, and the skip connection is 0, h or part of Att.

    .. math::
        h' = \sigma(n(\mathrm{Att}(D\, h) + \mathrm{skip}(h)))

    With `norm_first`, :math:`h' = \sigma(\mathrm{Att}(D\, n(h)) + \mathrm{skip}(h))`. `feed_forward` adds a perceptron,
    :math:`\mathrm{FF}(z) = D\, \mathbf{W}_2\, \sigma(D\, \mathbf{W}_1 z)`. Then dropout acts there instead of on h, and
    the activation is the one between its maps. With `norm_first` the block is then that of Platonov et al. (ICLR 2023),
    or, with a skip connection, that of a transformer, which has a second norm:

    .. math::
        h' = h + \mathrm{FF}(\mathrm{Att}(n(h))) \qquad \text{or} \qquad
        z = \mathrm{skip}(h) + D\, \mathrm{Att}(n(h)), \quad h' = z + \mathrm{FF}(n'(z))

    Without `norm_first`, each norm acts on a sum instead: :math:`h' = n(h + \mathrm{FF}(\mathrm{Att}(h)))`, or
    :math:`z = n(\mathrm{skip}(h) + D\, \mathrm{Att}(h)), h' = n'(z + \mathrm{FF}(z))`. With `separate_self`, FF maps
    the input of the attention beside its result, :math:`\mathrm{FF}(n(h) \Vert z)` (GAT-sep).

    With `initial_residual`, :math:`\mathrm{Att}(\cdot) + w\, h^{(0)}` replaces :math:`\mathrm{Att}(\cdot)`, where
    :math:`h^{(0)}` is the input of the network's first block. It is the initial residual connection of GCNII (Chen et
    al., ICML 2020) without the factor 1 - w of the other term, as in Ma et al. (CIKM 2025).

    Args:
        in_channels: the width of h.
        out_channels: the width of Att's output.
        skip: the skip connection of the attention: "identity" adds h, True is part of Att, False is none.
        dropout: p of the feed-forward part.
        input_dropout: p of Att's input.
        norm: the norm n, by its name in `torch_geometric.nn`: "batch", "layer", "graph", "instance", "pair"; or a class
            or function of the width. With a norm that is neither torch's nor PyG's, a training step computes the whole
            graph. For inference in batches of nodes, such a norm has to act on each row alone.
        norm_kwargs: its arguments. PyG's "layer" is over all nodes of a graph; `{"mode": "node"}` is over each node.
        act: the name of an activation in `torch.nn`, or a callable; None for none.
        norm_first: apply the norm to h rather than to the sum.
        feed_forward: the width of the perceptron's hidden layer as a multiple of `out_channels`; None for no
            feed-forward part. Platonov et al. have 1, transformers 4.
        separate_self: let the feed-forward part also map the node's own features.
        initial_residual: the weight w of the first block's input, which each block adds; None to add nothing.

    Raises:
        ValueError: if the widths do not fit the skip connection, there is no such norm, or `separate_self` has no
            feed-forward part.

    Example:
        >>> from gat_pyg import GATConv
        >>> block, conv = Block(16, 16, norm_first=True, feed_forward=2), GATConv(16, 8, heads=2)
        >>> block(conv, nn.LayerNorm(16), torch.randn(3, 16), torch.tensor([[0, 1], [1, 2]])).shape
        torch.Size([3, 16])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        skip: bool | str = False,
        dropout: float = 0.0,
        input_dropout: float = 0.0,
        *,
        norm: str | nn.Module | Callable[..., nn.Module] | None = None,
        norm_kwargs: dict[str, Any] | None = None,
        act: str | Callable[[Tensor], Tensor] | None = "elu",
        norm_first: bool = False,
        feed_forward: int | None = None,
        separate_self: bool = False,
        initial_residual: float | None = None,
    ) -> None:
        super().__init__()
        if feed_forward is not None and feed_forward < 1:
            raise ValueError(f"feed_forward is {feed_forward}, expected a whole number, at least 1.")
        adds_input = skip == "identity" or (feed_forward is not None and not skip)
        if adds_input and in_channels != out_channels:
            option = "residual is 'identity'" if skip else f"feed_forward is {feed_forward} without a skip connection"
            raise ValueError(
                f"{option} in a layer whose input has {in_channels} features and whose output has {out_channels}, "
                "expected equal widths, to add the input. Use residual=True, a learnable linear map, or pre_linear."
            )
        if separate_self and feed_forward is None:
            raise ValueError("separate_self is True without a feed-forward part. Give its width: feed_forward=1.")
        self.skip, self.dropout, self.input_dropout = skip, dropout, input_dropout
        self.norm_first, self.separate_self, self.initial_residual = norm_first, separate_self, initial_residual
        self.act: Callable[[Tensor], Tensor] = nn.Identity() if act is None else activation_resolver(act)
        self.feed_forward: MLP | None = None
        self.norm: nn.Module | None = None  # the feed-forward part's, if the attention has its own
        if feed_forward is not None:
            width = out_channels + separate_self * in_channels
            self.feed_forward = MLP([width, feed_forward * out_channels, out_channels], dropout, act or "elu")
            self.norm = build_norm(out_channels, norm, norm_kwargs) if skip else None

    def reset_parameters(self) -> None:
        """Initialise the parameters of the feed-forward part again."""
        parts: list[Any] = [self.feed_forward, self.norm]
        for part in parts:
            if hasattr(part, "reset_parameters"):  # not every norm has parameters
                part.reset_parameters()

    def forward(
        self,
        conv: nn.Module,
        norm: nn.Module,
        x: Tensor,
        edge_index: Any,
        edge_attr: Tensor | None = None,
        degrees: Tensor | None = None,
        size: tuple[int, int] | None = None,
        graphs: Graphs = None,
        initial: Tensor | None = None,
    ) -> Tensor:
        """Return h' `[N_dst, C]` for h = x `[N, F]`, or `[B, N_dst, C]` for a batch on one graph.

        Args:
            conv, norm: Att and n.
            x, edge_index, edge_attr: as in `GATConv`.
            degrees: d `[N]`, if alpha_ij is multiplied by sqrt(d_i / d_j).
            size: (N, N_dst), if dst are the first rows of x.
            graphs: the graph of each node `[N]` and their number, for norms that take them; None if none does.
            initial: h^(0), of dst or of more nodes after them; by default x.
        """
        h = normalised(norm, x, graphs) if self.norm_first else x
        h = dropout(h, self.input_dropout, self.training)
        out = _attended(conv, h, edge_index, edge_attr, degrees, size)
        if self.initial_residual is not None:
            initial = x if initial is None else initial
            out = out + self.initial_residual * initial[..., : out.size(-2), :]
        stream = x
        if self.feed_forward is None or self.skip:
            if self.feed_forward is not None:
                out = dropout(out, self.dropout, self.training)
            out = out + _first(x, size) if self.skip == "identity" else out
            out = out if self.norm_first else normalised(norm, out, graphs)
            if self.feed_forward is None:
                return self.act(out)
            assert self.norm is not None
            stream, norm = out, self.norm
            out = normalised(norm, out, graphs) if self.norm_first else out
        if self.separate_self:
            out = torch.cat([_first(h, size), out], -1)
        out = _first(stream, size) + dropout(self.feed_forward(out), self.dropout, self.training)
        return out if self.norm_first else normalised(norm, out, graphs)


def _attended(
    conv: nn.Module,
    x: Tensor,
    edge_index: Any,
    edge_attr: Tensor | None,
    degrees: Tensor | None,
    size: tuple[int, int] | None,
) -> Tensor:
    options: dict[str, Any] = {}
    if degrees is not None:
        src, dst = edge_index.flip(0) if is_reversed(conv) else edge_index
        d = degrees.to(torch.promote_types(x.dtype, torch.float32))
        options["edge_weight"] = (d.index_select(0, dst) / d.index_select(0, src)).sqrt().to(x.dtype)
    if accepts_size(conv):
        out: Tensor = conv(x, edge_index, edge_attr, size=size, **options)
    else:
        out = conv(x if size is None else (x, _first(x, size)), edge_index, edge_attr, **options)
    return out


@remembered
def degrees_of(edge_index: Any, num_nodes: int, add_self_loops: bool, flow: str) -> Tensor:
    """Return the number of edges into each node `[N]`, at least 1; with one self-loop each if layers add them.

    Raises:
        ValueError: if the graph is not an edge list `[2, E]`.
    """
    if not isinstance(edge_index, Tensor) or is_torch_sparse_tensor(edge_index):
        raise ValueError("edge_index is a sparse matrix, but symmetric_norm counts edges: pass an edge list (2, E).")
    edge_index = edge_index.as_tensor() if isinstance(edge_index, EdgeIndex) else edge_index
    src, dst = edge_index if flow == "source_to_target" else edge_index.flip(0)
    counted = (src != dst).to(dst.dtype) if add_self_loops else torch.ones_like(dst)
    count: Tensor = dst.new_zeros(num_nodes).index_add(0, dst, counted)
    return (count + add_self_loops).clamp(min=1)


def _first(x: Tensor, size: tuple[int, int] | None) -> Tensor:
    """Return the rows of dst."""
    return x if size is None else x[..., : size[1], :]


def normalised(norm: nn.Module, x: Tensor, graphs: Graphs) -> Tensor:
    """Return the output of a norm: over each of B graphs for x `[B, N, C]`, or over all their rows without `graphs`."""
    if isinstance(norm, nn.Identity):
        return x
    if graphs is None:
        out: Tensor = norm(x) if x.dim() == 2 else norm(x.flatten(0, 1)).view_as(x)
        return out
    batch, batch_size = graphs
    batch = None if batch is None else batch[: x.size(-2)]
    if x.dim() == 2:
        out = norm(x, batch, batch_size)
    else:
        out = torch.func.vmap(lambda rows: norm(rows, batch, batch_size))(x) if len(x) else x
    return out


def build_norm(
    channels: int,
    norm: str | nn.Module | Callable[..., nn.Module] | None = None,
    norm_kwargs: dict[str, Any] | None = None,
) -> nn.Module:
    """Return a norm of this width, as `Block` describes it; the identity for None.

    Raises:
        ValueError: if there is no norm of this name, or it needs other arguments.
    """
    options = norm_kwargs or {}
    try:
        if norm is None:
            return nn.Identity()
        if not isinstance(norm, str | nn.Module):
            return norm(channels, **options)
        result: nn.Module = normalization_resolver(norm, channels, **options)
    except (TypeError, ValueError) as error:  # there is none, or it needs other arguments
        raise ValueError(
            f"norm is {norm!r} with norm_kwargs {options}, expected the name of a norm of torch_geometric.nn, "
            "such as batch, layer, graph, instance or pair, and its arguments."
        ) from error
    return result
