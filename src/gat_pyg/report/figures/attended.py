"""The attention of a trained model on one graph: the data of all figures."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.utils import coalesce, degree, scatter

from ...graph.layers import arguments, is_reversed
from ...models.attention import attention_layers, attention_of
from ...tasks.model import members

UNKNOWN = "#b0b0b0"  # the colour of a node of unknown class
_COLOURS = (
    # Paul Tol's, which are distinguishable with colour blindness, without grey, the colour of edges
    *("#0077bb", "#ee7733", "#009988", "#ee3377", "#33bbee", "#882255", "#999933", "#332288", "#cc3311"),
    # as far apart in CIELAB as those
    *("#22cc22", "#cc66ff", "#ecb279", "#994433", "#2244ee", "#aacc00", "#d98cb2"),
)


@dataclass(frozen=True, eq=False)
class Attended:
    """The attention of a model on a graph of N nodes, on the CPU.

    Attributes:
        features: `[N, F']`, the output of the first attention layer.
        y: `[N]`, the class of each node, -1 if it is unknown or the graph has no y.
        prediction: `[N]`, the class with the largest logit; for a single label, 1 if its logit is positive.
        class_names: the names of the K classes.
        layers: for each attention layer in order of execution, `(edge_index [2, E], alpha [E, H])`; `edge_index[1]`,
            dst, is the node that attends.

    Example:
        >>> from gat_pyg.models import GAT
        >>> data = Data(x=torch.randn(3, 16), edge_index=torch.tensor([[0, 1], [1, 2]]), y=torch.tensor([0, 1, 1]))
        >>> seen = Attended.of(GAT(16, [8], 2, heads=[8, 1]), data)
        >>> seen.features.shape, seen.class_names, [alpha.shape for _, alpha in seen.layers]
        (torch.Size([3, 64]), ['class 0', 'class 1'], [torch.Size([5, 8]), torch.Size([5, 1])])
    """

    features: Tensor
    y: Tensor
    prediction: Tensor
    class_names: list[str]
    layers: list[tuple[Tensor, Tensor]]

    @classmethod
    def of(
        cls, model: nn.Module, data: Data, class_names: Sequence[str] | None = None, label: int | None = None
    ) -> Attended:
        """Run the model once on the graph, without dropout.

        Args:
            model: any module whose layers take `return_attention_weights`, ours or PyG's.
            data: a graph with `x`, `edge_index` and, where known, `y`.
            class_names: the names of the K classes; by default those of the model's data preparation
                (`model.preparation.class_names`), else "class 0", "class 1", ...
            label: for multi-label data, the label to show. The two classes are then the nodes without and with it.

        Raises:
            ValueError: if no layer takes `return_attention_weights`, the model predicts pairs of nodes, or the graph,
                its labels, the model's output or the number of names is not as described above.
        """
        if "edge_label_index" in arguments(model):
            raise ValueError(
                f"{type(model).__name__} predicts pairs of nodes, expected a model with a class for each node. The "
                "attention of such a model: gat_pyg.report.graph_figure(model, data) draws that of one graph."
            )
        check_graph(data)
        _check_labels(data, label)
        N = data.num_nodes
        features, logits, layers = run(model, data)
        if logits.dim() != 2 or logits.size(0) != N:
            raise ValueError(
                f"{type(model).__name__} gives shape {tuple(logits.shape)}, expected ({N}, K): logits for each node."
            )
        y = torch.full((N,), -1) if data.y is None else data.y.cpu()
        K = max(logits.size(1), int(y.max()) + 1) if y.dim() == 1 else logits.size(1)
        if class_names is None:
            preparation = members(model).preparation
            class_names = None if preparation is None else preparation.class_names
        names = [f"class {k}" for k in range(K)] if class_names is None else list(class_names)
        if len(names) != K:
            raise ValueError(f"class_names has {len(names)} names, expected {K}: one for each class.")
        prediction = logits.argmax(-1).cpu()
        if label is not None:
            if not 0 <= label < K:
                raise ValueError(f"label is {label}, expected 0 to {K - 1}: one of the model's labels.")
            y = y if y.dim() == 1 else y[:, label].nan_to_num(-1)
            prediction = (logits[:, label] > 0).long().cpu()
            name = f"label {label}" if class_names is None else names[label]
            names = [f"without {name}", f"with {name}"]
        return cls(features, y.long(), prediction, names, layers)

    @property
    def num_nodes(self) -> int:
        """N."""
        return self.y.numel()

    @property
    def shown(self) -> Tensor:
        """The classes for the nodes' colours, `[N]`: y, or the prediction if no class is known."""
        return self.y if (self.y >= 0).any() else self.prediction

    @property
    def colours(self) -> list[str]:
        """A colour for each class; with more than sixteen classes, only those that occur have one of their own."""
        K = len(self.class_names)
        occurring: Sequence[int] = range(K)
        if len(_COLOURS) < K:
            occurring = [k for k in torch.cat([self.y, self.prediction]).unique().tolist() if k >= 0]
        palette = dict(zip(occurring, colours(len(occurring)), strict=True))
        return [palette.get(k, UNKNOWN) for k in range(K)]

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """Return `(edge_index, alpha)` of one layer, counted from 0.

        Raises:
            ValueError: if there is no such layer.
        """
        return layer_of(self.layers, number)

    def describe(self, number: int) -> str:
        """Return a sentence for a caption: how far from uniform the attention of one layer, counted from 0, is."""
        return describe(*self.layer(number), self.num_nodes, number)


def run(model: nn.Module, data: Data) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """Run a model once on a graph, without dropout.

    Returns:
        The output of the first attention layer, that of the model, and `(edge_index [2, E], alpha [E, H])` of each
        attention layer in order of execution, in which dst attends; on the CPU.

    Raises:
        ValueError: if no layer takes `return_attention_weights`.
    """
    outputs: list[tuple[nn.Module, Tensor]] = []  # of the attention layers in order of execution, then the model

    def collect(layer: nn.Module, args: Any, output: Any) -> None:
        outputs.append((layer, output[0] if isinstance(output, tuple) else output))

    handles = [module.register_forward_hook(collect) for module in (*attention_layers(model), model)]
    try:
        attention = attention_of(model, data)
    finally:
        for handle in handles:
            handle.remove()
    layers = []
    for (layer, _), (edge_index, alpha) in zip(outputs, attention, strict=False):
        edge_index = edge_index.flip(0) if is_reversed(layer) else edge_index
        alpha = alpha if alpha.dim() == 2 else alpha[:, None]  # a single head without its axis
        layers.append((edge_index.cpu(), alpha.float().cpu()))
    return outputs[0][1].detach().float().cpu(), outputs[-1][1], layers


def layer_of(layers: Sequence[tuple[Tensor, Tensor]], number: int) -> tuple[Tensor, Tensor]:
    """Return `(edge_index, alpha)` of one layer, counted from 0.

    Raises:
        ValueError: if there is no such layer.
    """
    if not 0 <= number < len(layers):
        raise ValueError(f"layer is {number}, expected 0 to {len(layers) - 1}: the attention layers.")
    return layers[number]


def describe(edge_index: Tensor, alpha: Tensor, num_nodes: int, number: int) -> str:
    """Return a sentence for a caption: how far from uniform the attention of layer `number`, counted from 0, is.

    The quantiles are over the coefficients of all heads. Nodes with a single neighbour, whose coefficient is always 1,
    are left out.
    """
    size = sizes(edge_index, num_nodes)
    choosing = size > 1
    times = times_uniform(edge_index, alpha, num_nodes)[choosing[edge_index[1]]].numpy()
    if not times.size:
        return f"Layer {number + 1}: no node has two neighbours to choose between."
    low, median, high = np.quantile(times, (0.05, 0.5, 0.95))
    verdict = "attention is nearly a mean"
    if low < 0.8 or high > 1.25:
        spread = float(entropies(edge_index, alpha, num_nodes)[choosing].exp().mean())
        mean = float(size[choosing].mean())
        verdict = f"on average, attention is spread over {spread:.1f} of the {mean:.1f} nodes of a neighbourhood"
    return (
        f"Layer {number + 1}: the 5/50/95 % quantiles of the coefficients are {low:.2f}/{median:.2f}/{high:.2f} "
        f"times uniform, the largest {times.max():.2f}: {verdict}."
    )


def check_graph(data: Data) -> None:
    """Raise ValueError if the edges are no dense tensor, or the graph has no nodes."""
    edge_index = data.edge_index
    if not isinstance(edge_index, Tensor) or edge_index.layout != torch.strided:
        kind = edge_index.layout if isinstance(edge_index, Tensor) else type(edge_index).__name__
        raise ValueError(f"edge_index is a {kind}, expected a dense tensor [2, E].")
    if not data.num_nodes:
        raise ValueError("the graph has no nodes, expected at least one.")


def _check_labels(data: Data, label: int | None) -> None:
    N = data.num_nodes
    if data.y is None:
        return
    if label is None and data.y.shape != (N,):
        raise ValueError(
            f"y has shape {tuple(data.y.shape)}, expected ({N},): one class for each node. "
            "Of several labels, choose the one to show: label=0."
        )
    if label is not None and (data.y.dim() != 2 or data.y.size(0) != N):
        raise ValueError(
            f"label is {label} and y has shape {tuple(data.y.shape)}, expected ({N}, K): several labels for each node. "
            "Omit label to show one class for each node."
        )


def pairs(edge_index: Tensor, values: Tensor, reduce: str = "sum") -> tuple[Tensor, Tensor]:
    r"""Combine the values of each edge, `[E, H]`, and its opposite: return the pairs i < j, `[2, M]`, and values `[M]`.

    With coefficients and "sum", the values are the thickness of edges in the paper's Figure 2:

    .. math:: \sum_{k=1}^{H} \alpha^k_{ij} + \alpha^k_{ji}

    "mean" is the mean over both directions and all heads. An edge may have no opposite, as in a directed graph.
    Self-loops are left out; every copy of a repeated edge counts.

    Example:
        >>> pairs(torch.tensor([[0, 1, 1, 0], [1, 0, 1, 0]]), torch.tensor([[0.7], [0.2], [0.3], [0.8]]))
        (tensor([[0],
                [1]]), tensor([0.9000]))
    """
    apart = edge_index[0] != edge_index[1]
    ends = edge_index[:, apart].sort(dim=0).values
    of_edge = values.sum(-1) if reduce == "sum" else values.mean(-1)
    ends, combined = coalesce(ends, of_edge[apart], reduce=reduce)
    return ends, combined


def times_uniform(edge_index: Tensor, alpha: Tensor, num_nodes: int) -> Tensor:
    r"""Return the coefficients relative to uniform attention, `[E, H]`: 1 if attention is a mean.

    .. math:: |\mathcal{N}_i| \, \alpha^k_{ij}

    A coefficient itself is large in a small neighbourhood. This ratio has the mean 1 over any neighbourhood, and lies
    between 0 and the neighbourhood's size.

    Example:
        >>> times_uniform(torch.tensor([[0, 1, 2], [0, 0, 2]]), torch.tensor([[0.75], [0.25], [1.0]]), 3)
        tensor([[1.5000],
                [0.5000],
                [1.0000]])
    """
    return sizes(edge_index, num_nodes)[edge_index[1], None] * alpha


def entropies(edge_index: Tensor, alpha: Tensor, num_nodes: int) -> Tensor:
    r"""Return the entropy of each node's attention in nats, `[N, H]`; uniform attention has log of the size.

    .. math:: -\sum_{j \in \mathcal{N}_i} \alpha^k_{ij} \log \alpha^k_{ij}

    Example:
        >>> entropies(torch.tensor([[0, 1], [0, 0]]), torch.tensor([[0.5], [0.5]]), 2)
        tensor([[0.6931],
                [0.0000]])
    """
    entropy: Tensor = scatter(torch.special.entr(alpha), edge_index[1], dim=0, dim_size=num_nodes, reduce="sum")
    return entropy


def sizes(edge_index: Tensor, num_nodes: int) -> Tensor:
    """Return the size of each neighbourhood, `[N]`, including the node itself if the layer adds loops."""
    size: Tensor = degree(edge_index[1], num_nodes)
    return size


def colours(K: int) -> list[str]:
    """Return K colours as #rrggbb; more than sixteen are hues a golden angle apart, with two levels of lightness.

    Example:
        >>> colours(2), len(set(colours(121)))
        (['#0077bb', '#ee7733'], 121)
    """
    if len(_COLOURS) >= K:
        return list(_COLOURS[:K])
    shades = (colorsys.hls_to_rgb(k * 0.618034 % 1, 0.38 + 0.2 * (k % 2), 0.75) for k in range(K))
    return ["#" + "".join(f"{round(255 * part):02x}" for part in shade) for shade in shades]
