"""A task: the graphs of three splits and what is to be predicted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

from torch_geometric.data import Data
from torch_geometric.loader import DataLoader

from .checks import _NOTHING_KNOWN, SPLITS, Split, _check_graph, _check_masks, any_known
from .preparation import Preparation, row_ranges

CLASSES = {  # in the order of the files, where only the sizes of the classes tell them apart
    "cora": (
        "Theory",
        "Reinforcement Learning",
        "Genetic Algorithms",
        "Neural Networks",
        "Probabilistic Methods",
        "Case Based",
        "Rule Learning",
    ),
    "citeseer": ("AI", "ML", "IR", "DB", "Agents", "HCI"),
    "pubmed": ("Diabetes Mellitus, Experimental", "Diabetes Mellitus Type 1", "Diabetes Mellitus Type 2"),
}

# The task: what every source of data ends in ------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Task:
    """What is to be learnt: graphs for training, validation and test, checked once and for all.

    A transductive task is one graph with ``train_mask``, ``val_mask`` and ``test_mask`` [N] bool, which ``train``,
    ``val`` and ``test`` each hold. An inductive one has whole graphs in each.

    Every graph has ``x`` [N, F] float, ``edge_index`` [2, E] (src, dst) and, where ``edge_dim`` is a number,
    ``edge_attr`` [E, edge_dim] float. With one label per node ``y`` is [N] int64 in 0..K-1, -1 where it is unknown, and
    no mask holds such a node. With ``multilabel`` it is [N, K] float32 of 0 and 1, NaN where it is unknown.

    Raises ValueError, which says what came, what was expected and what to do, when a graph is not of that form. The
    checks read each tensor once, here and nowhere else.

    >>> task = digits()
    >>> task.num_features, task.num_classes, task.transductive
    (64, 10, True)
    """

    name: str
    train: list[Data] = field(repr=False)
    val: list[Data] = field(repr=False)
    test: list[Data] = field(repr=False)
    num_features: int  # F
    num_classes: int  # K; the number of labels when multilabel
    multilabel: bool = False
    edge_dim: int | None = None
    class_names: tuple[str, ...] | None = field(default=None, repr=False)  # of the K classes, where they are known
    transforms: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)  # as in Preparation

    @cached_property
    def preparation(self) -> Preparation:
        """The dimensions, class names, transforms and range of the features, which a run stores beside its model.

        >>> digits().preparation.class_names[:3]
        ('0', '1', '2')
        """
        return Preparation(
            self.num_features,
            self.edge_dim,
            "micro_f1" if self.multilabel else "accuracy",
            self.multilabel,
            self.class_names,
            self.transforms,
            *row_ranges([data.x for data in self.train]),
        )

    @property
    def transductive(self) -> bool:
        """Whether the three splits are masks of one graph rather than graphs of their own."""
        first = (self.train[:1] + self.val[:1] + self.test[:1])[0]
        return all(len(graphs) == 1 and graphs[0] is first for graphs in (self.train, self.val, self.test))

    def graphs(self, split: Split) -> list[Data]:
        """The graphs of ``"train"``, ``"val"`` or ``"test"``."""
        return cast(list[Data], getattr(self, split))

    def loader(self, split: Split, batch_size: int = 1) -> DataLoader | list[Data]:
        """Batches of ``split`` for one epoch: the one graph itself, or ``batch_size`` graphs at a time.

        Training graphs are shuffled by torch's global generator. A list is a loader too, so that a transductive epoch
        costs no collation.

        >>> digits().loader("train")
        [Data(x=[1797, 64], edge_index=[2, 12618], y=[1797], ...)]
        """
        if self.transductive:
            return self.graphs(split)
        return DataLoader(self.graphs(split), batch_size=batch_size, shuffle=split == "train")

    def __post_init__(self) -> None:
        if self.num_classes < 1:
            raise ValueError(f"{self.name}{_NOTHING_KNOWN}")
        if self.class_names is not None and len(self.class_names) != self.num_classes:
            raise ValueError(
                f"{self.name}: class_names has {len(self.class_names)} names, expected one for each of the "
                f"{self.num_classes} classes."
            )
        for split in SPLITS:
            if not self.graphs(split):
                raise ValueError(f"{self.name}: there is no graph in {split}, expected at least one.")
        if self.transductive:
            _check_graph(self, self.train[0], self.name)
            _check_masks(self, self.train[0])
            return
        for split in SPLITS:
            known = False
            for number, data in enumerate(self.graphs(split)):
                _check_graph(self, data, f"{self.name}, {split} graph {number}")
                known = known or bool(any_known(data.y).any())
            if not known:
                raise ValueError(f"{self.name}: all labels of the {split} graphs are unknown, expected at least one.")
