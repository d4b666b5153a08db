"""A finished run, opened once: its models and its data, and the steps from data to predictions."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from torch_geometric.data import Batch, Data

from ..data.arrays.batched_graphs import pointers
from ..data.arrays.keys import UNION
from ..data.arrays.series import graphs_of_series, is_series
from ..data.reader import Rows
from ..data.rows import read_rows
from ..runs.model_file import seeds_of
from ..runs.result import result_in
from ..runs.task import settings_of, task_of, unknown_categories
from ..settings.settings import Settings
from ..tasks.checks import check_edge_index, check_edge_index_shape
from ..tasks.edges import check_pairs
from ..tasks.metrics import metric_named
from ..tasks.model import Inputs, graph_of_nodes
from ..tasks.node_ids import num_nodes
from ..tasks.objective import MASKS, Objective, any_known
from ..tasks.preparation import Preparation
from ..tasks.task import Task
from .load import Predictor, encoders_of, load

NODES = 2**17  # of several graphs, so many are computed at once
PARTS = 10  # of the nodes whose labels are read, which are hidden from their own predictions

Seed = int | Literal["all"] | None


@dataclass(frozen=True, eq=False)
class Trained:
    """A finished run, or the runs of several seeds: `open` loads it, `read`, `prepare` and `outputs` are its steps.

    Args:
        folder: the folder of the run.
        predictor: its models.
        preparation: the preparation of its data.
        seed: the seed of the model, if the run has several; `None` and `"all"` are all of them.
        trust: as in `gat_pyg.runs.task.settings_of`, through which everything in the folder is built.
    """

    folder: Path
    predictor: Predictor
    preparation: Preparation
    seed: Seed = None
    trust: bool = False

    @classmethod
    def open(
        cls, run_dir: str | Path, seed: Seed = None, model: nn.Module | None = None, trust: bool = False
    ) -> Trained:
        """Load the models of a run, of several seeds by default all, with the preparation of its data.

        Raises:
            FileNotFoundError, ValueError: as `gat_pyg.load`, or if the run has no preparation.
        """
        folder = Path(run_dir)
        which = "all" if seed is None and seeds_of(folder) else seed
        predictor: Any = load(folder, model, which, predictions=True, trust=trust)
        if predictor.preparation is None:
            raise ValueError(
                f"{run_dir} was saved without its data preparation. Prepare the data yourself, and call the model: "
                "gat_pyg.load(run_dir, predictions=True)."
            )
        return cls(folder, predictor, predictor.preparation, seed, trust)

    @property
    def models(self) -> Sequence[nn.Module]:
        """The models of the seeds."""
        return cast(Sequence[nn.Module], self.predictor.models)

    @property
    def objective(self) -> Objective:
        """The objective of the run."""
        return self.predictor.run_objective

    @property
    def source(self) -> Mapping[str, Any]:
        """The description of the reader of the user's files; empty without any."""
        return self.preparation.source or {}

    @property
    def folders(self) -> dict[int | None, Path]:
        """The folders of the seeds; of a run of one seed, that of the run by the key None."""
        seeds = [seed for seed in seeds_of(self.folder) if self.seed in (None, "all", seed)]
        return {seed: self.folder / f"seed-{seed}" for seed in seeds} or {None: self.folder}

    @property
    def whole(self) -> Path:
        """The folder with what belongs to the averaged prediction: that of the run, or of its only seed."""
        first, *others = self.folders.values()
        return self.folder if others else first

    @property
    def warning(self) -> str:
        """A warning if the test score of the averaged prediction is worse than the best baseline's, else ""."""
        if (result := result_in(self.whole)) is None or not result.below_baseline:
            return ""
        return f"the test score {metric_named(result.metric).text(result.value)} is {result.below_baseline}"

    @cached_property
    def task(self) -> Task:
        """The task that the run was trained on, read again."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # on this data, printed by the training
            return task_of(next(iter(self.folders.values())), self.trust)

    @cached_property
    def settings(self) -> Settings:
        """The settings of the run, or of the first of its seeds."""
        return settings_of(next(iter(self.folders.values())), self.trust)

    def read(self, data: Any = None) -> Rows:
        """Read later data, or the run's own: graphs as they come from their source, and the names of their rows."""
        if data is None and not self.source:
            task = self.task
            return Rows(task.test if task.shared_graph is None else [task.shared_graph], {})
        return read_rows(self.preparation, data)

    @cached_property
    def node_ids(self) -> Sequence[Any] | None:
        """The ids of the nodes of the run's own data, if these are tables."""
        ids = read_rows(self.preparation).ids if self.source else {}
        return next(iter(ids.values()), None)

    def without_labels(self, rows: Rows, data: Any = None) -> list[Data]:
        """Return graphs without splits, and without labels but those that the model reads.

        Of the run's own data these are the training labels; of others those in `data`, or else those of training nodes
        with the same ids.
        """
        graphs = [without_labels(graph) for graph in rows.graphs]
        for graph, bare in zip(rows.graphs, graphs, strict=True) if self.objective.label_rate else ():
            bare.y = labels_of(graph, self.objective)
            if data is None or bare.y is None or not any_known(bare.y).any():
                own: Any = self.task.shared_graph
                if data is None:
                    index = torch.arange(len(own.y))
                else:
                    rows_of = {str(name): row for row, name in enumerate(self.node_ids or ())}
                    ids: Sequence[Any] = next(iter(rows.ids.values()), range(num_nodes(graph)))
                    index = torch.tensor([rows_of.get(str(name), -1) for name in ids])
                known = (index >= 0) & own.train_mask[index]
                bare.y = own.y[index]
                bare.y[~known] = self.objective.unknown(bare.y[~known])
        return graphs

    def prepare(self, data: Any, is_read: bool = False) -> Data:
        """Return a graph, or several as one, prepared and checked as the data of the run.

        Of graphs that `read` has read, `is_read` is True: the reader of molecules has warned of unknown categories.

        Raises:
            ValueError: as `gat_pyg.predict`.
        """
        preparation, objective = self.preparation, self.objective
        graph: Data = preparation(_joined(data))
        if preparation.edge_dim is None and graph.edge_attr is not None:
            warnings.warn("data.edge_attr is not read: the run was trained without edge features.", stacklevel=4)
            graph.edge_attr = None
        objective.complete(graph)
        _check(graph, objective, self.models[0])
        graph = self._with_labels(graph) if objective.label_rate else graph
        if not (is_read and "categories" in (preparation.source or {})):
            sizes = {key: encoder.categories for key, encoder in encoders_of(self.models[0]).items() if key in graph}
            if text := unknown_categories("data", self.source, {key: [graph[key]] for key in sizes}, sizes):
                warnings.warn(text, stacklevel=4)  # the caller of `predict`
        return graph

    def _with_labels(self, graph: Data) -> Data:
        """Return a graph with known labels as columns of x, and their mask `read`: those of training, if it has a mask.

        Raises:
            ValueError: if there are none.
        """
        y = labels_of(graph, self.objective)
        read = torch.zeros(len(graph.x), dtype=torch.bool) if y is None else any_known(y)
        graph.read = read & graph.get("train_mask", read).to(read.device)
        if y is None or not graph.read.any():
            raise ValueError(
                "The run reads the known labels of other nodes (training.label_rate), but the data have none. Give "
                "them in the target's column of a table of nodes, or as data.y with NaN or -1 for the others. For data "
                "without labels, train with training.label_rate=null."
            )
        graph.y = y
        return self.objective.with_labels(graph, graph.read)

    def _hiding(self, graph: Data) -> Iterator[tuple[Tensor, Data]]:
        """Yield disjoint masks `[N]` of all nodes whose label is read, each with a graph that does not have theirs."""
        if self.objective.label_rate:
            part = graph.read.cumsum(0) % PARTS
            bare = copy.copy(graph).update({"x": graph.x[:, : self.preparation.in_channels]})
            for hidden in (graph.read & (part == number) for number in range(PARTS)):
                if hidden.any():
                    yield hidden, self.objective.with_labels(bare, graph.read & ~hidden)

    def outputs(self, data: Any, is_read: bool = False) -> Tensor:
        """Return the outputs of S models for graphs as they come from their source: `[S, n, K]`, of links `[S, L]`.

        If the model reads labels, a node whose label is read has the output of a graph without it.
        """
        parts = []
        for graphs in _steps(data):
            graph = self.prepare(graphs, is_read)
            call = partial(self.predictor.to(graph.x.device), outputs=True)
            out = Inputs.of(self.predictor).call(call, graph)
            for hidden, others in self._hiding(graph):
                out[:, hidden] = Inputs.of(self.predictor).call(call, others)[:, hidden]
            parts.append(out)
        return torch.cat(parts, 1)

    @property
    def targets(self) -> list[str]:
        """The names of the columns of the user's tables that are predicted, if any."""
        target = self.source.get("target")
        target = target.get("names") if isinstance(target, Mapping) else target
        return [target] if isinstance(target, str) else list(target or [])

    @property
    def columns(self) -> list[str]:
        """The names of the columns with predictions."""
        if not self.objective.has_columns:
            return ["probability"]
        K, names = self.objective.out_channels, list(self.preparation.class_names or ())
        if self.objective.column != "target":
            return [f"p_{name}" for name in names or range(K)]
        names = names or self.targets or ["prediction"]
        return names if len(names) == K else [f"prediction_{k}" for k in range(K)]


def _steps(data: Any) -> Iterator[Any]:
    """Yield a graph, or several in lists of at most `NODES` nodes or one graph."""
    if is_series(data):
        data = graphs_of_series(data, None, "data")
    if not isinstance(data, (list, tuple, Dataset)):
        yield data
        return
    graphs: list[Any] = list(data)  # type: ignore[arg-type]
    if not graphs or not all(isinstance(graph, Data) for graph in graphs):
        kinds = ", ".join(sorted({type(graph).__name__ for graph in graphs})) or "nothing"
        raise ValueError(
            f"data is a {type(data).__name__} of {kinds}, expected graphs: torch_geometric.data.Data(x=x, "
            "edge_index=edge_index)."
        )
    step: list[Data] = []
    size = 0
    for graph in graphs:
        size += num_nodes(graph)
        if step and size > NODES:
            yield step
            step, size = [], num_nodes(graph)
        step.append(graph)
    yield step


def _joined(data: Any) -> Any:
    """Return several graphs as a batch; `batch` or `ptr` must be a division of the nodes."""
    if isinstance(data, list):
        keys = [set(graph.keys()) for graph in data]
        partial_keys = set.union(*keys) - set.intersection(*keys)  # such as the labels that are known
        return Batch.from_data_list(data, exclude_keys=[*partial_keys])
    if isinstance(data, Data) and not isinstance(data, Batch) and any(key in data for key in UNION):
        pointers(data, "data")
    return data


def _check(data: Data, objective: Objective, model: nn.Module) -> None:
    """Raise ValueError for ids of no node, invalid pairs, and graphs without nodes whose label is to be predicted."""
    if type(data.edge_index) is Tensor and data.edge_index.layout == torch.strided:
        check_edge_index_shape(data.edge_index, "data")
        check_edge_index(data.edge_index, data.x.size(0), "data")
    elif data.edge_index is None and "edge_index" in Inputs.of(model).names:
        raise ValueError("data has no edge_index. Give the edges as [2, E], src in row 0, dst in row 1.")
    if objective.has_pairs:
        check_pairs(data, "data")
        if "edge_label_attr" in data and not data.edge_label_attr.isfinite().all():
            raise ValueError("data: edge_label_attr is NaN or infinite. Replace such values, for instance by 0.")
    if objective.item == "graph":
        batch, count = graph_of_nodes(data) or (torch.zeros(data.x.size(0), dtype=torch.long), 1)
        empty = (batch.bincount(minlength=count) == 0).nonzero().flatten().tolist()
        if empty:
            others = f", nor have {len(empty) - 1} others" if len(empty) > 1 else ""
            name = f"graph {empty[0]}" if count > 1 else "the graph"
            raise ValueError(f"data: {name} has no nodes{others}, expected at least one. Leave it out.")


def labels_of(graph: Data, objective: Objective) -> Tensor | None:
    """Return the labels of a graph as it comes from its source, in the form of the objective; None without any.

    Raises:
        ValueError: if they have another form.
    """
    graph = copy.copy(graph)
    y = graph.get("edge_label") if objective.has_pairs and "edge_label" in graph else graph.y
    if y is None:
        return None
    objective.complete(graph)
    (graph.y,) = type(objective).convert([y], "data")
    if objective.size(graph) != len(graph.y):
        raise ValueError(f"data: y has {len(graph.y)} rows, but there are {objective.size(graph)} {objective.item}s.")
    objective.check(graph, "data")
    return cast(Tensor, graph.y)


def without_labels(graph: Data) -> Data:
    """Return a graph without labels and splits."""
    graph = copy.copy(graph)
    for key in ("y", "edge_label", *MASKS):
        graph.pop(key, None)
    return graph
