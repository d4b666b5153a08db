"""Graph attention networks: stacks of the layer as the paper has them, and the attention of any model."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter
from torch_geometric.data import Data

from .attention import attend
from .conv import GATConv, check_layer
from .edges import first_edges, neighbourhoods
from .features import SparseFeatures, dropout, is_sparse_features, linear

_PLANETOID = {"hidden_channels": (8,), "heads": (8, 1), "dropout": 0.6}
_PPI = {"in_channels": 50, "out_channels": 121, "hidden_channels": (256, 256), "heads": (4, 4, 6)}

AUTHORS = ("input_dropout", "value_dropout", "score_bias", "init", "skip")  # what their code has, and the text has not

# Section 3.3 of the paper.
PRESETS: dict[str, dict[str, Any]] = {
    "cora": {"in_channels": 1433, "out_channels": 7, **_PLANETOID},
    "citeseer": {"in_channels": 3703, "out_channels": 6, **_PLANETOID},
    "pubmed": {"in_channels": 500, "out_channels": 3, **_PLANETOID, "heads": (8, 8)},
    "ppi": {**_PPI, "residual": (False, True, False)},
    "const_ppi": {**_PPI, "residual": (False, True, False), "mechanism": "constant"},
}


class GAT(nn.Module):
    r"""A graph attention network (Veličković et al., ICLR 2018): layers of multi-head attention with ELU between.

    Hidden layers concatenate their heads, equation (5); the last one averages them and has no activation, equation (6).
    In training, dropout acts on every layer's input and on the attention coefficients. Input features may be a
    torch.sparse CSR matrix: then it acts on the non-zeros, which comes to the same, and nothing is made dense.

    With the numbers of nodes and edges per hop that a batch of PyG's `NeighborLoader` tells, each layer leaves out what
    no later one looks at; with as many hops as layers the output has the rows of hop 0, the batch's own nodes.

    With `reproduction=True` the layers are those of the authors' code, which the paper's text leaves out in part: every
    head draws its own input dropout ("input_dropout") and its own Glorot weights ("init"), both score maps have a bias
    ("score_bias"), W h is dropped once more after it was scored ("value_dropout"), and a skip connection is the dropped
    input, through a projection with a bias per head where the widths differ ("skip"). A list of these takes some alone.

    Args:
        in_channels: F, the number of input features.
        hidden_channels: C of each hidden layer; as many as there are hidden layers, none for a single layer.
        out_channels: K, the number of classes or labels.
        heads: H of each layer, the last one included.
        dropout: p, of the layers' inputs and of the attention coefficients.
        residual: which layers have a skip connection: one bool for each, or one for all hidden layers after the first.
        mechanism: "additive", "constant" for Const-GAT, "dot" or "gatv2"; a module, as in `GATConv`, serves all layers.
        negative_slope: of the LeakyReLU.
        edge_dim: the number of edge features, if any.
        reproduction: whether to use the authors' form of the layer, or what of it.
        **kwargs: of `GATConv`.

    Raises:
        ValueError: if the lists do not fit each other or an argument is out of range.

    Example:
        >>> model = GAT(16, [8], 7, heads=[8, 1], dropout=0.6)
        >>> model(torch.randn(3, 16), torch.tensor([[0, 1], [1, 2]])).shape
        torch.Size([3, 7])
    """

    supports_sparse_features = True

    def __init__(
        self,
        in_channels: int,
        hidden_channels: Sequence[int],
        out_channels: int,
        heads: Sequence[int],
        dropout: float = 0.0,
        residual: Sequence[bool] | bool = False,
        mechanism: str | nn.Module = "additive",
        negative_slope: float = 0.2,
        edge_dim: int | None = None,
        reproduction: bool | Sequence[str] = False,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        depth = len(hidden_channels) + 1
        if residual is True and depth < 3:
            raise ValueError(
                "residual is True, a skip connection for each hidden layer after the first, but there is no such "
                "layer. Name the layers: residual=[True, False]."
            )
        if isinstance(residual, bool):
            residual = [residual and 0 < layer < depth - 1 for layer in range(depth)]
        for name, given in (("heads", heads), ("residual", residual)):
            if isinstance(given, int):
                raise ValueError(f"{name} is {given}, expected a list with one entry per layer: {[given] * depth}.")
            if len(given) != depth:
                raise ValueError(
                    f"{name} has {len(given)} entries, expected {depth}: one for each of the {depth - 1} hidden layers "
                    f"and one for the output layer."
                )
        some = [reproduction] if isinstance(reproduction, str) else reproduction or ()
        of_authors = AUTHORS if some is True else tuple(some)
        if of_authors and (edge_dim is not None or mechanism not in ("additive", "constant") or kwargs):
            raise ValueError(
                f"reproduction={reproduction} is the authors' layer: it has no edge features, no other mechanisms and "
                "no further options."
            )
        self.dropout = dropout
        self.reproduction = bool(of_authors)
        self.supports_edge_attr = edge_dim is not None
        self.convs = nn.ModuleList()
        for layer, (C, H) in enumerate(zip([*hidden_channels, out_channels], heads, strict=True)):
            options: dict[str, Any] = {
                "heads": H,
                "concat": layer < depth - 1,
                "negative_slope": negative_slope,
                "dropout": dropout,
                "residual": bool(residual[layer]),
                "mechanism": mechanism,
            }
            if of_authors:
                self.convs.append(AuthorsConv(in_channels, C, **options, of_authors=of_authors))
            else:
                self.convs.append(GATConv(in_channels, C, edge_dim=edge_dim, **options, **kwargs))
            in_channels = C * H

    @classmethod
    def preset(cls, name: str, **changes: Any) -> GAT:
        """A network of the paper: "cora", "citeseer", "pubmed", "ppi" or "const_ppi", with `changes` to its arguments.

        Raises:
            ValueError: if there is no such network.

        Example:
            >>> sum(p.numel() for p in GAT.preset("cora", reproduction=True).parameters())
            92391
        """
        if name not in PRESETS:
            raise ValueError(f"there is no preset {name!r}, expected one of {', '.join(PRESETS)}.")
        return cls(**{**PRESETS[name], **changes})

    def reset_parameters(self) -> None:
        """Draw every parameter anew."""
        for conv in self.convs:
            conv.reset_parameters()  # type: ignore[operator]

    @property
    def num_hops(self) -> int | None:
        """How far away nodes may be that a row of the output depends on; None where edges run from target to source."""
        forward = all(getattr(conv, "flow", "source_to_target") == "source_to_target" for conv in self.convs)
        return len(self.convs) if forward else None

    def forward(
        self,
        x: Tensor,
        edge_index: Any,
        edge_attr: Tensor | None = None,
        num_sampled_nodes_per_hop: Sequence[int] | None = None,
        num_sampled_edges_per_hop: Sequence[int] | None = None,
    ) -> Tensor:
        """`[N, F]`, dense or torch.sparse CSR, to logits `[N, K]`; `edge_index` and `edge_attr` as in `GATConv`.

        Raises:
            ValueError: if there are numbers per hop, and fewer hops than layers.
        """
        nodes, edges = list(num_sampled_nodes_per_hop or ()), list(num_sampled_edges_per_hop or ())
        if edges and not len(self.convs) <= len(edges) == len(nodes) - 1:
            raise ValueError(
                f"There are nodes of {len(nodes)} hops and edges of {len(edges)}, expected at least the edges of "
                f"{len(self.convs)} hops, one a layer, and the nodes of one hop more."
            )
        for layer in range(len(self.convs)):
            size = None
            if edges:
                hops = len(edges) - layer
                edge_index, edge_attr = first_edges(edge_index, edge_attr, sum(edges[:hops]))
                size = (x.size(0), sum(nodes[:hops]))
            x = self._layer(layer, x, edge_index, edge_attr, size)
        return x

    def _layer(self, layer: int, x: Tensor, edge_index: Any, edge_attr: Tensor | None, size: Any = None) -> Tensor:
        x = x if layer == 0 else F.elu(x)
        if not self.reproduction:  # there, every head drops its own
            x = dropout(x, self.dropout, self.training)
        out: Tensor = self.convs[layer](x, edge_index, edge_attr, size=size)
        return out

    @torch.no_grad()
    def inference(
        self, loader: Any, device: torch.device | str | None = None, embedding_device: torch.device | str = "cpu"
    ) -> Tensor:
        """The logits `[N, K]` of a whole graph, one layer after the other, in the memory of a batch of nodes.

        Equal to calling the model on the graph, but for rounding. Beside a batch it holds the input and the output of
        one layer, on `embedding_device`, whatever the depth. Arguments as of PyG's models.

        Args:
            loader: batches of all nodes with all their neighbours, one hop away, from PyG's `NeighborLoader` or
                `NodeLoader`: `NodeLoader(data, gat_pyg.sampling.TorchSampler(edge_index, N, [-1]), batch_size=1024)`.
            device: where batches are computed; that of the model if None.
            embedding_device: where all nodes' features are kept.

        Raises:
            ValueError: if the model is in training mode, or the loader leaves out nodes or goes further than one hop.
        """
        if self.training:
            raise ValueError("The model is in training mode, and would drop out. Call model.eval() first.")
        weight = next(self.parameters())
        device = weight.device if device is None else device
        given: Tensor = loader.data.x.to(embedding_device)
        for layer in range(len(self.convs)):
            out: Tensor | None = None
            seen = 0
            for batch in loader:
                n = batch.batch_size
                edge_index, edge_attr = batch.edge_index.to(device), batch.edge_attr
                edge_attr = None if edge_attr is None else edge_attr.to(device, weight.dtype)
                x = given[batch.n_id.to(given.device)].to(device, weight.dtype)
                if seen == 0 and layer == 0 and edge_index.numel() and int(edge_index[1].max()) >= n:
                    raise ValueError("The loader goes further than one hop. Give it num_neighbors=[-1].")
                made = self._layer(layer, x, edge_index, edge_attr, (x.size(0), n)).to(embedding_device)
                out = made.new_empty(given.size(0), made.size(1)) if out is None else out
                out[batch.n_id[:n].to(out.device)] = made
                seen += n
            if out is None or seen != given.size(0):
                raise ValueError(f"The loader gives {seen} of {given.size(0)} nodes. Leave out its input_nodes.")
            given = out
        return given


class AuthorsConv(nn.Module):
    r"""The layer of the authors' code, head by head; `GAT` with `reproduction=True` is made of it.

    For each head, with its own draw of dropout D in training:

    .. math::
        z = \mathbf{W} D(h), \qquad
        e_{ij} = \mathrm{LeakyReLU}(\vec{a}_{dst}^T z_i + b_{dst} + \vec{a}_{src}^T z_j + b_{src}), \qquad
        h'_i = \sum_j D(\alpha_{ij})\, D(z_j) + b + \mathrm{skip}(D(h_i))

    Arguments as in `GATConv`; `of_authors` names what is done in their way, and the rest is done as in `GATConv`. In
    training every head has its own copy of the dropped input, `[H, N, F]`, or of its non-zeros where x is sparse.

    Example:
        >>> AuthorsConv(16, 8, heads=2)(torch.randn(3, 16), torch.tensor([[0, 1], [1, 2]])).shape
        torch.Size([3, 16])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        residual: bool = False,
        mechanism: str | nn.Module = "additive",
        of_authors: Sequence[str] = AUTHORS,
    ) -> None:
        super().__init__()
        check_layer(heads, out_channels, dropout)
        if unknown := [name for name in of_authors if name not in AUTHORS]:
            raise ValueError(f"reproduction names {', '.join(unknown)}, expected some of {', '.join(AUTHORS)}.")
        self.of_authors = tuple(of_authors)
        self.heads = heads
        self.out_channels = out_channels
        self.concat = concat
        self.negative_slope = negative_slope
        self.dropout = dropout
        self.residual = residual
        self.weight = Parameter(torch.empty(heads, in_channels, out_channels))
        self.bias = Parameter(torch.empty(heads, out_channels))
        additive = mechanism == "additive"
        self.att_src = Parameter(torch.empty(heads, out_channels)) if additive else None
        self.att_dst = Parameter(torch.empty(heads, out_channels)) if additive else None
        biased = additive and "score_bias" in of_authors
        self.bias_src = Parameter(torch.empty(heads)) if biased else None
        self.bias_dst = Parameter(torch.empty(heads)) if biased else None
        project = residual and (in_channels != out_channels or "skip" not in of_authors)
        self.res_weight = Parameter(torch.empty(heads, in_channels, out_channels)) if project else None
        self.res_bias = Parameter(torch.empty(heads, out_channels)) if project and "skip" in of_authors else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw every parameter anew: Glorot uniform, for each head or over all of them, biases zero."""
        for weight in (self.weight, self.res_weight, self.att_src, self.att_dst):
            if weight is not None:
                if "init" in self.of_authors:
                    fans = weight.size(1) + (weight.size(2) if weight.dim() == 3 else 1)
                else:  # of W [H C, F] and a [H, C]
                    fans = weight.size(1) + weight.size(0) * (weight.size(2) if weight.dim() == 3 else 1)
                bound = math.sqrt(6 / fans)
                nn.init.uniform_(weight, -bound, bound)
        for bias in (self.bias, self.res_bias, self.bias_src, self.bias_dst):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(
        self,
        x: Tensor,
        edge_index: Any,
        edge_attr: Tensor | None = None,
        size: tuple[int, int] | None = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """`[N, F]` to `[N, H C]`, or `[N, C]` where the heads are averaged; size and attention as of `GATConv`."""
        num_dst = x.size(0) if size is None else size[1]
        looped, edges = neighbourhoods(edge_index, x.size(0), num_dst, add_self_loops=True)
        dropped = self._drop_for_each_head(x)  # [H, N, F]
        z = self._project(dropped, self._of_heads(self.weight))  # [N, H, C]
        score_src = self._score(z, self.att_src, self.bias_src)
        score_dst = self._score(z[:num_dst], self.att_dst, self.bias_dst)
        result = attend(
            self._drop(z.flatten(1)).view_as(z) if "value_dropout" in self.of_authors else z,
            score_src,
            score_dst,
            edges,
            negative_slope=self.negative_slope,
            dropout=self.dropout if self.training else 0.0,
            return_attention_weights=bool(return_attention_weights),
        )
        out, alpha = result if isinstance(result, tuple) else (result, None)
        out = out + self._of_heads(self.bias)
        if self.res_weight is not None:
            out = out + self._project(dropped, self._of_heads(self.res_weight))[:num_dst]
            out = out if self.res_bias is None else out + self._of_heads(self.res_bias)
        elif self.residual:
            out = out + self._dense(dropped)[:num_dst]
        out = out.flatten(1) if self.concat else out.mean(1)
        return out if alpha is None else (out, (looped, alpha.expand(-1, self.heads)))

    def _of_heads(self, parameter: Tensor) -> Tensor:
        """`[H, ...]`; the mean `[1, ...]` where averaged heads attend alike: they are one head of their means."""
        alike = self.att_src is None and not (self.training and self.dropout > 0.0)
        return parameter.mean(0, keepdim=True) if alike and not self.concat else parameter

    def _score(self, z: Tensor, att: Tensor | None, bias: Tensor | None) -> Tensor | None:
        if att is None:
            return None
        score = (z * att).sum(-1)  # [N, H]
        return score if bias is None else score + bias

    def _drop(self, x: Tensor) -> Tensor:
        return dropout(x, self.dropout, self.training)

    def _drop_for_each_head(self, x: Tensor) -> Tensor:
        """The dropped input `[H, N, F]`, or `[1, N, F]` where all heads have the same."""
        dropping = self.training and self.dropout > 0.0
        each = dropping and "input_dropout" in self.of_authors
        if not is_sparse_features(x):
            return self._drop(x.expand(self.heads, *x.shape)) if each else self._drop(x)[None]
        x = SparseFeatures(x)
        heads = (self.heads,) if each else ()
        return x.dropped(self.dropout, *heads) if dropping else x

    def _project(self, x: Tensor, weight: Tensor) -> Tensor:
        """Every head's features by its own weights: `[H or 1, N, F]` and `[H, F, C]` to `[N, H, C]`."""
        if (not x.several) if isinstance(x, SparseFeatures) else (x.size(0) == 1):  # all heads have the same
            wide = weight.transpose(0, 1).flatten(1)  # [F, H C]
            out = linear(x, wide) if isinstance(x, SparseFeatures) else torch.mm(x.squeeze(0), wide)
            return out.view(-1, *weight.shape[::2])
        return (linear(x, weight) if isinstance(x, SparseFeatures) else torch.bmm(x, weight)).transpose(0, 1)

    def _dense(self, x: Tensor) -> Tensor:
        """Every head's features as they are, `[N, H or 1, F]`; of a sparse x, if that is no larger than the output."""
        if not isinstance(x, SparseFeatures):
            return x.transpose(0, 1)
        one = torch.eye(x.size(1), dtype=x.dtype, device=x.device)
        return self._project(x, one.expand(self.heads, -1, -1))


@torch.no_grad()
def attention_of(model: nn.Module, data: Data) -> list[tuple[Any, Tensor]]:
    """The attention coefficients of every layer of a model, ours or PyG's: those it has without dropout.

    Args:
        model: any module whose layers take `return_attention_weights`.
        data: a graph with `x`, `edge_index` and, where the model takes them, `edge_attr`.

    Returns:
        For each attention layer in the order they run, `(edge_index [2, E], alpha [E, H])`: the graph's edges in their
        order without its own self-loops, then the loops that the layer adds.

    Raises:
        ValueError: if no layer gives its attention.

    Example:
        >>> data = Data(x=torch.randn(3, 16), edge_index=torch.tensor([[0, 1], [1, 2]]))
        >>> [alpha.shape for _, alpha in attention_of(GAT(16, [8], 7, heads=[8, 1]), data)]
        [torch.Size([5, 8]), torch.Size([5, 1])]
    """
    found: list[tuple[Any, Tensor]] = []

    def ask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "return_attention_weights": True}

    def take(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        out, attention = output
        found.append(attention)
        return out

    layers = [m for m in model.modules() if "return_attention_weights" in inspect.signature(m.forward).parameters]
    if not layers:
        raise ValueError(f"no layer of {type(model).__name__} takes return_attention_weights: there is no attention.")
    handles = [layer.register_forward_pre_hook(ask, with_kwargs=True) for layer in layers]
    handles += [layer.register_forward_hook(take, with_kwargs=True) for layer in layers]
    was_training = model.training
    try:
        model.eval()
        options = {} if data.edge_attr is None else {"edge_attr": data.edge_attr}
        model(data.x, data.edge_index, **options)
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    return found
