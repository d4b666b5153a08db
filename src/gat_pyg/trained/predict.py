"""Predictions of a trained run: of graphs as a tensor, of files and tables as a table with the user's names."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, overload

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from torch_geometric.data import Batch, Data

from ..data.arrays.batched_graphs import pointers
from ..data.arrays.keys import UNION
from ..data.arrays.series import graphs_of_series, is_series
from ..data.rows import column_name, read_rows
from ..data.tables.programs import is_graph
from ..files import needs, write_whole
from ..models.encoders import num_unknown
from ..runs.model_file import seeds_of
from ..tasks.checks import check_edge_index, check_edge_index_shape
from ..tasks.edges import check_pairs
from ..tasks.model import Inputs, graph_of_nodes
from ..tasks.node_ids import num_nodes
from ..tasks.objective import MASKS, Objective, any_known
from ..tasks.preparation import Preparation
from ..tasks.task import Task
from .load import Predictor, encoders_of, load

if TYPE_CHECKING:
    from .uncertainty import Calibration

NODES = 2**17  # of several graphs, so many are computed at once

Seed = int | Literal["all"] | None


@overload
def predict(
    run_dir: str | Path,
    data: Data | Sequence[Data],
    out: None = None,
    *,
    seed: Seed = None,
    model: nn.Module | None = None,
) -> Tensor: ...


@overload
def predict(
    run_dir: str | Path,
    data: Any = None,
    out: str | Path | None = None,
    *,
    seed: Seed = None,
    model: nn.Module | None = None,
    top_k: int | None = None,
    level: float | None = None,
    trust: bool = False,
) -> Any: ...


def predict(
    run_dir: str | Path,
    data: Any = None,
    out: str | Path | None = None,
    *,
    seed: Seed = None,
    model: nn.Module | None = None,
    top_k: int | None = None,
    level: float | None = None,
    trust: bool = False,
) -> Any:
    """Return the predictions of a trained run: of graphs as a tensor, of files and frames as a table.

    Predictions are the probabilities of classes, labels or links, or targets in the unit of the training data. Of a
    run with several seeds they are the mean over these; `seed=3` chooses one.

    **Graphs.** The result is `[N, K]` of the nodes or edges of a graph, `[G, K]` of graphs and `[L]` of links. `data`
    is a graph or several as they come from their source: a list or data set of them, a `Batch`, or a `Data` with
    `batch` `[N]`, the graph of each node. With x `[T, N, F]` it is a series of T steps on one graph, and the result is
    `[T, N, K]`, or `[T, K]` of graphs. The data are prepared in the same way as the run's data (`Preparation`), on the
    device of their features. The edges are those of `edge_label_index` `[2, L]`, by default `edge_index`. If the
    decoder reads their features, pairs other than the edges need `edge_label_attr` `[L, D]`.

    **Files and tables.** The result is a `pandas.DataFrame`, also for graphs if there is a file `out` to write. A row
    begins with the names in the user's files, or with numbers of nodes, pairs or graphs. Then come the class and the
    probability `p_CLASS` of each class, or the targets by name; and of several seeds the standard deviation of
    each, `..._std`. `data` are files or frames of the form that the run was trained on. Rows are those without a label,
    or all if no label or every label is known. Without `data`, they are those of the run's own data without a label, or
    else its test split. Of links, these are the pairs in `data` or in the test.

    **The best links.** With `top_k`, the table has the most probable links of each node instead, the best first. Known
    links are left out: the edges and pairs of `data`, or else of the run's own data. In a bipartite graph, such as one
    of users and items, they begin at the nodes of the first side.

    **Prediction sets and intervals.** With `level`, the result is a table, of graphs too. It has calibrated
    probabilities and a column `class_set`, for a table `TARGET_set`: the classes in the set of this level, the
    most probable one first. Of a regression, `..._low` and `..._high` are the ends of an interval. See `Calibration`,
    whose text is in `attrs["uncertainty"]` of the table.

    Args:
        run_dir: the folder of a run, or of the runs of several seeds.
        data: graphs, or the path of a file, several paths or frames.
        out: a file to write the table to: `.csv`, `.parquet`, or `.jsonl` for JSON lines. It appears as a whole.
        seed: seed of the model to load, if the run has several; or `"all"`.
        model: as in `load`.
        top_k: the number of links of each node.
        level: the share of labels that sets and intervals are to hold: 0.01, 0.02, ... or 0.99.
        trust: whether to build whatever the folder's settings name, as in one's own runs, not only classes of gat_pyg,
            PyG and OGB. It matters if the run's own data are read.

    Raises:
        FileNotFoundError, ValueError: as `load` and `read_rows`; for what training refuses: other dimensions than the
            run's, features that are NaN or infinite, ids that are no node, a graph without nodes that is to have a row;
            if the run's preparation is missing or cannot be applied; if `out` ends in something else; for another
            `level`, or if the run predicts several labels of a row, or links.
        ImportError: if a package for tables is missing.

    Warns if features seem to be prepared differently, have categories that training did not have, or are not read.

    >>> predict("nowhere", Data())
    Traceback (most recent call last):
    FileNotFoundError: nowhere is not a run folder: it does not exist. Give the folder that a run printed at its end.
    """
    write = None if out is None else writer(out)
    trained, task = predictor_of(run_dir, seed, model, trust), cache(partial(run_task, run_dir, trust))
    sets: dict[str, Any] = {}
    if level is not None:
        from .uncertainty import of_run

        sets = {"calibration": of_run(run_dir, seed, trained, task, trust), "level": level}
    with torch.no_grad():
        if write is None and top_k is None and level is None and not is_tabular(data):
            values = trained.run_objective.predictions(outputs(trained, data))
            mean = values[0] if len(values) == 1 else values.mean(0)
            is_of_steps = is_series(data) and trained.run_objective.item != "graph"
            return mean.unflatten(0, (len(data.x), -1)) if is_of_steps else mean
        if top_k is not None:
            from .top_links import top_links

            frame = top_links(trained, data, top_k, task)
        else:
            rows = selected(task, trained, data)
            frame = table(rows.outputs(trained), rows.ids, trained, **sets)
    if write is not None:
        write(frame)
    if level is not None:
        frame.attrs["uncertainty"] = sets["calibration"].text(level)
    return frame


def predictor_of(
    run_dir: str | Path, seed: Seed = None, model: nn.Module | None = None, trust: bool = False
) -> Predictor:
    """Return the models of a run, of several seeds by default all, with the run's data preparation.

    Raises:
        FileNotFoundError, ValueError: as `load`, or if the run has no data preparation.
    """
    folder = Path(run_dir)
    seed = "all" if seed is None and seeds_of(folder) else seed
    trained: Any = load(folder, model, seed, predictions=True, trust=trust)
    if trained.preparation is None:
        raise ValueError(
            f"{run_dir} was saved without its data preparation. Prepare the data yourself, and call the model: "
            "gat_pyg.load(run_dir, predictions=True)."
        )
    return cast(Predictor, trained)


# Graphs -------------------------------------------------------------------------------------------------------------


def is_tabular(data: Any) -> bool:
    """Return True for None, a path, a frame, a graph of networkx, or several of these: what is not graphs of PyG."""
    items = data if isinstance(data, (list, tuple)) and data else [data]
    return all(
        one is None or isinstance(one, (str, Path, Mapping)) or hasattr(one, "columns") or is_graph(one)
        for one in items
    )


def outputs(trained: Predictor, data: Any, is_read: bool = False) -> Tensor:
    """Return the outputs of S models for graphs as they come from their source, `[S, n, K]`, or `[S, L]` of links.

    Of graphs that `read_rows` has read, `is_read` is True: the reader of molecules has warned of unknown categories.
    """
    parts = []
    for graphs in _steps(data):
        graph = prepared(trained, graphs, is_read)
        call = partial(trained.to(graph.x.device), outputs=True)
        parts.append(Inputs.of(trained).call(call, graph))
    return torch.cat(parts, 1)


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


def prepared(trained: Predictor, data: Any, is_read: bool = False) -> Data:
    """Return a graph, or several as one, prepared and checked as the data of the run.

    Raises:
        ValueError: as `predict`.
    """
    preparation, objective = cast(Preparation, trained.preparation), trained.run_objective
    graph: Data = preparation(_joined(data))
    if preparation.edge_dim is None and graph.edge_attr is not None:
        warnings.warn("data.edge_attr is not read: the run was trained without edge features.", stacklevel=4)
        graph.edge_attr = None
    objective.complete(graph)
    _check(graph, objective, trained.models[0])
    if not (is_read and "categories" in (preparation.source or {})):
        _warn_of_unknown_categories(graph, trained.models[0], preparation.source)
    return graph


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


def _warn_of_unknown_categories(data: Data, model: nn.Module, source: Mapping[str, Any] | None) -> None:
    """Warn if features have values that are not a category of training."""
    texts = []
    for key, encoder in encoders_of(model).items():
        if key in data:
            unknown = num_unknown([data[key]], encoder.categories)
            texts += [f"{column_name(source, key, column)} has {count}" for column, count in unknown.items()]
    if texts:
        warnings.warn(
            "The data have values that are not a category of training; the encoder adds nothing to them: "
            f"{', '.join(texts)}.",
            stacklevel=5,  # the caller of `predict`
        )


# Rows of files and tables -------------------------------------------------------------------------------------------


class Selected(NamedTuple):
    """Graphs, a mask of the chosen rows of each, and the columns that name the chosen rows."""

    graphs: list[Data]
    chosen: list[Tensor]
    ids: dict[str, Any]

    def outputs(self, trained: Predictor) -> Tensor:
        """Return the outputs of the chosen rows, as `outputs`; graphs without one are not computed."""
        graphs = [graph for graph, chosen in zip(self.graphs, self.chosen, strict=True) if chosen.any()]
        kept = torch.cat([chosen for chosen in self.chosen if chosen.any()])
        out = outputs(trained, graphs if len(graphs) > 1 else graphs[0], is_read=True)
        return out if bool(kept.all()) else out[:, kept]


def selected(task: Callable[[], Task], trained: Predictor, data: Any) -> Selected:
    """Return the rows of data without a label, or else all; of a run's own data, or else those of the test.

    `task` returns the run's task, and is called only if needed.

    Raises:
        ValueError: if there is no row.
    """
    preparation, objective = cast(Preparation, trained.preparation), trained.run_objective
    if data is None and objective.item == "link":
        return _test_pairs(task(), preparation, objective)
    is_read = data is not None or preparation.source is not None
    graphs, ids = read_rows(preparation, data)[:2] if is_read else (_graphs_of(task()), {})
    known = [labels_of(graph, objective) for graph in graphs]
    every = [torch.ones(_size(graph, objective), dtype=torch.bool) for graph in graphs]
    chosen = [mask if y is None else ~any_known(y) for mask, y in zip(every, known, strict=True)]
    if not any(bool(mask.any()) for mask in chosen):  # all labels are known
        chosen = every if data is not None else _test_of(task(), every)
    index = torch.cat(chosen).nonzero().flatten().tolist()
    if not index:
        raise ValueError("The data have no row to predict, expected at least one.")
    ids = ids or _numbers(graphs, objective)
    named = {name: [column[row] for row in index] for name, column in ids.items()}
    return Selected([_without_labels(graph) for graph in graphs], chosen, named)


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


def run_task(run_dir: str | Path, trust: bool = False) -> Task:
    """Return the task of a run, or that of the runs of several seeds."""
    from ..runs.build import task_of  # imports Lightning

    folder = Path(run_dir)
    seeds = seeds_of(folder)
    return task_of(folder / f"seed-{seeds[0]}" if seeds else folder, trust)


def _test_pairs(task: Task, preparation: Preparation, objective: Objective) -> Selected:
    """Return the links and the other pairs of the test."""
    graph = _without_labels(objective.example(task.test[0], "test"))
    ids, source = _numbers([graph], objective), preparation.source
    if source is not None and (names := read_rows(preparation).ids):
        (names_of_nodes,) = names.values()
        ids = {source.get(end) or end: [names_of_nodes[node] for node in nodes] for end, nodes in ids.items()}
    return Selected([graph], [torch.ones(objective.size(graph), dtype=torch.bool)], ids)


def _graphs_of(task: Task) -> list[Data]:
    """Return the graph of a task, or its test graphs."""
    return task.test if task.shared_graph is None else [task.shared_graph]


def _test_of(task: Task, every: list[Tensor]) -> list[Tensor]:
    """Return the masks of the test rows, for masks of all rows."""
    if task.shared_graph is not None:
        return [task.shared_graph.test_mask]
    if task.numbers is None:
        return every
    numbers = {*task.numbers["test"]}
    return [mask & (number in numbers) for number, mask in enumerate(every)]


def _size(graph: Data, objective: Objective) -> int:
    """Return the number of rows of a graph."""
    if objective.item == "node":
        return num_nodes(graph)
    if objective.item == "graph":
        return 1
    graph = copy.copy(graph)
    objective.complete(graph)
    return int(graph.edge_label_index.size(1))


def _numbers(graphs: Sequence[Data], objective: Objective) -> dict[str, Any]:
    """Return columns with the number of each row: of its graph, its node, or the nodes of its pair."""
    sizes = [_size(graph, objective) for graph in graphs]
    are_steps = len(graphs) > 1 and all(graph.edge_index is graphs[0].edge_index for graph in graphs)  # of a series
    of_graph: dict[str, Any] = {"step" if are_steps else "graph": np.repeat(np.arange(len(sizes)), sizes)}
    if objective.item == "graph":
        return of_graph
    if objective.item == "node":
        columns: dict[str, Any] = {"node": np.concatenate([np.arange(size) for size in sizes])}
    else:
        pairs = []
        for graph in map(copy.copy, graphs):
            objective.complete(graph)
            pairs.append(graph.edge_label_index)
        columns = dict(zip(("src", "dst"), torch.cat(pairs, 1).numpy(), strict=True))
    return (of_graph if len(graphs) > 1 else {}) | columns


def _without_labels(graph: Data) -> Data:
    graph = copy.copy(graph)
    for key in ("y", "edge_label", *MASKS):
        graph.pop(key, None)
    return graph


# Tables -------------------------------------------------------------------------------------------------------------


def table(
    out: Tensor,
    ids: Mapping[str, Any],
    trained: Predictor,
    calibration: Calibration | None = None,
    level: float = 0.9,
) -> Any:
    """Return a frame with a row for each row of the outputs `[S, n, K]` of S models, which `ids` names.

    With `calibration`, it has calibrated probabilities, and sets or intervals of this level.
    """
    objective, preparation = trained.run_objective, cast(Preparation, trained.preparation)
    values = objective.predictions(out)
    values = values if values.dim() == 3 else values[..., None]
    mean = values[0] if len(values) == 1 else values.mean(0)
    columns, target, names = dict(ids), _target(preparation), _columns(objective, preparation)
    if objective.column == "class":
        name, classes = target[0] if target else "class", preparation.class_names or range(objective.out_channels)
        columns[name] = [classes[k] for k in mean.argmax(1).tolist()]
        if calibration is not None:
            chosen, mean = calibration.sets(mean, level), calibration.probabilities(mean)
            best = [[k for k in order if row[k]] for order, row in zip(_order(mean), chosen.tolist(), strict=True)]
            columns[f"{name}_set"] = [" | ".join(str(classes[k]) for k in its) for its in best]
    columns |= dict(zip(names, mean.cpu().numpy().T, strict=True))
    if calibration is not None and objective.column != "class":
        for end, limits in zip(("low", "high"), calibration.interval(mean, level), strict=True):
            columns |= {f"{name}_{end}": column for name, column in zip(names, limits.cpu().numpy().T, strict=True)}
    if len(values) > 1:
        spread = values.std(0).cpu().numpy().T
        columns |= {f"{name}_std": column for name, column in zip(names, spread, strict=True)}
    return needs("pandas", "tables").DataFrame(columns)


def _order(values: Tensor) -> list[list[int]]:
    order: list[list[int]] = values.argsort(1, descending=True).tolist()
    return order


def _columns(objective: Objective, preparation: Preparation) -> list[str]:
    """Return the names of the columns with predictions."""
    if objective.item == "link":
        return ["probability"]
    K, names = objective.out_channels, list(preparation.class_names or ())
    if objective.column != "target":
        return [f"p_{name}" for name in names or range(K)]
    names = names or _target(preparation) or ["prediction"]
    return names if len(names) == K else [f"prediction_{k}" for k in range(K)]


def _target(preparation: Preparation) -> list[str]:
    """Return the names of the columns of the user's tables that are predicted, if any."""
    target: Any = (preparation.source or {}).get("target")
    target = target.get("names") if isinstance(target, Mapping) else target
    return [target] if isinstance(target, str) else list(target or [])


def writer(out: str | Path) -> Callable[[Any], None]:
    """Return the function that writes a frame to `out`, by its suffix.

    Raises:
        ValueError: for another suffix.
        ImportError: if the package is missing.
    """
    path = Path(out).expanduser()
    writers: dict[str, Callable[[Any, Path], object]] = {
        ".csv": lambda frame, file: frame.to_csv(file, index=False),
        ".parquet": lambda frame, file: frame.to_parquet(file, index=False),
        ".jsonl": lambda frame, file: frame.to_json(file, orient="records", lines=True, force_ascii=False),
    }
    if path.suffix not in writers:
        raise ValueError(f"{out} ends in {path.suffix!r}, expected {', '.join(writers)}.")
    needs("pandas", "tables")
    if path.suffix == ".parquet":
        needs("pyarrow", "tables")
    return lambda frame: write_whole(path, lambda file: writers[path.suffix](frame, file))
