"""A task: the graphs of three splits, and the objective."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from functools import cached_property
from math import isnan
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader

from .checks import NOTHING_KNOWN, check_graph
from .node_ids import has_ids
from .objective import SPLITS, Objective, Split, any_known, are_equal
from .preparation import Preparation, build_transform, row_range


@dataclass(frozen=True, eq=False)
class Task:
    """A learning task: graphs for training, validation and test, checked once, and the objective.

    Either the three splits share one graph, which `train`, `val` and `test` each hold, and masks select the nodes of
    each split (`train_mask`, `val_mask` and `test_mask` `[N]` bool). Or each split has its own graphs.

    Every graph has `x` `[N, F]` float, `edge_index` `[2, E]` (src, dst) and, unless `edge_dim` is None, `edge_attr`
    `[E, edge_dim]` float. The objective defines the form of the labels `y`: see `NodeLabels`, `NodeMultiLabels`,
    `NodeTargets`, `EdgeLabels`, `EdgeMultiLabels`, `EdgeTargets`, `GraphLabels`, `GraphMultiLabels`, `GraphTargets` and
    `LinkLabels`. All nodes in a mask have a known label.

    The values of each tensor are checked once, here and nowhere else.

    Raises:
        ValueError: if a graph does not have this form.

    Example:
        >>> from gat_pyg.data import digits
        >>> task = digits()
        >>> task.num_features, task.objective
        (64, NodeLabels(out_channels=10))
    """

    name: str
    train: list[Data] = field(repr=False)
    val: list[Data] = field(repr=False)
    test: list[Data] = field(repr=False)
    num_features: int  # F
    objective: Objective
    edge_dim: int | None = None
    class_names: tuple[str, ...] | None = field(default=None, repr=False)  # names of the K classes, if known
    transforms: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)  # as in Preparation
    num_splits: int = field(default=1, repr=False)  # splits or folds of the data set; the task has one of them
    # Arguments of `from_dataset` on which the split depends: () if the data have a split, None if unknown
    split_arguments: tuple[str, ...] | None = field(default=None, repr=False)
    graph_names: InitVar[Mapping[int, str]] = MappingProxyType({})  # names in messages, by id(graph)
    source: Mapping[str, Any] | None = field(default=None, repr=False)  # as in Preparation
    notes: tuple[str, ...] = field(default=(), repr=False)  # on how the data were read, which the command prints
    numbers: Mapping[Split, Sequence[int]] | None = field(default=None, repr=False)  # graphs' positions in the data set
    encoding: Mapping[str, Any] | None = field(default=None, init=False, repr=False)  # as in Preparation

    @cached_property
    def preparation(self) -> Preparation:
        """Dimensions, class names, transforms and range of the features, which a run stores with its model.

        >>> from gat_pyg.data import digits
        >>> digits().preparation.class_names[:3]
        ('0', '1', '2')
        """
        features = [self.features(data) for data in self.train]
        return Preparation(
            self.num_features,
            self.edge_dim,
            class_names=self.class_names,
            transforms=self.transforms,
            row_sum=row_range(features),
            num_nodes=len(features[0]) if not self.has_many_graphs and has_ids(features[0]) else None,
            encoding=self.encoding,
            source=self.source,
            num_labels=self.objective.num_labels,
        )

    @cached_property
    def constant(self) -> tuple[float, float]:
        """The test score of a constant prediction and its standard error, as in `Objective.constant_error`."""
        y = self.labels("test")
        return self.objective.constant_score(y), self.objective.constant_error(y)

    @property
    def num_classes(self) -> int:
        """K, the number of classes or labels, which is the number of columns of a model's output."""
        return self.objective.out_channels

    @property
    def shared_graph(self) -> Data | None:
        """The graph that all splits share; None if each split has its own graphs."""
        first = (self.train[:1] + self.val[:1] + self.test[:1])[0]
        shared = all(len(graphs) == 1 and graphs[0] is first for graphs in (self.train, self.val, self.test))
        return first if shared else None

    @property
    def has_many_graphs(self) -> bool:
        """True if each split has its own graphs, False if all share one."""
        return self.shared_graph is None

    @property
    def num_encodings(self) -> int:
        """P, the number of the last columns of x that are encodings (`gat_pyg.data.encoded`)."""
        return 0 if self.encoding is None else len(self.encoding["mean"])

    def features(self, data: Data) -> Tensor:
        """Return x of a graph without the encodings."""
        return cast(Tensor, data.x[:, : self.num_features - self.num_encodings])

    def labels(self, split: Split) -> Tensor:
        """Return the labels of `"train"`, `"val"` or `"test"`."""
        mask = None if self.has_many_graphs else split
        return torch.cat([self.objective.labels(data, mask) for data in self.graphs(split)])

    def graphs(self, split: Split) -> list[Data]:
        """Return the graphs of `"train"`, `"val"` or `"test"`."""
        return cast(list[Data], getattr(self, split))

    def scored_by(self, metric: str) -> Task:
        """Return the same task with another metric: the score that is reported, kept and stopped on.

        Raises:
            ValueError: if the metric does not fit the labels, or is undefined for those of the validation or the test.

        >>> from gat_pyg.data import digits
        >>> digits().scored_by("macro_f1").objective.metric.title
        'macro-F1'
        """
        try:
            objective = self.objective.scored_by(metric)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None
        for split in SPLITS[1:]:
            if objective.by_rows and isnan(objective.constant_score(self.labels(split))):
                raise ValueError(
                    f"{self.name}: {objective.metric.title} is undefined for the {split} labels: too few are known, or "
                    "all are equal. Choose another metric or split."
                )
        return self._with(objective=objective)

    def scaled_as(self, mean: Sequence[float], std: Sequence[float]) -> Task:
        """Return the same regression task, standardised by another mean and standard deviation of each target."""
        objective: Any = self.objective
        return self._with(objective=replace(objective, mean=tuple(mean), std=tuple(std)))

    def with_loss(self, **options: Any) -> Task:
        """Return the same task with another loss: with arguments of the objective that change it.

        Args:
            options: `class_weight` of classes, or `pos_weight` of labels and links, `label_smoothing` and `focal`;
                `error` of a regression. See the objective's class. Balanced weights follow from the training labels.

        Raises:
            ValueError: if an option does not fit the labels; the message lists those that fit.

        >>> from gat_pyg.data import planted
        >>> task = planted(labels=2).with_loss(pos_weight="balanced", focal=2.0)
        >>> task.objective.pos_weight
        (1.40..., 1.98...)
        """
        try:
            objective = self.objective.with_loss(**options).fitted(self.labels("train"))
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None
        return self._with(objective=objective)

    def reading_labels(self, rate: float | None) -> Task:
        """Return the same task with a share of the training labels that a step reads: see `OfNodes`.

        Raises:
            ValueError: if the labels are not of the nodes of one graph.
        """
        if rate is not None and (self.has_many_graphs or self.objective.item != "node"):
            where = "many graphs" if self.has_many_graphs else "one graph"
            raise ValueError(
                f"label_rate is {rate}, which needs labels of the nodes of one graph, but {self.name} predicts "
                f"{self.objective.predicts} of {where}. Leave it out."
            )
        return self._with(objective=replace(self.objective, label_rate=rate))

    def read_from(self, source: Mapping[str, Any], notes: Sequence[str] = (), **fields: Any) -> Task:
        """Return the same task with a description of its files, by which `read_rows` reads others, and notes.

        `fields` are other values of `class_names` and `split_arguments`.
        """
        return self._with(source=source, notes=tuple(notes), **fields)

    def split_by(self, arguments: Sequence[str], num_splits: int) -> Task:
        """Return the same task with the arguments on which its split depends, and the number of splits."""
        return self._with(split_arguments=tuple(arguments), num_splits=num_splits)

    def encoded_by(self, encoding: Mapping[str, Any], graphs: Mapping[int, Data], notes: Sequence[str] = ()) -> Task:
        """Return the same task with the encoded graphs, by the `id` of each graph: see `gat_pyg.data.encoded`."""
        fields: dict[str, Any] = {split: [graphs[id(data)] for data in self.graphs(split)] for split in SPLITS}
        fields |= {"num_features": self.num_features + len(encoding["mean"]), "notes": (*self.notes, *notes)}
        return self._with(encoding=encoding, **fields)

    def transformed(self, transform: Mapping[str, Any]) -> Task:
        """Return the same task with transformed edges, by the name of the transform's class and its arguments."""
        build: Any = build_transform(transform)
        graphs: dict[int, Data] = {}
        same: dict[int, Any] = {}
        for data in (data for split in SPLITS for data in self.graphs(split)):
            graph = graphs[id(data)] = build(copy.copy(data))
            graph.edge_index = same.setdefault(id(data.edge_index), graph.edge_index)  # the steps of a series share it
        splits = {split: [graphs[id(data)] for data in self.graphs(split)] for split in SPLITS}
        return self._with(transforms=(*self.transforms, transform), **splits)

    def _with(self, **fields: Any) -> Task:
        """Return a task with other values of fields, whose graphs have been checked."""
        changed = copy.copy(self)
        for key in ("constant", "preparation"):
            vars(changed).pop(key, None)
        vars(changed).update(fields)
        return changed

    def loader(self, split: Split, batch_size: int = 1) -> DataLoader | list[Data]:
        """Return the batches of a split for one epoch: the shared graph, or `batch_size` graphs at a time.

        Training graphs are shuffled by torch's global generator. For a shared graph the loader is a list, so that it is
        not collated in every epoch.

        >>> from gat_pyg.data import digits
        >>> digits().loader("train")
        [Data(x=[1797, 64], edge_index=[2, 12618], y=[1797], ...)]
        """
        if self.has_many_graphs:
            return DataLoader(self.graphs(split), batch_size=batch_size, shuffle=split == "train")
        return self.graphs(split)

    def __post_init__(self, graph_names: Mapping[int, str]) -> None:
        if self.num_classes < 1:
            raise ValueError(f"{self.name}{NOTHING_KNOWN}")
        if self.class_names is not None and len(self.class_names) != self.num_classes:
            raise ValueError(
                f"{self.name}: class_names has {len(self.class_names)} names, expected one for each of the "
                f"{self.num_classes} classes."
            )
        for split in SPLITS:
            if not self.graphs(split):
                raise ValueError(f"{self.name}: there is no graph in {split}, expected at least one.")
        if self.shared_graph is not None:
            check_graph(self.shared_graph, self.num_features, self.edge_dim, self.objective, self.name)
            self.objective.check_splits(self.shared_graph, self.name)
        else:
            self._check_graphs(graph_names)
        train = self.labels("train")
        if not self.objective.draws_pairs and are_equal(train):
            reason = "all known training labels are equal, so there is nothing to learn"
            warnings.warn(f"{self.name}: {reason}. Check y and the split.", stacklevel=3)
        object.__setattr__(self, "objective", self.objective.fitted(train))

    def _check_graphs(self, graph_names: Mapping[int, str]) -> None:
        for split in SPLITS:
            has_label = False
            for number, data in enumerate(self.graphs(split)):
                where = graph_names.get(id(data), f"{self.name}, {split} graph {number}")
                check_graph(data, self.num_features, self.edge_dim, self.objective, where)
                has_label = has_label or bool(any_known(data.y).any())
            if not has_label:
                raise ValueError(f"{self.name}: all labels of the {split} graphs are unknown, expected at least one.")
