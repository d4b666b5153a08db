"""Graph attention networks: models of several layers, with the paper's presets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, signature
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch_geometric.nn import JumpingKnowledge, MessagePassing
from torch_geometric.nn.resolver import activation_resolver

from ..conv.checks import check_names, check_probability
from ..conv.gat import GATConv
from ..conv.gatv2 import GATv2Conv
from ..conv.transformer import TransformerConv
from ..features.dropout import dropout
from ..features.linear import Linear
from ..graph.layers import arguments, graph_norms, is_reversed, mixes_nodes
from ..graph.subgraph import first_edges
from .block import Block, Graphs, build_norm, degrees_of, normalised
from .layers import builder, check_is_of_one_layer, shape
from .mlp import head

_PLANETOID = {"hidden_channels": (8,), "heads": (8, 1), "dropout": 0.6}
_PPI = {"in_channels": 50, "out_channels": 121, "hidden_channels": (256, 256), "heads": (4, 4, 6)}
# Section 3.3 of the paper.
PRESETS: dict[str, dict[str, Any]] = {
    "cora": {"in_channels": 1433, "out_channels": 7, **_PLANETOID},
    "citeseer": {"in_channels": 3703, "out_channels": 6, **_PLANETOID},
    "pubmed": {"in_channels": 500, "out_channels": 3, **_PLANETOID, "heads": (8, 8)},
    "ppi": {**_PPI, "residual": (False, True, False)},
    "const_ppi": {**_PPI, "residual": (False, True, False), "mechanism": "constant"},
}
JK = ("last", "cat", "max", "lstm")
_OF_BLOCKS = [name for name, each in signature(Block).parameters.items() if each.kind is Parameter.KEYWORD_ONLY]


class GAT(nn.Module):
    r"""A graph attention network (Veličković et al., ICLR 2018): layers of multi-head attention with ELU between.

    Hidden layers concatenate their heads, equation (5); the last one averages them and has no activation, equation (6).
    In training, dropout acts on every layer's input and on the attention coefficients. Input features may be a
    torch.sparse CSR matrix. Dropout then acts on the non-zeros, which is equivalent, and nothing becomes dense.

    Beyond the paper, by the names of PyG's models, but with C per head: a hidden layer has H C features, so PyG's
    `GAT(16, 32, num_layers=3, out_channels=7, heads=4)` is `GAT(16, 8, 7, heads=4, num_layers=3, act="relu")`, with
    `input_dropout=0.0` in training. `conv` is the layer, and `Block` describes what surrounds it: `norm`, skip
    connection, `act` and a feed-forward part. With `jk` or `head_layers`, all layers are hidden ones, and a linear map
    or a perceptron of their outputs, combined as in Xu et al. (ICML 2018), is the network's.

    With the numbers of nodes and edges per hop of a batch from PyG's `NeighborLoader`, each layer skips the rows that
    no later layer reads. With as many hops as layers, the output has the rows of hop 0, the seed nodes.

    `reproduction=True` uses the layers of the authors' code, which differ from the paper's text: every head draws its
    own input dropout ("input_dropout") and its own Glorot weights ("init"), both score maps have a bias ("score_bias"),
    there is dropout of W h after the scores ("value_dropout"), and a skip connection takes the input after dropout,
    with a projection with a bias for each head if the widths differ ("skip"). A list selects some of these.

    Args:
        in_channels: F, the number of input features.
        hidden_channels: number of features C per head of each hidden layer, where PyG's models take the width H C;
            empty for a single layer. A number needs `num_layers`.
        out_channels: K, the number of classes or labels. If None, all layers are hidden ones, and the output has their
            width, `self.out_channels`.
        heads: number of heads H of each layer, including the last. A number needs `num_layers`.
        dropout: dropout probability after the activation of each hidden layer, and within feed-forward parts.
        residual: skip connections: one entry per layer, or one for all hidden layers after the first, or for all if
            there is `pre_linear`. True is a learnable linear map, "identity" the unchanged input, and "linear" a
            linear map in all hidden layers, including the first.
        mechanism: attention mechanism, as in `GATConv`: a name, or a class or function that builds the module of each
            layer. A module itself can only be used in one layer, unless it has no parameters.
        edge_dim: the number of edge features, if any.
        reproduction: if true, the layers are those of the authors' code; a list selects some of their differences.
        num_layers: the number of layers of one width.
        conv: "gat", "gatv2" or "transformer". The last one's linear skip connection is its `root_weight`.
        jk: jumping knowledge: "last", only the last layer's output, "cat", "max" or "lstm".
        input_dropout: dropout probability of the input x; by default `dropout`.
        attention_dropout: dropout probability of the attention coefficients; by default `dropout`.
        pre_linear: if true, a linear map of x with dropout precedes the first layer; a name is the activation after it.
        head_layers: the number of linear maps after the last layer, by default one with `jk`, none without.
        symmetric_norm: if true, :math:`\alpha_{ij}` is multiplied by :math:`\sqrt{d_i / d_j}`, where d is the number of
            edges into a node, with its self-loop if layers add one. DGL's GAT(norm. adj.) differs in two ways: d_j is
            the number of edges out of j, and j is scored by its divided features. In a batch of sampled neighbours, d
            are the numbers in the batch; it needs one hop more than there are layers.
        **kwargs: further arguments of `Block`, such as `norm`, and of the layers, such as `edge_dropout`.

    Raises:
        ValueError: if the lengths of the lists differ, an argument is out of range, or there is no such name.
        TypeError: for an argument that neither `Block` nor the layers have.

    Example:
        >>> x, edge_index = torch.randn(3, 16), torch.tensor([[0, 1], [1, 2]])
        >>> GAT(16, [8], 7, heads=[8, 1], dropout=0.6)(x, edge_index).shape
        torch.Size([3, 7])
        >>> deep = GAT(16, 4, 7, heads=4, num_layers=6, conv="gatv2", norm="batch", residual="identity", jk="cat")
        >>> deep(x, edge_index).shape, deep.lin
        (torch.Size([3, 7]), Linear(in_features=96, out_features=7, bias=True))
    """

    passes_to = (Block, GATConv, GATv2Conv, TransformerConv, MessagePassing)  # its **kwargs

    def __init__(
        self,
        in_channels: int,
        hidden_channels: Sequence[int] | int,
        out_channels: int | None,
        heads: Sequence[int] | int,
        dropout: float = 0.0,
        residual: Sequence[bool | str] | bool | str = False,
        mechanism: str | nn.Module | Callable[..., nn.Module] = "additive",
        edge_dim: int | None = None,
        reproduction: bool | Sequence[str] = False,
        *,
        num_layers: int | None = None,
        conv: str = "gat",
        jk: str | None = None,
        input_dropout: float | None = None,
        attention_dropout: float | None = None,
        pre_linear: bool | str = False,
        head_layers: int | None = None,
        symmetric_norm: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        check_names(kwargs, type(self), *self.passes_to)
        to_out = out_channels is not None and jk is None and head_layers is None  # the last layer is the output layer
        widths, heads, residual = shape(hidden_channels, heads, residual, num_layers, to_out, bool(pre_linear))
        if to_out:
            widths.append(cast(int, out_channels))
        of_blocks = {name: kwargs.pop(name) for name in _OF_BLOCKS if name in kwargs}
        norm_first, has_inner = of_blocks.get("norm_first", False), of_blocks.get("feed_forward") is not None
        initial = of_blocks.get("initial_residual")
        build = builder(conv, mechanism, edge_dim, reproduction, kwargs)
        for name, value, count in (
            ("mechanism", mechanism, len(widths)),
            ("norm", of_blocks.get("norm"), len(widths) - to_out + norm_first + has_inner),
            *((name, value, len(widths)) for name, value in kwargs.items()),
        ):
            check_is_of_one_layer(name, value, count)
        if reproduction and (pre_linear or symmetric_norm or (input_dropout, attention_dropout) != (None, None)):
            raise ValueError(
                f"reproduction={reproduction} uses the authors' layer, which has one dropout, no pre_linear and no "
                "symmetric_norm."
            )
        self.dropout = dropout
        self.input_dropout = dropout if input_dropout is None else input_dropout
        attention_dropout = dropout if attention_dropout is None else attention_dropout
        self.head_dropout = 0.0 if has_inner else dropout
        for name, value in (("dropout", dropout), ("input_dropout", self.input_dropout)):
            check_probability(name, value)
        self.reproduction, self.symmetric_norm = bool(reproduction), symmetric_norm
        self.adds_initial = initial is not None
        self.supports_edge_attr = edge_dim is not None
        self.supports_sparse_features = bool(pre_linear) or (
            conv == "gat" and residual[0] != "identity" and not norm_first and not has_inner and initial is None
        )

        self.pre_linear = None
        if pre_linear:
            self.pre_linear = Linear(in_channels, widths[0] * heads[0])
            in_channels = widths[0] * heads[0]
        self.pre_act: Callable[[Tensor], Tensor]
        self.pre_act = activation_resolver(pre_linear) if isinstance(pre_linear, str) else nn.Identity()
        self.convs, self.norms, self.blocks = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        first = in_channels
        for layer, (C, H, skip) in enumerate(zip(widths, heads, residual, strict=True)):
            hidden = not to_out or layer < len(widths) - 1
            width = widths[layer] = C * H if hidden else C
            if hidden and initial is not None and width != first:
                raise ValueError(
                    f"initial_residual is {initial} in a layer of {width} features, but the input that it adds has "
                    f"{first}, expected equal widths. Use hidden layers of one width, and pre_linear."
                )
            options: dict[str, Any] = {"heads": H, "concat": hidden, "dropout": attention_dropout}
            if conv != "transformer":  # a transformer layer has root_weight
                options["residual"] = skip is True
            self.convs.append(build(in_channels, C, **options, **kwargs))
            self._add_block(in_channels, width, skip, hidden, of_blocks)
            in_channels = width

        self._add_head(widths, out_channels, jk, head_layers, to_out, of_blocks)

    def _add_block(
        self, in_channels: int, width: int, skip: bool | str, hidden: bool, options: Mapping[str, Any]
    ) -> None:
        """Add what surrounds the layer that was added last; an output layer has no activation and no inner part."""
        layer, norm_first = len(self.blocks), options.get("norm_first", False)
        p = self.dropout if layer else self.input_dropout
        has_inner = options.get("feed_forward") is not None
        if self.reproduction or (has_inner if layer else self.pre_linear is not None):  # it acts elsewhere
            p = 0.0
        plain = {"act": None, "feed_forward": None, "separate_self": False, "initial_residual": None}
        of_block = options if hidden else {**options, **plain}
        self.blocks.append(Block(in_channels, width, skip, self.dropout, p, **of_block))
        normed = in_channels if norm_first else width
        self.norms.append(build_norm(normed, **_of_norms(options)) if hidden or norm_first else nn.Identity())

    def _add_head(
        self,
        widths: Sequence[int],
        out_channels: int | None,
        jk: str | None,
        head_layers: int | None,
        to_out: bool,
        options: Mapping[str, Any],
    ) -> None:
        """Add what follows the layers: jumping knowledge, the last norm, and the maps to the outputs."""
        self.jk = self.lin = None
        width = widths[-1]
        if jk is not None:
            if jk not in JK or (jk in ("max", "lstm") and len(set(widths)) > 1):
                raise ValueError(
                    f"jk is {jk!r} and the layers have {', '.join(map(str, widths))} features, expected one of "
                    f"{', '.join(JK)}; max and lstm need layers of one width."
                )
            self.jk = None if jk == "last" else JumpingKnowledge(jk, width, len(widths))
            width = sum(widths) if jk == "cat" else width
        if options.get("norm_first", False) and not to_out:
            self.norms.append(build_norm(width, **_of_norms(options)))
        self.supports_norm_batch = any("batch" in arguments(norm) for norm in self.norms)
        if out_channels is None and head_layers is not None:
            raise ValueError(f"head_layers is {head_layers}, but the network returns embeddings: out_channels is None.")
        if out_channels is not None and not to_out:
            num_maps = 1 if head_layers is None else head_layers
            self.lin = head(width, out_channels, num_maps, self.dropout, options.get("act") or "elu")
        self.out_channels = width if out_channels is None else out_channels

    @classmethod
    def preset(cls, name: str, **changes: Any) -> GAT:
        """Build a network of the paper: "cora", "citeseer", "pubmed", "ppi" or "const_ppi".

        Args:
            name: the name of the network.
            **changes: arguments that replace those of the paper.

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
        """Initialise all parameters again."""
        for part in (*self.convs, *self.norms, *self.blocks, self.pre_linear, self.jk, self.lin):
            if hasattr(part, "reset_parameters"):  # not every norm has parameters
                part.reset_parameters()

    @property
    def num_hops(self) -> int | None:
        """The number of hops that a row of the output depends on; None with norms over nodes or edges backwards."""
        known = not mixes_nodes(self) and not any(map(is_reversed, self.convs))
        return len(self.convs) + self.symmetric_norm if known else None

    def forward(
        self,
        x: Tensor,
        edge_index: Any,
        edge_attr: Tensor | None = None,
        num_sampled_nodes_per_hop: Sequence[int] | None = None,
        num_sampled_edges_per_hop: Sequence[int] | None = None,
        batch: Tensor | None = None,
        batch_size: int | None = None,
    ) -> Tensor:
        """Return logits `[N, K]` for x `[N, F]`, dense or torch.sparse CSR, and a graph as in `GATConv`.

        `batch` `[N]` is the graph of each node and `batch_size` the number of graphs, for norms over a graph. For x
        `[B, N, F]`, a batch on one graph, the logits are `[B, N, K]`, as of B calls; batch norms are over all B N rows.

        Raises:
            ValueError: if there are numbers per hop, but fewer hops than layers, or x is a batch and the layers are
                those of the authors' code.
            NotImplementedError: if PyG's `to_hetero` traces the network.
        """
        if isinstance(cast(Any, x), torch.fx.Proxy):
            raise NotImplementedError(
                "gat_pyg.GAT has Python control flow, which to_hetero cannot trace. Use PyG's models.GAT with layers "
                "of gat_pyg (docs/swap.md), or a network of these layers."
            )
        if self.reproduction and x.dim() != 2:
            raise ValueError(
                f"x has shape {tuple(x.shape)}, expected (N, F): the layers of the authors' code take no batch. Call "
                "the model for each graph, or use reproduction=False."
            )
        nodes, edges = list(num_sampled_nodes_per_hop or ()), list(num_sampled_edges_per_hop or ())
        hops = len(self.convs) + self.symmetric_norm
        if edges and not hops <= len(edges) == len(nodes) - 1:
            of_degrees = " and one for the degrees" * self.symmetric_norm
            raise ValueError(
                f"num_sampled_nodes_per_hop has {len(nodes)} entries and num_sampled_edges_per_hop {len(edges)}, "
                f"expected edges of at least {hops} hops, one per layer{of_degrees}, and nodes of one hop more."
            )
        degrees = self._degrees(edge_index, x.size(-2))
        if edges and degrees is not None:  # the last hop was sampled for the degrees alone
            nodes.pop(), edges.pop()
        graphs = (batch, batch_size) if self.supports_norm_batch else None
        x = initial = self._entered(x)
        outputs: list[Tensor] = []
        for layer in range(len(self.convs)):
            size = None
            if edges:
                hops = len(edges) - layer
                edge_index, edge_attr = first_edges(edge_index, edge_attr, sum(edges[:hops]))
                size = (x.size(-2), sum(nodes[:hops]))
            x = self._layer(layer, x, edge_index, edge_attr, degrees, size, graphs, initial)
            outputs = [x] if self.jk is None else [*outputs, x]
        if edges and self.jk is not None:
            outputs = [out[..., : x.size(-2), :] for out in outputs]
        return self._combined(outputs, graphs)

    def _entered(self, x: Tensor) -> Tensor:
        """Return the input of the first block."""
        if self.pre_linear is None:
            return x
        x = self.pre_linear(dropout(x, self.input_dropout, self.training))
        return self.pre_act(dropout(x, self.dropout, self.training))

    def _layer(self, layer: int, *inputs: Any) -> Tensor:
        out: Tensor = self.blocks[layer](self.convs[layer], self.norms[layer], *inputs)
        return out

    def _combined(self, outputs: list[Tensor], graphs: Graphs = None) -> Tensor:
        """Return the network's output from those of the layers that it reads."""
        rows = outputs if self.jk is None else [out.flatten(0, -2) for out in outputs]  # its LSTM takes no batch
        x = outputs[-1] if self.jk is None else self.jk(rows).unflatten(0, outputs[0].shape[:-1])
        x = normalised(self.norms[-1], x, graphs) if len(self.norms) > len(self.convs) else x
        return x if self.lin is None else self.lin(dropout(x, self.head_dropout, self.training))

    def _degrees(self, edge_index: Any, num_nodes: int) -> Tensor | None:
        conv: Any = self.convs[0]
        return degrees_of(edge_index, num_nodes, conv.add_self_loops, conv.flow) if self.symmetric_norm else None

    @torch.no_grad()
    def inference(
        self, loader: Any, device: torch.device | str | None = None, embedding_device: torch.device | str = "cpu"
    ) -> Tensor:
        """Return the logits `[N, K]` of a whole graph, computed layer by layer in batches of nodes.

        The result is that of calling the model on the graph, up to rounding. Beside a batch, only the input and the
        output of one layer are stored, on `embedding_device`. Arguments as in PyG's models.

        Args:
            loader: batches of all nodes with all their neighbours at one hop, from PyG's `NeighborLoader` or
                `NodeLoader`: `NodeLoader(data, gat_pyg.training.TorchSampler(edge_index, N, [-1]), batch_size=1024)`.
            device: the device on which batches are computed, by default that of the model.
            embedding_device: the device that stores the features of all nodes.

        Raises:
            ValueError: if the model is in training mode, or the loader omits nodes or samples more than one hop.
        """
        if self.training:
            raise ValueError("The model is in training mode, in which dropout is active. Call model.eval() first.")
        if names := graph_norms(self):
            raise ValueError(f"{names[0]} is over all nodes of a graph, which batches of nodes do not have.")
        weight = next(self.parameters())
        device = weight.device if device is None else device
        features: Tensor = loader.data.x.to(embedding_device)
        initial: Tensor | None = None
        degrees = self._degrees(loader.data.edge_index, features.size(0))
        outputs: list[Tensor] = []
        for layer in range(len(self.convs)):
            out: Tensor | None = None
            count = 0
            for batch in loader:
                n = batch.batch_size
                edge_index, edge_attr = batch.edge_index.to(device), batch.edge_attr
                edge_attr = None if edge_attr is None else edge_attr.to(device, weight.dtype)
                x = features[batch.n_id.to(features.device)].to(device, weight.dtype)
                if count == 0 and layer == 0 and edge_index.numel() and int(edge_index[1].max()) >= n:
                    raise ValueError("The loader samples more than one hop. Give it num_neighbors=[-1].")
                x = self._entered(x) if layer == 0 else x
                d = None if degrees is None else degrees[batch.n_id.to(degrees.device)].to(device)
                if self.adds_initial:
                    x_dst = loader.data.x[batch.n_id[:n].to(loader.data.x.device)]
                    initial = self._entered(x_dst.to(device, weight.dtype))
                size = x.size(0), n
                rows = self._layer(layer, x, edge_index, edge_attr, d, size, None, initial).to(embedding_device)
                out = rows.new_empty(features.size(0), rows.size(1)) if out is None else out
                out[batch.n_id[:n].to(out.device)] = rows
                count += n
            if out is None or count != features.size(0):
                raise ValueError(f"The loader has {count} of {features.size(0)} nodes. Leave out its input_nodes.")
            features = out
            outputs = [out] if self.jk is None else [*outputs, out]
        if self.jk is None and self.lin is None and len(self.norms) == len(self.convs):
            return features
        rows = torch.arange(features.size(0)).split(2**16)
        return torch.cat([self._combined([out[i].to(device) for out in outputs]).to(embedding_device) for i in rows])


def _of_norms(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `build_norm` among those of a block."""
    return {name: options[name] for name in ("norm", "norm_kwargs") if name in options}
