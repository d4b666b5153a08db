"""Link prediction: which pairs of nodes are linked."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from .edges import OfEdges, check_pairs
from .losses import Binary
from .metrics import METRICS, RANKED, RANKED_LINKS, Metric
from .negatives import NEGATIVES, non_links, sides_of
from .objective import MASKS, Objective, Split, widest


@dataclass(frozen=True)
class LinkLabels(OfEdges, Binary):
    """Link prediction: y `[L]` int64, 1 for a link and 0 for a pair of nodes without one.

    The pairs are `edge_label_index` `[2, L]` (src, dst), and the masks `[L]` select those of each split. `edge_index`
    are the message-passing edges. For training, as many negative pairs as there are links are drawn in each step, with
    Python's global generator, which `Resumable` seeds. They are never message-passing edges, nor training links in
    either direction (`NonLinks`). In a bipartite graph they join its sides (`two_sides`).

    The model returns a vector for each node, `[N, K]`, and the score of a pair is the inner product of both. A model
    whose forward takes `edge_label_index` returns the scores `[L]` itself. The loss is the sigmoid cross-entropy. The
    score is `ranked_by`: `"roc_auc"`, `"average_precision"`, `"mrr"`, `"hits@20"`, `"hits@50"` or `"hits@100"`; the
    others are logged too. They are exact, since each split is evaluated as one batch.

    Args:
        negatives: "source": a negative pair has the source of its link, and another destination; "any": both ends are
            drawn, as by PyG's `negative_sampling`; "auto": "source" in a bipartite graph, else "any".
        pos_weight: a number: training draws as many pairs without a link as there are links, which are thus balanced.

    Raises:
        ValueError: if `ranked_by` or `negatives` is none of these, or a number is out of its range.

    Example:
        >>> z = torch.tensor([[1.0], [2.0], [-1.0]])
        >>> pairs = Data(edge_label_index=torch.tensor([[0, 0], [1, 2]]), y=torch.tensor([1, 0]))
        >>> LinkLabels(1).rows(z, pairs, None)
        (tensor([ 2., -1.]), tensor([1, 0]))
    """

    ranked_by: str = "roc_auc"
    negatives: str = field(default="auto", repr=False, kw_only=True)

    item = "link"
    goal = "prediction"
    column = "dimension"
    draws_pairs = True
    has_columns = False
    measures = RANKED_LINKS
    predicts = "links"

    def __post_init__(self) -> None:
        if not isinstance(self.pos_weight, (int, float, Tensor, type(None))):
            raise ValueError(
                f"pos_weight is {self.pos_weight!r}, expected a number: the weight of a link. Training draws as many "
                "pairs without a link as there are links, so both are balanced."
            )
        super().__post_init__()
        if self.ranked_by not in self.measures:
            raise ValueError(f"ranked_by is {self.ranked_by!r}, expected one of {', '.join(self.measures)}.")
        if self.negatives not in NEGATIVES:
            raise ValueError(f"negatives is {self.negatives!r}, expected one of {', '.join(NEGATIVES)}.")

    @property
    def metric(self) -> Metric:
        """The metric that `ranked_by` names."""
        return METRICS[self.ranked_by]

    def scored_by(self, metric: str) -> Objective:
        """Return the same objective, ranked by this metric."""
        return replace(self, ranked_by=self.named(metric).name)

    def check(self, data: Data, where: str) -> None:
        """Raise ValueError unless the pairs are nodes of the graph, with a label 0 or 1 each."""
        check_pairs(data, where)
        pairs, y = data.edge_label_index, data.y
        if y.dtype != torch.int64 or tuple(y.shape) != (pairs.size(1),) or ((y != 0) & (y != 1)).any():
            raise ValueError(
                f"{where}: y is {y.dtype} of shape {tuple(y.shape)}, expected torch.int64 of shape "
                f"({pairs.size(1)},): 1 for each link of edge_label_index, 0 for each pair without one."
            )

    def check_splits(self, data: Data, where: str) -> None:
        """Raise ValueError unless the masks are disjoint, each split can be scored, and no link leaks."""
        super().check_splits(data, where)
        for key in MASKS[1:]:
            if data.y[data[key]].unique().numel() < 2:
                raise ValueError(f"{where}: {key} has only links or only pairs without one, expected both.")
        if not data.y[data.train_mask].all():
            raise ValueError(f"{where}: train_mask has pairs with y = 0, which training draws. Leave them out.")
        leaking = torch.isin(_keys(data, data.edge_label_index), _keys(data, data.edge_index)) & (data.y == 1)
        for key in MASKS[1:]:
            if count := int((leaking & data[key]).sum()):
                raise ValueError(
                    f"{where}: {count} links of {key} are message-passing edges, so the model sees what it is to "
                    "predict. Take them out of edge_index, in both directions if it is undirected."
                )
        both_ways = _check_directions(data, where)
        _check_disjoint(data, both_ways, where)
        _check_sides(data, where)

    def _pairs(self, data: Data, split: Split) -> dict[str, Tensor]:
        """Return the pairs of a split and their labels; for training, with as many new negative pairs."""
        chosen = super()._pairs(data, split)
        pairs, y = chosen["edge_label_index"], chosen["y"]
        if split == "train" and pairs.numel():
            negatives, _ = non_links(data).beside(pairs, self.negatives)
            pairs, y = torch.cat([pairs, negatives], 1), torch.cat([y, y.new_zeros(negatives.size(1))])
        return {"edge_label_index": pairs, "y": y}

    def rows(self, out: Tensor, data: Data, split: Split | None) -> tuple[Tensor, Tensor]:
        """Return the scores of the pairs that `example` selects, and their labels."""
        if split is not None and f"{split}_mask" in data:
            data = self.example(data, split)
        return self.scores(out, data), data.y

    def scores(self, out: Tensor, data: Data) -> Tensor:
        """Return the scores `[L]` of the pairs: the inner products of their rows, or `out` if it holds scores.

        Raises:
            ValueError: if the output is `[..., 1]`, since scores are `[L]`.
        """
        src, dst = data.edge_label_index
        if out.dim() > 1 and out.size(-1) == 1 and self.out_channels != 1:
            expected = f"a score for each pair, ({len(src)},), or a vector for each node, (N, {self.out_channels})"
            raise ValueError(f"The model returns {tuple(out.shape)}, expected {expected}. Use .squeeze(-1).")
        return out if out.dim() == 1 else (out.index_select(0, src) * out.index_select(0, dst)).sum(-1)

    def complete(self, data: Data) -> None:
        """Raise ValueError unless the graph has pairs of nodes."""
        if "edge_label_index" not in data:
            raise ValueError("The run predicts links: give data.edge_label_index [2, L], the pairs of nodes.")

    def counts(self, out: Tensor, y: Tensor) -> list[Tensor]:
        """Return each score of `measures` times the number of pairs."""
        size, scores = int(self.known(y).sum()), self._scores(out, y)
        return [torch.tensor(size * scores[name], dtype=widest(out), device=out.device) for name in self.measures]

    def score_of_counts(self, size: float, *counts: float) -> float:
        """Return the score that `ranked_by` names."""
        return dict(zip(self.measures, counts, strict=True))[self.ranked_by] / max(size, 1.0)

    def metrics(self, statistics: Mapping[str, Sequence[float] | Tensor]) -> dict[str, float]:
        """Return the loss and all scores of each split; only the loss for the training."""
        metrics = super().metrics(statistics)
        for split, values in statistics.items():
            if split != "train":
                scores = {name: self.scored_by(name).score(values) for name in self.measures}
                metrics |= {f"{split}_{name}": float(np.float32(score)) for name, score in scores.items()}
        return metrics

    def constant_score(self, y: Tensor) -> float:
        """Return the score of the same prediction for all pairs.

        Example:
            >>> LinkLabels(1).constant_score(torch.tensor([1, 0, 0]))
            0.5
        """
        return self._scores(torch.zeros(len(y)), y)[self.ranked_by]

    def random_score(self, y: Tensor, draw: torch.Generator) -> float:
        """Return the score of random predictions."""
        return self._scores(torch.randn(len(y), generator=draw), y)[self.ranked_by]

    def _scores(self, out: Tensor, y: Tensor) -> dict[str, float]:
        if not bool(out.isfinite().all()):
            return dict.fromkeys(self.measures, float("nan"))
        scores = {name: measure(out, y) for name, measure in RANKED.items()}
        pos, neg = out.detach()[y == 1], out.detach()[y == 0]
        return scores | {"mrr": mrr(pos, neg)} | {f"hits@{k}": hits(pos, neg, k) for k in (20, 50, 100)}


def hits(pos: Tensor, neg: Tensor, k: int) -> float:
    """Return Hits@K, the share of the positive links `[P]` above the k-th of the negative ones `[M]`; 1 if M < k.

    It is that of OGB's `Evaluator`.

    Example:
        >>> hits(torch.tensor([3.0, 1.0]), torch.tensor([2.0, 1.0, 0.0]), k=2)  # a tie is no hit
        0.5
    """
    if neg.numel() < k:
        return 1.0
    return float((pos > neg.topk(k).values[-1]).double().mean())


def mrr(pos: Tensor, neg: Tensor) -> float:
    """Return MRR, the mean of 1 / rank of the positive links `[P]`, each among all negative ones `[M]`.

    A tie counts half: the rank is the mean of the best and the worst possible.

    Example:
        >>> mrr(torch.tensor([3.0, 1.0]), torch.tensor([2.0, 1.0]))  # ranks 1 and 2.5
        0.7
    """
    neg = neg.sort().values
    above, at_least = (len(neg) - torch.searchsorted(neg, pos, right=right) for right in (True, False))
    return float((1 / (1 + (above + at_least).double() / 2)).mean())


def _keys(data: Data, pairs: Tensor) -> Tensor:
    """Return a number for each pair of nodes."""
    numbers: Tensor = pairs[0].long() * data.x.size(0) + pairs[1].long()
    return numbers


def _check_directions(data: Data, where: str) -> bool:
    """Return True if the graph without the held-out links is undirected; then none may be shown by its other direction.

    Raises:
        ValueError: if one is. It is a warning if most links are, or most edges of the graph have a reverse one: a
            directed graph may have some.
    """
    pairs, positive, keys = data.edge_label_index, data.y == 1, _keys(data, data.edge_index)
    held_out = pairs[:, positive & (data.val_mask | data.test_mask)]
    rest = data.edge_index[:, ~torch.isin(keys, _keys(data, torch.cat([held_out, held_out.flip(0)], 1)))]
    has_reverse = torch.isin(_keys(data, rest.flip(0)), _keys(data, rest))
    both_ways, mostly = bool(rest.numel() and has_reverse.all()), bool(has_reverse.float().mean() > 0.5)
    for key in MASKS[1:]:
        others = positive & (data.train_mask | data.val_mask | data.test_mask) & ~data[key]
        links = pairs[:, positive & data[key]]
        known = torch.cat([keys, _keys(data, pairs[:, others])])
        count = int(torch.isin(_keys(data, links.flip(0)), known).sum())
        text = (
            f"{where}: {count} of {links.size(1)} links of {key} are message-passing edges or links of another split "
            "in the other direction"
        )
        if count and both_ways:
            raise ValueError(f"{text}, so the model sees what it is to predict. Take both directions out.")
        if (count and mostly) or 2 * count > links.size(1):
            warnings.warn(
                f"{text}, which shows them to the model if links have no direction. If so, make the graph undirected "
                "(torch_geometric.transforms.ToUndirected) before it is split.",
                stacklevel=5,
            )
    return both_ways


def _check_sides(data: Data, where: str) -> None:
    """Warn if pairs without a link join two nodes of one side of a bipartite graph, which no link does."""
    if (sides := sides_of(data)) is None:
        return
    src, dst = data.edge_label_index
    negative = (data.y == 0) & (data.val_mask | data.test_mask)
    if count := int(((sides[src] == sides[dst]) & negative).sum()):
        warnings.warn(
            f"{where}: {count} of {int(negative.sum())} pairs without a link in val_mask and test_mask join two nodes "
            "of one side of a bipartite graph, which are never linked, so the score is too high. Draw others.",
            stacklevel=5,
        )


def _check_disjoint(data: Data, both_ways: bool, where: str) -> None:
    """Raise ValueError if a pair has two labels or is in two splits, as when a link is repeated.

    With `both_ways`, a pair and its reverse are the same.
    """
    labelled = data.train_mask | data.val_mask | data.test_mask
    links = _keys(data, data.edge_label_index)[labelled & (data.y == 1)]
    if repeated := links.numel() - links.unique().numel():
        raise ValueError(f"{where}: {repeated} links of edge_label_index are repeated, expected each once.")
    negatives = data.edge_label_index[:, labelled & (data.y == 0)]
    known = torch.cat([links, _keys(data, data.edge_index)])
    linked = torch.isin(_keys(data, negatives), known)
    if both_ways:
        linked |= torch.isin(_keys(data, negatives.flip(0)), known)
    if wrong := int(linked.sum()):
        raise ValueError(f"{where}: {wrong} pairs with y = 0 are links, expected none.")
