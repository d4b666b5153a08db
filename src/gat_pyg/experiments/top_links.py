"""The most probable new links of each node."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.utils import coalesce

from ..data.rows import read_rows
from ..files import needs
from ..models.decoders import DotProduct, Perceptron
from ..models.link_scores import LinkScores
from ..tasks.model import Inputs
from ..tasks.negatives import two_sides
from ..tasks.preparation import Preparation
from .model_file import Predictor
from .predictions import prepared, run_task

NUMBERS = 2**24  # that a decoder computes at once


class Candidates(NamedTuple):
    """A graph with its known links, the nodes that links begin and end at, and the names of the nodes."""

    graph: Data
    known: Tensor  # [2, L], sorted
    src: Tensor  # [A]
    dst: Tensor  # [B]
    names: dict[str, Any]  # of all nodes, by the name of the column


def top_links(run_dir: str | Path, trained: Predictor, data: Any, k: int) -> Any:
    """Return a frame with the k most probable links of each node, as `predict(..., top_k=k)`.

    The probabilities of all pairs are computed in blocks of nodes, so that N x N numbers are never stored.

    Raises:
        ValueError: if the run predicts no links, or k is not positive.
    """
    objective, item = trained.run_objective, trained.run_objective.item
    if item != "link" or k < 1:
        raise ValueError(f"top_k is {k}, and the run predicts {item}s. It is a number of links, at least 1.")
    graph, known, src, dst, names = _candidates(run_dir, trained, data)
    embedded = [_embedded(model, graph) for model in trained.models]
    column = torch.full((graph.x.size(0),), -1)
    column[dst] = torch.arange(len(dst))
    parts = []
    for nodes in _blocks(src, dst, embedded):
        scores = torch.stack([of_pairs(z[nodes], z[dst]).double() for z, of_pairs in embedded])
        each = objective.predictions(scores)  # [S, b, B]
        mean = each.mean(0)
        row = torch.full_like(column, -1)
        row[nodes] = torch.arange(len(nodes))
        first, last = torch.searchsorted(known[0].contiguous(), nodes[[0, -1]] + torch.tensor([0, 1])).tolist()
        left_out = torch.stack([row[known[0, first:last]], column[known[1, first:last]]])
        left_out = torch.cat([left_out, torch.stack([row[nodes], column[nodes]])], 1)  # and the node itself
        mean[tuple(left_out[:, (left_out >= 0).all(0)])] = -1.0
        best, index = mean.topk(min(k, len(dst)))
        rank = torch.arange(1, index.size(1) + 1).expand_as(index)
        spread = each.std(0).gather(1, index) if len(each) > 1 else best
        columns = (nodes[:, None].expand_as(index), dst[index], rank, best, spread)
        parts.append([values[best >= 0] for values in columns])
    ends = [torch.cat(values) for values in zip(*parts, strict=True)]
    (src_name, src_names), (dst_name, dst_names) = names.items()
    table: dict[str, Any] = {
        src_name: [src_names[node] for node in ends[0].tolist()],
        dst_name: [dst_names[node] for node in ends[1].tolist()],
        "rank": ends[2].numpy(),
        "probability": ends[3].float().numpy(),
    }
    if len(embedded) > 1:
        table["probability_std"] = ends[4].float().numpy()
    return needs("pandas", "tables").DataFrame(table)


def _candidates(run_dir: str | Path, trained: Predictor, data: Any) -> Candidates:
    """Return the graph of data or of the run: links are known by its edges, and by pairs with a label of 1 or none."""
    preparation = cast(Preparation, trained.preparation)
    source, ids = preparation.source or {}, cast(dict[str, Any], {})
    if data is None and not source:
        graph = run_task(run_dir).test[0]
    else:
        (graph,), ids = read_rows(preparation, data)
    graph = copy.copy(graph)
    pairs, y = graph.pop("edge_label_index", None), graph.pop("edge_label", graph.get("y"))
    known = [graph.edge_index]
    if pairs is not None:
        known.append(pairs if y is None else pairs[:, y == 1])
        ids = read_rows(preparation).ids if source else {}  # those of `data` are of its pairs
    for key in ("y", "edge_label_attr", "train_mask", "val_mask", "test_mask"):
        graph.pop(key, None)
    graph.edge_label_index = graph.edge_index[:, :0]
    graph = prepared(trained, graph)
    links, N = coalesce(torch.cat(known, 1)), graph.x.size(0)
    nodes = torch.arange(N)
    if len(of_sides := source.get("ids") or ()) == 2:
        src, dst = nodes.split([len(side) for side in of_sides])
    elif (sides := two_sides(links, N)) is not None:
        src, dst = (nodes[sides == side] for side in (0, 1))
    else:
        src = dst = nodes
    (names,) = ids.values() if ids else (range(N),)
    return Candidates(graph, links, src, dst, {source.get(end) or end: names for end in ("src", "dst")})


def _embedded(model: nn.Module, graph: Data) -> tuple[Tensor, Callable[[Tensor, Tensor], Tensor]]:
    """Return the embeddings of all nodes, and the function from those of A and B nodes to the scores `[A, B]`."""
    network: nn.Module = model.model if isinstance(model, LinkScores) else model
    decoder: Any = model.decoder if isinstance(model, LinkScores) else DotProduct()
    return Inputs.of(network).call(network, graph), decoder.of_all_pairs


def _blocks(src: Tensor, dst: Tensor, embedded: list[Any]) -> Iterator[Tensor]:
    """Yield nodes that links begin at, in their order: as many as a decoder can pair with all others at once."""
    z, decoder = embedded[0]
    width = z.size(1) if isinstance(decoder.__self__, Perceptron) else len(embedded)
    return iter(src.split(max(1, NUMBERS // max(1, len(dst) * width))))
