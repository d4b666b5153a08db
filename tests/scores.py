"""The scores that every law, comparison, vmap, compile and export test runs over. A new score is one line here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gat_pyg.attention import Additive, Dot, GATv2, attend
from gat_pyg.attention.score import Score
from gat_pyg.graph.edges import Edges
from tests.graphs import Graph

Tensors = dict[str, Tensor]


class Case(NamedTuple):
    """A score and its definition: e `[N_dst, N_src, H]` of every pair of nodes, from x and the operands."""

    score: type[Score]
    dense: Callable[..., Tensor]


def _additive(x: Tensor, score_src: Tensor, score_dst: Tensor, score_edge: Tensor) -> Tensor:
    return F.leaky_relu(score_dst[:, None] + score_src + score_edge, 0.2)


def _gatv2(
    x: Tensor, x_dst: Tensor, att: Tensor, edge_attr: Tensor | float = 0.0, lin_edge: Tensor | None = None
) -> Tensor:
    if lin_edge is not None:
        edge_attr = torch.einsum("...d,hcd->...hc", edge_attr, lin_edge)
    return torch.einsum("hc,ijhc->ijh", att, F.leaky_relu(x_dst[:, None] + x + edge_attr, 0.2))


def _dot(
    x: Tensor,
    x_dst: Tensor,
    key: Tensor | None = None,
    edge_attr: Tensor | float = 0.0,
    lin_edge: Tensor | None = None,
) -> Tensor:
    if lin_edge is not None:
        edge_attr = torch.einsum("...d,hcd->...hc", edge_attr, lin_edge)
    return (x_dst[:, None] * ((x if key is None else key) + edge_attr)).sum(-1) / x.size(-1) ** 0.5


ADDITIVE = "x score_src score_dst score_edge"
CONSTANT = "x"
GATV2 = "x x_dst att"
GATV2_EDGES = "x x_dst att edge_attr lin_edge"
DOT_EDGES = "x x_dst key edge_attr lin_edge"
SCORES = {  # by the names of x and the operands
    ADDITIVE: Case(Additive, _additive),
    GATV2: Case(GATv2, _gatv2),
    GATV2_EDGES: Case(GATv2, _gatv2),
    "x x_dst": Case(Dot, _dot),
    DOT_EDGES: Case(Dot, _dot),
}
SHAPES: dict[str, tuple[str, ...]] = {"x": ("N_src", "H", "C"), "edge_weight": ("E", "H")}
SHAPES |= {name: shape for case in SCORES.values() for name, shape in case.score.shapes.items()}


def leaves_of(
    graph: Graph,
    heads: int,
    channels: int,
    names: str,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    features: int = 3,
) -> Tensors:
    """Random tensors by name: x, operands and edge weights, with `features` of an edge.

    Vectors `[H, C]` and the rows of W_e are of length one, so that scores are of order one.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes = {
        "N_src": graph.num_src,
        "N_dst": graph.num_dst,
        "E": graph.index.size(1),
        "H": heads,
        "C": channels,
        "D": features,
    }
    leaves = {}
    for name in names.split():
        leaf = torch.randn([sizes[letter] for letter in SHAPES[name]], generator=generator, dtype=torch.float64)
        length = {("H", "C"): channels, ("H", "C", "D"): max(features, 1)}.get(SHAPES[name], 1)
        leaves[name] = (leaf / length**0.5).to(dtype)
    return leaves


def messages(leaves: Tensors, src: Tensor) -> Tensor:
    """The messages of the edges, `[E, H, C]`."""
    x = leaves["x"][src]
    if " ".join(leaves) != DOT_EDGES:
        return x
    return x + torch.einsum("ed,hcd->ehc", leaves["edge_attr"], leaves["lin_edge"])


def score_of(leaves: Tensors, **options: float) -> Score:
    """The score that has these operands; some of `Additive`'s may be missing."""
    names = " ".join(name for name in leaves if name != "edge_weight")
    score = SCORES[names].score if names in SCORES else Additive
    options = {name: value for name, value in options.items() if name in score.options}
    return score(**{name: leaf for name, leaf in leaves.items() if name in score.shapes}, **options)


def call(leaves: Tensors, edges: Edges, backend: str = "fused", negative_slope: float = 0.2, **options: Any) -> Any:
    """The result of the operation with these operands; a mask is that of seed 0."""
    torch.manual_seed(0)
    score = score_of(leaves, negative_slope=negative_slope)
    options = {"edge_weight": leaves.get("edge_weight"), **options}
    return attend(leaves["x"], score, edges, backend=backend, **options)
