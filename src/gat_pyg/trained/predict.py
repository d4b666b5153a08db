"""Predictions of a trained run: of graphs as a tensor, of files and tables as a table with the user's names."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from ..data.arrays.series import is_series
from ..data.reader import Rows
from ..data.tables.files import check_columns
from ..data.tables.programs import is_graph
from ..files import needs, write_whole
from ..tasks.node_ids import num_nodes
from ..tasks.objective import Objective, any_known
from .top_links import top_links
from .trained import Seed, Trained, labels_of, without_labels
from .uncertainty import Calibration, calibration_of


@torch.no_grad()
def predict(
    run_dir: str | Path,
    data: Any = None,
    out: str | Path | None = None,
    *,
    seed: Seed = None,
    model: nn.Module | None = None,
    top_k: int | None = None,
    level: float | None = None,
    keep: Sequence[str] = (),
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
    begins with the names in the user's files, or with numbers of nodes, pairs or graphs. Edges and molecules of tables
    begin with `row`, the number of their row, from 0; `keep` adds columns of the table. A molecule that was left out
    has a row without predictions, and the reason in the column `left_out`. Then come the class and the
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

    `attrs["warning"]` of any table has a warning if the test score of the run is worse than that of a baseline.

    Args:
        run_dir: the folder of a run, or of the runs of several seeds.
        data: graphs, or the path of a file, several paths or frames.
        out: a file to write the table to: `.csv`, `.parquet`, or `.jsonl` for JSON lines. It appears as a whole.
        seed: seed of the model to load, if the run has several; or `"all"`.
        model: as in `load`.
        top_k: the number of most probable new links of each node, instead of a row for each pair.
        level: the share of labels that sets and intervals are to hold: 0.01, 0.02, ... or 0.99.
        keep: columns of the table of the predicted rows that the result has too.
        trust: build whatever the folder's settings name, as in your own runs, not only classes of gat_pyg, PyG and OGB.
            It matters if the run's own data are read.

    Raises:
        FileNotFoundError, ValueError: as `load` and `read_rows`; for what training refuses: other dimensions than the
            run's, features that are NaN or infinite, ids that are no node, a graph without nodes that is to have a row;
            if the run's preparation is missing or cannot be applied; if `out` ends in something else; for a
            column of `keep` that is not in the table; for another `level`, or if the run predicts several labels of a
            row, or links.
        ImportError: if a package for tables is missing.

    Warns if features seem to be prepared differently, have categories that training did not have, or are not read.

    >>> predict("nowhere", Data())
    Traceback (most recent call last):
    FileNotFoundError: nowhere is not a run folder: it does not exist. Give the folder that a run printed at its end.
    """
    write = None if out is None else writer(out)
    trained = Trained.open(run_dir, seed, model, trust)
    if write is None and top_k is None and level is None and not is_tabular(data):
        values = trained.objective.predictions(trained.outputs(data))
        mean = values[0] if len(values) == 1 else values.mean(0)
        is_of_steps = is_series(data) and trained.objective.item != "graph"
        return mean.unflatten(0, (len(data.x), -1)) if is_of_steps else mean
    calibration = None if level is None else calibration_of(trained)
    if top_k is not None:
        frame = top_links(trained, data, top_k)
    else:
        rows = selected(trained, data)
        frame = table(trained, rows, keep, calibration, level or 0.9)
    frame.attrs |= {"warning": trained.warning} if trained.warning else {}
    if write is not None:
        write(frame)
    if calibration is not None and level is not None:
        frame.attrs["uncertainty"] = calibration.text(level)
    return frame


def is_tabular(data: Any) -> bool:
    """Return True for None, a path, a frame, a graph of networkx, or several of these: what is not graphs of PyG."""
    items = data if isinstance(data, (list, tuple)) and data else [data]
    return all(
        one is None or isinstance(one, (str, Path, Mapping)) or hasattr(one, "columns") or is_graph(one)
        for one in items
    )


# Rows of files and tables -------------------------------------------------------------------------------------------


class Selected(NamedTuple):
    """Graphs, a mask of the chosen rows of each, and the columns that name the chosen rows."""

    graphs: list[Data]
    chosen: list[Tensor]
    ids: dict[str, Any]
    table: Any = None  # the user's table, of which the chosen rows have these numbers
    numbers: Sequence[int] = ()
    left_out: Mapping[int, str] = {}  # other rows of the table, with the reason

    def outputs(self, trained: Trained) -> Tensor:
        """Return the outputs of the chosen rows, as `Trained.outputs`; graphs without one are not computed."""
        graphs = [graph for graph, chosen in zip(self.graphs, self.chosen, strict=True) if chosen.any()]
        kept = torch.cat([chosen for chosen in self.chosen if chosen.any()])
        out = trained.outputs(graphs if len(graphs) > 1 else graphs[0], is_read=True)
        return out if bool(kept.all()) else out[:, kept]


def selected(trained: Trained, data: Any) -> Selected:
    """Return the rows of data without a label, or else all; of a run's own data, or else those of the test.

    Raises:
        ValueError: if there is no row.
    """
    objective = trained.objective
    if data is None and objective.draws_pairs:
        return _test_pairs(trained)
    rows: Rows = trained.read(data)
    known = [labels_of(graph, objective) for graph in rows.graphs]
    every = [torch.ones(_size(graph, objective), dtype=torch.bool) for graph in rows.graphs]
    chosen = [mask if y is None else ~any_known(y) for mask, y in zip(every, known, strict=True)]
    if not any(bool(mask.any()) for mask in chosen):  # all labels are known
        chosen = every if data is not None else _test_of(trained, every)
    index = torch.cat(chosen).nonzero().flatten().tolist()
    if not index:
        raise ValueError("The data have no row to predict, expected at least one.")
    ids = {
        name: [column[row] for row in index] for name, column in (rows.ids or _numbers(rows.graphs, objective)).items()
    }
    numbers = [rows.numbers[row] for row in index] if rows.numbers is not None else index
    if rows.table is not None and objective.item != "node":
        ids = {"row": numbers, **ids}
    graphs, left_out = trained.without_labels(rows, data), {} if data is None else rows.left_out
    return Selected(graphs, chosen, ids, rows.table, numbers, left_out)


def _test_pairs(trained: Trained) -> Selected:
    """Return the links and the other pairs of the test."""
    objective, source = trained.objective, trained.source
    graph = without_labels(objective.example(trained.task.test[0], "test"))
    ids = _numbers([graph], objective)
    if (names := trained.node_ids) is not None:
        ids = {source.get(end) or end: [names[node] for node in nodes] for end, nodes in ids.items()}
    return Selected([graph], [torch.ones(objective.size(graph), dtype=torch.bool)], ids)


def _test_of(trained: Trained, every: list[Tensor]) -> list[Tensor]:
    """Return the masks of the test rows, for masks of all rows."""
    task = trained.task
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


# Tables -------------------------------------------------------------------------------------------------------------


def table(
    trained: Trained,
    rows: Selected,
    keep: Sequence[str] = (),
    calibration: Calibration | None = None,
    level: float = 0.9,
) -> Any:
    """Return a frame with a row for each of the selected rows, and for those that were left out.

    With `calibration`, it has calibrated probabilities, and sets or intervals of this level.

    Raises:
        ValueError: if a column of `keep` is not in the user's table, or two columns have the same name.
    """
    pd = needs("pandas", "tables")
    objective, preparation, names = trained.objective, trained.preparation, trained.columns
    values = objective.predictions(rows.outputs(trained))
    values = values if values.dim() == 3 else values[..., None]
    mean = values[0] if len(values) == 1 else values.mean(0)
    columns: list[tuple[str, Any]] = []
    if objective.column == "class":
        name = trained.targets[0] if trained.targets else "class"
        classes = preparation.class_names or range(objective.out_channels)
        columns.append((name, [classes[k] for k in mean.argmax(1).tolist()]))
        if calibration is not None:
            chosen, mean = calibration.sets(mean, level), calibration.probabilities(mean)
            order = mean.argsort(1, descending=True).tolist()
            best = [[k for k in its if row[k]] for its, row in zip(order, chosen.tolist(), strict=True)]
            columns.append((f"{name}_set", [" | ".join(str(classes[k]) for k in its) for its in best]))
    columns += zip(names, mean.cpu().numpy().T, strict=True)
    if calibration is not None and objective.column != "class":
        for end, limits in zip(("low", "high"), calibration.interval(mean, level), strict=True):
            columns += zip((f"{name}_{end}" for name in names), limits.cpu().numpy().T, strict=True)
    if len(values) > 1:
        columns += zip((f"{name}_std" for name in names), values.std(0).cpu().numpy().T, strict=True)
    keep = [name for name in keep if name not in rows.ids]
    if keep and rows.table is None:
        raise ValueError(f"keep is {', '.join(keep)}, but the rows are of no table: only tables have such columns.")
    check_columns([rows.table], keep)
    columns = [*rows.ids.items(), *((name, rows.table[name].iloc[rows.numbers].to_numpy()) for name in keep), *columns]
    every = pd.Index([name for name, _ in columns])
    if every.has_duplicates:
        raise ValueError(
            f"The predictions would have two columns called {every[every.duplicated()][0]}. Rename this column, target "
            "or class in the data of the run, leave it out of keep, or choose one seed, whose table has no _std."
        )
    frame = pd.DataFrame(dict(columns))
    if not rows.left_out:
        return frame
    out = [*rows.left_out]
    shown = [name for name in (*rows.ids, *keep) if name in rows.table]
    others = pd.DataFrame({"row": out, **{name: rows.table[name].iloc[out].to_numpy() for name in shown}})
    others["left_out"] = [*rows.left_out.values()]
    return pd.concat([frame.set_axis(rows.numbers), others.set_axis(out)]).sort_index().reset_index(drop=True)


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
