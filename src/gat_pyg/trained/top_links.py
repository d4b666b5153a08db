"""The most probable new links of each node, and the share of its later links among them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.utils import coalesce, is_undirected

from ..files import needs
from ..models.decoders import DotProduct, Perceptron, Popular
from ..models.link_scores import LinkScores
from ..tasks.model import Inputs
from ..tasks.negatives import two_sides
from .trained import Trained, without_labels

NUMBERS = 2**24  # that a decoder computes at once


class Candidates(NamedTuple):
    """A graph with its known links, the nodes that links begin and end at, and the names of the nodes."""

    graph: Data
    known: Tensor  # [2, L], sorted
    src: Tensor  # [A]
    dst: Tensor  # [B]
    names: dict[str, Any]  # of all nodes, by the name of the column


def top_links(trained: Trained, data: Any, k: int) -> Any:
    """Return a frame with the k most probable links of each node, as `predict(..., top_k=k)`.

    The probabilities of all pairs are computed in blocks of nodes, so that N x N numbers are never stored.

    Raises:
        ValueError: if the run predicts no links, or k is not positive.
    """
    check_top_k(trained, k)
    candidates = _candidates(trained, data)
    src, dst, rank, best, spread = _best(trained, candidates, candidates.src, k)
    (src_name, src_names), (dst_name, dst_names) = candidates.names.items()
    table: dict[str, Any] = {
        src_name: [src_names[node] for node in src.tolist()],
        dst_name: [dst_names[node] for node in dst.tolist()],
        "rank": rank.numpy(),
        "probability": best.float().numpy(),
    }
    if len(trained.models) > 1:
        table["probability_std"] = spread.float().numpy()
    return needs("pandas", "tables").DataFrame(table)


def check_top_k(trained: Trained, k: int) -> None:
    """Raise ValueError if the run predicts no links, or k is not positive."""
    item = trained.objective.item
    if item != "link" or k < 1:
        raise ValueError(f"top_k is {k}, and the run predicts {item}s. It is a number of links, at least 1.")


def recall(trained: Trained, graph: Data, known: Tensor, links: Tensor, k: int) -> float:
    r"""Return recall@k: of each node's links, the share that is among its k most probable ones; the mean over nodes.

    .. math::
        \frac{1}{|V|} \sum_{i \in V} \frac{|T_k(i) \cap L(i)|}{|L(i)|}

    V are the nodes with links to find, L(i); T_k(i) are the most probable links of i that are not known. In a bipartite
    graph, V are nodes of the first side, such as users.

    Args:
        trained: of one seed or several, whose mean probability counts.
        graph: over whose edges messages pass, as it comes from its source.
        known: links [2, E] that are left out, such as those of the training.
        links: [2, L], to find.
        k: a number of links.
    """
    candidates = _of_graph(trained, graph, [known, links])
    N = candidates.graph.x.size(0)
    known, links = (_from(candidates.src, each, graph.edge_index, N) for each in (known, links))
    candidates = candidates._replace(known=known)
    src, dst, *_ = _best(trained, candidates, links[0].unique(), k)
    hit = torch.isin(links[0] * N + links[1], src * N + dst)
    sums, counts = (links[0].bincount(weights, N) for weights in (hit.double(), None))
    return float((sums / counts)[counts > 0].mean())


def _best(trained: Trained, candidates: Candidates, nodes: Tensor, k: int) -> list[Tensor]:
    """Return the k most probable links of each of some nodes: both ends, rank, mean probability and its deviation."""
    graph, known, _, dst, _ = candidates
    embedded = [_embedded(model, graph) for model in trained.models]
    column = torch.full((graph.x.size(0),), -1)
    column[dst] = torch.arange(len(dst))
    parts = []
    for block in _blocks(nodes, dst, embedded):
        scores = torch.stack([of_pairs(z[block], z[dst]).double() for z, of_pairs in embedded])
        each = trained.objective.predictions(scores)  # [S, b, B]
        mean = each.mean(0)
        row = torch.full_like(column, -1)
        row[block] = torch.arange(len(block))
        first, last = torch.searchsorted(known[0].contiguous(), block[[0, -1]] + torch.tensor([0, 1])).tolist()
        left_out = torch.stack([row[known[0, first:last]], column[known[1, first:last]]])
        left_out = torch.cat([left_out, torch.stack([row[block], column[block]])], 1)  # and the node itself
        mean[tuple(left_out[:, (left_out >= 0).all(0)])] = -1.0
        best, index = mean.topk(min(k, len(dst)))
        rank = torch.arange(1, index.size(1) + 1).expand_as(index)
        spread = each.std(0).gather(1, index) if len(each) > 1 else best
        columns = (block[:, None].expand_as(index), dst[index], rank, best, spread)
        parts.append([values[best >= 0] for values in columns])
    return [torch.cat(values) for values in zip(*parts, strict=True)]


def _candidates(trained: Trained, data: Any) -> Candidates:
    """Return the graph of data or of the run: links are known by its edges, and by pairs with a label of 1 or none."""
    if data is None and not trained.source:
        graph, names = trained.task.test[0], None
    else:
        (graph,), ids = trained.read(data)[:2]
        names = next(iter(ids.values()), None)
    graph = copy.copy(graph)
    pairs, y = graph.pop("edge_label_index", None), graph.pop("edge_label", graph.get("y"))
    known = [graph.edge_index]
    if pairs is not None:
        known.append(pairs if y is None else pairs[:, y == 1])
        if isinstance(data, (list, tuple)) and len(data) == 2 + bool(trained.source.get("are_two")):
            warnings.warn(
                "The pairs in the table of links are left out of the answer, and messages pass over the links of the "
                "training. To pass messages over the table's links instead, pass it twice: as links and as pairs.",
                stacklevel=4,
            )
        names = trained.node_ids  # those of `data` are of its pairs
    candidates = _of_graph(trained, graph, known)
    names = range(candidates.graph.x.size(0)) if names is None else names
    return candidates._replace(names={trained.source.get(end) or end: names for end in ("src", "dst")})


def _of_graph(trained: Trained, graph: Data, known: list[Tensor]) -> Candidates:
    """Return a graph and its known links, without names."""
    unlabelled = without_labels(graph)
    unlabelled.pop("edge_label_attr", None)
    unlabelled.edge_label_index = graph.edge_index[:, :0]
    complete = trained.prepare(unlabelled)
    links, N = torch.cat(known, 1), complete.x.size(0)
    nodes = torch.arange(N)
    if len(of_sides := trained.source.get("ids") or ()) == 2:
        src, dst = nodes.split([len(side) for side in of_sides])
    elif (sides := two_sides(links, N)) is not None:
        src, dst = (nodes[sides == side] for side in (0, 1))
    else:
        src = dst = nodes
    return Candidates(complete, _from(src, links, graph.edge_index, N), src, dst, {})


def _from(src: Tensor, links: Tensor, edge_index: Tensor, N: int) -> Tensor:
    """Return the links that begin at these nodes, sorted; those of an undirected or bipartite graph begin at both ends.

    >>> _from(torch.arange(3), torch.tensor([[0], [2]]), torch.tensor([[0, 1], [1, 0]]), 3).tolist()
    [[0, 2], [2, 0]]
    """
    begins = torch.zeros(N, dtype=torch.bool).index_fill_(0, src, True)
    if not bool(begins.all()) or is_undirected(edge_index, num_nodes=N):
        links = torch.cat([links, links.flip(0)], 1)
    result: Tensor = coalesce(links[:, begins[links[0]]])
    return result


def _embedded(model: nn.Module, graph: Data) -> tuple[Tensor, Callable[[Tensor, Tensor], Tensor]]:
    """Return the embeddings of all nodes, and the function from those of A and B nodes to the scores `[A, B]`."""
    network: nn.Module = model.model if isinstance(model, LinkScores) else model
    decoder: Any = model.decoder if isinstance(model, LinkScores) else DotProduct()
    z = Inputs.of(network).call(network, graph)
    return model.with_popularity(z, graph.edge_index) if isinstance(model, LinkScores) else z, decoder.of_all_pairs


def _blocks(src: Tensor, dst: Tensor, embedded: list[Any]) -> Iterator[Tensor]:
    """Yield nodes that links begin at, in their order: as many as a decoder can pair with all others at once."""
    z, decoder = embedded[0]
    width = z.size(1) if isinstance(decoder.__self__, (Perceptron, Popular)) else len(embedded)
    return iter(src.split(max(1, NUMBERS // max(1, len(dst) * width))))
