"""The attention of a trained model on one graph, from which every figure and page is made."""

from __future__ import annotations

import colorsys
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.utils import coalesce, degree, scatter

from ..models.attention import attention_of

EXTRA = "python -m pip install 'gat_pyg[report]'"
UNKNOWN = "#b0b0b0"  # the colour of a node whose class is not known
# Tol's colours, which nearly everyone can distinguish; none is grey, the colour of edges.
_COLOURS = ("#0077bb", "#ee7733", "#009988", "#ee3377", "#33bbee", "#882255", "#999933", "#332288", "#cc3311")


@dataclass(frozen=True, eq=False)
class Attended:
    """The attention of a model on a graph of N nodes, on the CPU.

    Attributes:
        features: `[N, F']`, the first attention layer's output, before what follows it.
        y: `[N]`, the class of each node, -1 where it is unknown, as everywhere where the graph has no y.
        prediction: `[N]`, the class of the largest logit, or by the sign of the logit of one label.
        class_names: the names of the K classes.
        layers: for each attention layer in the order they run, `(edge_index [2, E], alpha [E, H])`, where
            `edge_index[1]`, dst, is the node that attends.

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
            label: for multi-label data, the label to show. The two classes are the nodes without and with it.

        Raises:
            ValueError: if no layer gives its attention, or the graph, its labels, the model's output or the number of
                names has another form than described above.
        """
        _check(data, label)
        N = data.num_nodes
        ran: list[tuple[nn.Module, Tensor]] = []  # the attention layers in their order, then the model

        def keep(layer: nn.Module, args: Any, output: Any) -> None:
            ran.append((layer, output[0] if isinstance(output, tuple) else output))

        attending = [
            m for m in model.modules() if "return_attention_weights" in inspect.signature(m.forward).parameters
        ]
        handles = [module.register_forward_hook(keep) for module in (*attending, model)]
        try:
            attention = attention_of(model, data)
        finally:
            for handle in handles:
                handle.remove()
        logits = ran[-1][1]
        if logits.dim() != 2 or logits.size(0) != N:
            raise ValueError(
                f"{type(model).__name__} gives shape {tuple(logits.shape)}, expected ({N}, K): logits for each node."
            )
        y = torch.full((N,), -1) if data.y is None else data.y.cpu()
        K = max(logits.size(1), int(y.max()) + 1) if y.dim() == 1 else logits.size(1)
        if class_names is None:
            class_names = getattr(getattr(model, "preparation", None), "class_names", None)
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
        layers = []
        for (layer, _), (edge_index, alpha) in zip(ran, attention, strict=False):
            backwards = getattr(layer, "flow", "source_to_target") == "target_to_source"
            edge_index = edge_index.flip(0) if backwards else edge_index
            alpha = alpha if alpha.dim() == 2 else alpha[:, None]  # a single head without its axis
            layers.append((edge_index.cpu(), alpha.float().cpu()))
        return cls(ran[0][1].detach().float().cpu(), y.long(), prediction, names, layers)

    @property
    def num_nodes(self) -> int:
        """N."""
        return self.y.numel()

    @property
    def shown(self) -> Tensor:
        """The classes to colour the nodes by, `[N]`: y, or the prediction where no class is known."""
        return self.y if (self.y >= 0).any() else self.prediction

    @property
    def colours(self) -> list[str]:
        """A colour for each class; of more than nine classes, only those that occur share the palette."""
        K = len(self.class_names)
        occur: Sequence[int] = range(K)
        if len(_COLOURS) < K:
            occur = [k for k in torch.cat([self.y, self.prediction]).unique().tolist() if k >= 0]
        palette = dict(zip(occur, colours(len(occur)), strict=True))
        return [palette.get(k, UNKNOWN) for k in range(K)]

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """`(edge_index, alpha)` of one layer, counted from 0.

        Raises:
            ValueError: if there is no such layer.
        """
        if not 0 <= number < len(self.layers):
            raise ValueError(f"layer is {number}, expected 0 to {len(self.layers) - 1}: the attention layers.")
        return self.layers[number]

    def describe(self, number: int) -> str:
        """Describe how far the attention of one layer, counted from 0, is from uniform: one sentence for a caption.

        The quantiles are those of every head's coefficients. Nodes with a single neighbour are left out: theirs are
        always 1.
        """
        edge_index, alpha = self.layer(number)
        size = sizes(edge_index, self.num_nodes)
        choosing = size > 1
        times = times_uniform(edge_index, alpha, self.num_nodes)[choosing[edge_index[1]]].numpy()
        if not times.size:
            return f"Layer {number + 1}: no node has two neighbours to choose between."
        low, median, high = np.quantile(times, (0.05, 0.5, 0.95))
        verdict = "attention is nearly a mean"
        if low < 0.8 or high > 1.25:
            spread = float(entropies(edge_index, alpha, self.num_nodes)[choosing].exp().mean())
            mean = float(size[choosing].mean())
            verdict = f"on average, attention is spread over {spread:.1f} of the {mean:.1f} nodes of a neighbourhood"
        return (
            f"Layer {number + 1}: the 5/50/95 % quantiles of the coefficients are {low:.2f}/{median:.2f}/{high:.2f} "
            f"times uniform, the largest {times.max():.2f}: {verdict}."
        )


def _check(data: Data, label: int | None) -> None:
    edge_index, N = data.edge_index, data.num_nodes
    if not isinstance(edge_index, Tensor) or edge_index.layout != torch.strided:
        kind = edge_index.layout if isinstance(edge_index, Tensor) else type(edge_index).__name__
        raise ValueError(f"edge_index is a {kind}, expected a dense tensor [2, E].")
    if not N:
        raise ValueError("the graph has no nodes, expected at least one.")
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
    r"""Combine an edge's values, `[E, H]`, with its opposite's: the M pairs of nodes i < j, `[2, M]`, and `[M]` values.

    With coefficients and "sum" it is the thickness of the paper's Figure 2:

    .. math:: \sum_{k=1}^{H} \alpha^k_{ij} + \alpha^k_{ji}

    "mean" is the mean of both directions and all heads. An edge without its opposite, as of a directed graph, counts
    alone; self-loops are left out; repeated edges count each.

    Example:
        >>> pairs(torch.tensor([[0, 1, 1, 0], [1, 0, 1, 0]]), torch.tensor([[0.7], [0.2], [0.3], [0.8]]))
        (tensor([[0],
                [1]]), tensor([0.9000]))
    """
    apart = edge_index[0] != edge_index[1]
    ends = edge_index[:, apart].sort(dim=0).values
    of_edge = values.sum(-1) if reduce == "sum" else values.mean(-1)
    found, weight = coalesce(ends, of_edge[apart], reduce=reduce)
    return found, weight


def times_uniform(edge_index: Tensor, alpha: Tensor, num_nodes: int) -> Tensor:
    r"""The coefficients relative to uniform attention, `[E, H]`: 1 where they are those of a mean.

    .. math:: |\mathcal{N}_i| \, \alpha^k_{ij}

    A coefficient alone is large where the neighbourhood is small. The mean of this over any neighbourhood is 1, and it
    lies between 0 and the neighbourhood's size.

    Example:
        >>> times_uniform(torch.tensor([[0, 1, 2], [0, 0, 2]]), torch.tensor([[0.75], [0.25], [1.0]]), 3)
        tensor([[1.5000],
                [0.5000],
                [1.0000]])
    """
    return sizes(edge_index, num_nodes)[edge_index[1], None] * alpha


def entropies(edge_index: Tensor, alpha: Tensor, num_nodes: int) -> Tensor:
    r"""The entropy of each node's attention in nats, `[N, H]`: log of the neighbourhood's size where it is uniform.

    .. math:: -\sum_{j \in \mathcal{N}_i} \alpha^k_{ij} \log \alpha^k_{ij}

    Example:
        >>> entropies(torch.tensor([[0, 1], [0, 0]]), torch.tensor([[0.5], [0.5]]), 2)
        tensor([[0.6931],
                [0.0000]])
    """
    found: Tensor = scatter(torch.special.entr(alpha), edge_index[1], dim=0, dim_size=num_nodes, reduce="sum")
    return found


def sizes(edge_index: Tensor, num_nodes: int) -> Tensor:
    """The number of neighbours that each node attends over, `[N]`, itself among them where the layer adds loops."""
    found: Tensor = degree(edge_index[1], num_nodes)
    return found


def tsne(features: Tensor, seed: int = 0) -> Tensor:
    """Place the nodes in the plane by t-SNE of their features: `[N, F']` to `[N, 2]`.

    Of more than 50 features the 50 principal components are taken, and the nodes start from the first two. The number
    of steps is fixed, so the time grows as N log N: 13 s of one core for Cora's 2,708 nodes, 50 s for Pubmed's 19,717,
    for which, as for all graphs above 5,000 nodes, the steps are half as many and coarser. The same seed gives the same
    places, and is computed once: the last two results are kept, so that figures and pages of a model share them.

    Raises:
        ImportError: where scikit-learn is missing.
        ValueError: if there are fewer than 4 nodes, or a feature is not finite.
    """
    N, F = features.shape
    if N < 4:
        raise ValueError(f"the graph has {N} nodes, expected at least 4: t-SNE places nodes by their neighbours.")
    if not features.isfinite().all():
        raise ValueError("the first layer's output is not finite, expected numbers. Was the model trained to the end?")
    return torch.from_numpy(_tsne(features.float().numpy().tobytes(), N, F, seed).copy())


@lru_cache(maxsize=2)
def _tsne(content: bytes, N: int, F: int, seed: int) -> np.ndarray:
    try:
        from sklearn.decomposition import PCA
        from sklearn.manifold import TSNE
    except ImportError as error:
        raise ImportError(f"the places of the nodes need scikit-learn: {EXTRA}") from error
    x = np.frombuffer(content, np.float32).reshape(N, F)
    if min(N, F) > 50:
        x = PCA(50, random_state=seed).fit_transform(x)
    start = "pca" if F > 1 and x.std() > 0 else "random"
    coarse = {"angle": 0.8, "max_iter": 500} if N > 5000 else {}
    method = TSNE(perplexity=min(30.0, (N - 1) / 3), init=start, random_state=seed, **coarse)
    found: np.ndarray = method.fit_transform(x)
    return found


def places(seen: Attended, layout: Tensor | None, seed: int) -> Tensor:
    """The positions of the nodes, `[N, 2]`: the caller's layout, checked, or t-SNE of the features."""
    if layout is None:
        return tsne(seen.features, seed)
    layout = torch.as_tensor(layout, dtype=torch.float32).cpu()
    if layout.shape != (seen.num_nodes, 2) or not layout.isfinite().all():
        raise ValueError(f"layout has shape {tuple(layout.shape)}, expected finite numbers [{seen.num_nodes}, 2].")
    return layout


def colours(K: int) -> list[str]:
    """K colours as #rrggbb; of more than nine, hues a golden angle apart in two degrees of lightness.

    Example:
        >>> colours(2), len(set(colours(121)))
        (['#0077bb', '#ee7733'], 121)
    """
    if len(_COLOURS) >= K:
        return list(_COLOURS[:K])
    shades = (colorsys.hls_to_rgb(k * 0.618034 % 1, 0.38 + 0.2 * (k % 2), 0.75) for k in range(K))
    return ["#" + "".join(f"{round(255 * part):02x}" for part in shade) for shade in shades]
