"""What a trained model attends to on one graph, as numbers: what every figure and page of it begins with."""

from __future__ import annotations

import colorsys
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.utils import coalesce, degree, scatter

from ..models import attention_of

EXTRA = "python -m pip install 'gat_pyg[report]'"
UNKNOWN = "#b0b0b0"  # the colour of a node whose class is not known
# Tol's colours, told apart by nearly everyone and none of them grey, as edges are.
_COLOURS = ("#0077bb", "#ee7733", "#009988", "#ee3377", "#33bbee", "#882255", "#999933", "#332288", "#cc3311")


@dataclass(frozen=True, eq=False)
class Attended:
    """What a model attends to on a graph of N nodes; all of it on the CPU.

    Attributes:
        features: `[N, F']`, the first attention layer's output, before what follows it.
        y: `[N]`, the class of each node, -1 where it is unknown, as everywhere where the graph has no y.
        prediction: `[N]`, the class of the largest logit.
        classes: the K names.
        layers: for each attention layer in the order they run, `(edge_index [2, E], alpha [E, H])`, where
            `edge_index[1]`, dst, is the node that attends.

    Example:
        >>> from gat_pyg.models import GAT
        >>> data = Data(x=torch.randn(3, 16), edge_index=torch.tensor([[0, 1], [1, 2]]), y=torch.tensor([0, 1, 1]))
        >>> seen = Attended.of(GAT(16, [8], 2, heads=[8, 1]), data)
        >>> seen.features.shape, seen.classes, [alpha.shape for _, alpha in seen.layers]
        (torch.Size([3, 64]), ['class 0', 'class 1'], [torch.Size([5, 8]), torch.Size([5, 1])])
    """

    features: Tensor
    y: Tensor
    prediction: Tensor
    classes: list[str]
    layers: list[tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, model: nn.Module, data: Data, classes: Sequence[str] | None = None) -> Attended:
        """Run the model once on the graph, without dropout.

        Raises:
            ValueError: if no layer gives its attention, or the graph, its labels, the model's output or the number of
                names is not of the form told above.
        """
        _check(data)
        N = data.num_nodes
        ran: list[tuple[nn.Module, Tensor]] = []  # the attention layers in their order, then the model

        def keep(layer: nn.Module, args: Any, output: Any) -> None:
            ran.append((layer, output[0] if isinstance(output, tuple) else output))

        asked = [m for m in model.modules() if "return_attention_weights" in inspect.signature(m.forward).parameters]
        handles = [module.register_forward_hook(keep) for module in (*asked, model)]
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
        prediction = logits.argmax(-1).cpu()
        y = torch.full((N,), -1) if data.y is None else data.y.cpu().long()
        K = max(logits.size(1), int(y.max()) + 1)
        names = [f"class {k}" for k in range(K)] if classes is None else list(classes)
        if len(names) != K:
            raise ValueError(f"classes has {len(names)} names, expected {K}: one for each class.")
        layers = []
        for (layer, _), (edge_index, alpha) in zip(ran, attention, strict=False):
            backwards = getattr(layer, "flow", "source_to_target") == "target_to_source"
            edge_index = edge_index.flip(0) if backwards else edge_index
            alpha = alpha if alpha.dim() == 2 else alpha[:, None]  # a single head without its axis
            layers.append((edge_index.cpu(), alpha.float().cpu()))
        return cls(ran[0][1].detach().float().cpu(), y, prediction, names, layers)

    @property
    def num_nodes(self) -> int:
        """N."""
        return self.y.numel()

    @property
    def shown(self) -> Tensor:
        """The classes to colour the nodes by, `[N]`: y, or the prediction where no class is known."""
        return self.y if (self.y >= 0).any() else self.prediction

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """`(edge_index, alpha)` of one layer, counted from 0.

        Raises:
            ValueError: if there is no such layer.
        """
        if not 0 <= number < len(self.layers):
            raise ValueError(f"layer is {number}, expected 0 to {len(self.layers) - 1}: the attention layers.")
        return self.layers[number]


def _check(data: Data) -> None:
    edge_index, N = data.edge_index, data.num_nodes
    if not isinstance(edge_index, Tensor) or edge_index.layout != torch.strided:
        kind = edge_index.layout if isinstance(edge_index, Tensor) else type(edge_index).__name__
        raise ValueError(f"edge_index is a {kind}, expected a dense tensor [2, E].")
    if not N:
        raise ValueError("the graph has no nodes, expected at least one.")
    if data.y is not None and data.y.shape != (N,):
        raise ValueError(
            f"y has shape {tuple(data.y.shape)}, expected ({N},): one class for each node. "
            "Of several labels, choose one to show: data.y = data.y[:, 0].long()."
        )


def pairs(edge_index: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    r"""The thickness of Figure 2, `[M]`, and the M pairs of nodes i < j that it is of, `[2, M]`.

    .. math:: \sum_{k=1}^{H} \alpha^k_{ij} + \alpha^k_{ji}

    An edge without its opposite, as of a directed graph, gives its own share; a self-loop gives none; repeated edges
    add up.

    Example:
        >>> pairs(torch.tensor([[0, 1, 1, 0], [1, 0, 1, 0]]), torch.tensor([[0.7], [0.2], [0.3], [0.8]]))
        (tensor([[0],
                [1]]), tensor([0.9000]))
    """
    apart = edge_index[0] != edge_index[1]
    ends = edge_index[:, apart].sort(dim=0).values
    found, weight = coalesce(ends, alpha.sum(-1)[apart], reduce="sum")
    return found, weight


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
    """The nodes in the plane by t-SNE of their features: `[N, F']` to `[N, 2]`.

    Of more than 50 features the 50 principal components are taken, and the nodes start from the first two. The number
    of steps is fixed, so the time grows as N log N: 13 s of one core for Cora's 2,708 nodes, 50 s for Pubmed's 19,717,
    for which, as for all graphs above 5,000 nodes, the steps are half as many and coarser. The same seed gives the same
    places.

    Raises:
        ImportError: where scikit-learn is missing.
        ValueError: if there are fewer than 4 nodes, or a feature is not finite.
    """
    try:
        from sklearn.decomposition import PCA
        from sklearn.manifold import TSNE
    except ImportError as error:
        raise ImportError(f"the places of the nodes need scikit-learn: {EXTRA}") from error
    N, F = features.shape
    if N < 4:
        raise ValueError(f"the graph has {N} nodes, expected at least 4: t-SNE places nodes by their neighbours.")
    if not features.isfinite().all():
        raise ValueError("the first layer's output is not finite, expected numbers. Was the model trained to the end?")
    x = features.numpy()
    if min(N, F) > 50:
        x = PCA(50, random_state=seed).fit_transform(x)
    start = "pca" if F > 1 and x.std() > 0 else "random"
    coarse = {"angle": 0.8, "max_iter": 500} if N > 5000 else {}
    method = TSNE(perplexity=min(30.0, (N - 1) / 3), init=start, random_state=seed, **coarse)
    return torch.from_numpy(method.fit_transform(x))


def places(seen: Attended, layout: Tensor | None, seed: int) -> Tensor:
    """Where to draw the nodes, `[N, 2]`: the layout that was given, checked, or t-SNE of the features."""
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
