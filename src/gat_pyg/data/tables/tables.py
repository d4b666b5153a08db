"""Tables of nodes and edges as tasks, and later tables of the same form."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import coalesce, is_undirected

from ...tasks.metrics import LINKS, TASKS
from ...tasks.node_ids import node_ids
from ...tasks.objective import MASKS, Objective, any_known
from ...tasks.objectives import objective_for
from ...tasks.task import Task
from ..arrays.from_pyg import name_of_file
from ..links import divided_links, link_task
from ..reader import Reader, Rows
from ..splits import check_classes, draw_masks
from .choice import check_columns, warn_of_header
from .columns import Features, missing_column
from .files import file_of, frame_of, unnamed
from .graph import DEGREES, LEARNT, Tables, are_several, ends_of, read_tables, with_degrees
from .ids import presented, read_ids
from .programs import is_graph
from .split_columns import masks_by_column, masks_by_time, warn_of_splits
from .targets import Targets

LISTED = 8  # columns whose names a note lists; of more it has the number


def tables(
    nodes: Any = None,
    edges: Any = None,
    target: str | Sequence[str] | None = None,
    id: str | None = None,
    src: str | None = None,
    dst: str | None = None,
    ignore: Sequence[str] = (),
    categories: Sequence[str] = (),
    missing: Sequence[Any] = (),
    undirected: bool = True,
    bipartite: bool | None = None,
    disjoint: float = 0.0,
    per_class: int | None = None,
    val: int | None = None,
    test: int | None = None,
    seed: int = 0,
    column: str | None = None,
    time: str | None = None,
    task: str | None = None,
    name: str | None = None,
    graph: Any = None,
    matrix: str | None = None,
    like: Mapping[str, Any] | None = None,
) -> Task:
    """Convert tables of nodes and edges to a task: classes or regression targets of nodes or edges, or links.

    A table is a CSV, TSV or Parquet file, a pandas frame, or a list of files with the same columns. Each row of `nodes`
    has an id and features; without it, the ids in `edges` are the nodes, whose embeddings are learnt
    (`gat_pyg.models.Encoded`). Each row of `edges` has its two ends and features. Rows with the same ends are edges of
    their own, except for links.

    The training rows decide if a column has numbers, categories or dates: rows of nodes if their labels are to be
    predicted, rows of edges if theirs are, else all (`gat_pyg.data.tables.columns.Features`). This and the encoding are
    part of the task's `source`, by which `gat_pyg.data.rows.read_rows` reads later tables, each row by itself: ids may
    be others, columns in another order. The first of `notes` names the columns with their uses.

    Args:
        nodes, edges: the tables.
        target: the column to predict, of nodes or else of edges; several columns are several labels or targets. An
            empty value is unknown. Texts and whole numbers are classes (`gat_pyg.data.tables.targets.Targets`). None:
            links.
        id: the column of nodes with their ids; by default `id`, `node` or the like, the word that both ends share, the
            only one that has the ids of all ends, or the first one with a name.
        src, dst: the columns of edges with their ends; by default two with usual names, such as `src` and `dst`,
            `from_account` and `to_account` or `user` and `item`, or the only two. Ids are text: 7.0 is 7 if all ids are
            whole numbers, and 007 is not.
        ignore: columns that are left out.
        categories: columns of numbers that are categories, such as codes, and a target of classes.
        missing: values that are missing or unknown in all columns but ids, such as `unknown` or -1.
        undirected: messages pass in both directions. The features of a reverse edge have a further column, which is 1.
        bipartite: True if `src` and `dst` are ids of two kinds, such as users and items, False if they are of one;
            None: True if no id is in both columns. If True, `nodes` may be a list of two tables, of `src` and of
            `dst`, whose columns then have names such as `user.age`.
        disjoint, per_class, val, test, seed: arguments of a random split, as in `gat_pyg.data.from_dataset`.
        column: the column with the split of each row, train, val or test.
        time: a column of dates or numbers: the earliest rows are for training, the latest for the test.
        task: `node_`, `edge_` with `classification` or `regression`, or `link_prediction`, as in `from_dataset`.
        name: name of the task; by default the file's name, or the name of the folder of nodes.csv or edges.csv.
        graph: a file with a graph, a graph of networkx or a matrix of scipy.sparse, in place of `edges`, and of `nodes`
            unless they are given too: see `gat_pyg.data.tables.programs.graph_tables`. A matrix of a `.mat` file with a
            row for each node is a target by its key. `undirected` is of directed graphs.
        matrix: the key of the matrix of edges in a `.mat` file.
        like: the `source` of an earlier task, whose encodings, classes and names of columns are kept.

    Raises:
        FileNotFoundError, ValueError: if a table cannot be read, lacks a column, or has an id twice or an edge without
            one of its nodes; the message names the file, the row and the column.
        ImportError: if pandas is not installed.

    Example:
        >>> import pandas as pd
        >>> nodes = pd.DataFrame({"id": list("abcdef"), "age": [1, 2, 3, 4, 5, 6], "fraud": ["no", "yes"] * 3})
        >>> edges = pd.DataFrame({"src": list("abcde"), "dst": list("bcdef")})
        >>> task = tables(nodes, edges, "fraud", per_class=1, val=2, test=2)
        >>> task, task.class_names
        (Task(name='tables', num_features=2, objective=NodeLabels(out_channels=2), edge_dim=None), ('no', 'yes'))
    """
    if graph is not None and edges is not None:
        raise ValueError("graph and edges are two sets of edges. Leave one of them out.")
    edges = edges if graph is None else graph
    source: dict[str, Any] = {
        "_target_": "gat_pyg.data.tables",
        **{"nodes": _path(nodes), "edges": _path(edges)},
        **{"id": id, "src": src, "dst": dst, "bipartite": bipartite, "matrix": matrix, "missing": [*map(str, missing)]},
    }
    if like is not None:
        source |= {key: like[key] for key in ("id", "src", "dst", "bipartite", "matrix", "ids", "both") if key in like}
        source["missing"] = [*like.get("missing", ())]
    used = (*([target] if isinstance(target, str) else target or ()), *ignore, column, time)
    of = read_tables(nodes, edges, source, used)
    warn_of_header(of.edges, [source["src"], source["dst"]])
    if of.nodes is not None and not source["are_two"]:
        warn_of_header(of.nodes, [source["id"]])
    targets, ignore, categories = (_names(names, of) for names in (target, ignore, categories))
    item, goal = _item(of, targets, task)
    of = with_degrees(of) if item == "node" else of
    name = name or name_of_file(source["nodes"] or source["edges"] or "tables")
    check_columns([of.nodes, of.edges], [*ignore, *categories])
    labels = _labels(of.of(item), item, goal, targets, categories, source["missing"], like, name)
    if labels is not None:
        source["target"] = labels.describe()
    sizes = {"per_class": per_class, "val": val, "test": test, "seed": seed}
    masks, drawn = _masks(of, labels, column, time, sizes, name)
    undirected = undirected or "both" in source
    source["reverse"] = undirected and (item == "link" or not is_undirected(of.edge_index, num_nodes=len(of.ids)))
    train = {"edge" if item == "link" else item: masks["train_mask"].numpy()} if masks else {}
    fitted = _fit(of, source, train, {*ignore, *targets, column, time}, categories, like)
    if labels is not None and item in train and like is None:
        labels.targets.warn_of_copies(of.of(item), fitted[item].columns, labels.y, train[item])
    source["columns"] = {item: features.columns for item, features in fitted.items()}
    uses = {"target": ", ".join(targets), "split": column, "time": time}
    notes = [f"{name}: {note}" for note in _notes(of, source, labels, uses, fitted)]
    if not source["columns"].get("node"):
        source["ids"] = [side.tolist() for side in of.sides]
    x, edge_attr = _features(of, source, is_later=like is not None)
    if labels is None and masks:
        if disjoint:
            raise ValueError(
                f"{name}: disjoint={disjoint} divides links at random, but a column divides them. Omit it."
            )
        links = divided_links(Data(x, of.edge_index, edge_attr), masks, undirected, name, seed, drawn)
        return links.read_from(source, notes)
    data = _graph(of, source, x, edge_attr)
    if labels is None:
        return link_task([[data]], name, val, test, seed, 0, (), disjoint).read_from(source, notes)
    data.update({"y": labels.y, **masks})
    D = None if data.edge_attr is None else data.edge_attr.size(1)
    result = Task(name, [data], [data], [data], x.size(1), labels.objective, D, labels.names, (), 1, drawn)
    check_classes(result)
    return result.read_from(source, notes)


from_pandas = tables  # the same with frames


def from_networkx(graph: Any, target: str | Sequence[str] | None = None, **options: Any) -> Task:
    """Convert a graph of networkx to a task, as `tables` with this graph.

    Args:
        graph: graph with attributes of nodes and edges as features; a node may lack some.
        target: the attribute to predict, of nodes or else of edges; several are several labels or targets. None:
            links.
        **options: other arguments of `tables`, such as `ignore`, `categories`, `val` or `name`.

    Raises:
        ValueError: as `tables`.
        ImportError: if pandas is not installed.

    Example:
        >>> import networkx as nx
        >>> from_networkx(nx.karate_club_graph(), "club", name="karate").class_names
        ('Mr. Hi', 'Officer')
    """
    return tables(graph=graph, target=target, **options)


def rows_of(source: Mapping[str, Any], data: Any = None) -> Rows:
    """Return the graph of later tables, and the columns with the ids of the rows that are to be predicted.

    Args:
        source: `Task.source` of the run.
        data: the table of nodes or that of edges, or both in any order, as paths or frames, or a mapping with the keys
            `nodes` and `edges`. A table that is left out is that of the task. If links are to be predicted, a table of
            edges has the pairs, and a first one of two has the known links.

    Raises:
        ValueError: as `tables`, or if a table is neither that of nodes nor that of edges.
    """
    source, (tables, frames) = dict(source), _by_kind(source, data)
    passed = {*tables}  # the tables in `data`
    for key in ("node", "edge"):
        if key == "node" and source["nodes"] is None and is_graph(tables.get("edge", source["edges"])):
            continue  # the nodes are in the graph
        if key in source["columns"] and key not in tables:
            if source[f"{key}s"] is None:
                raise ValueError(f"The {key}s of the run were a frame, which it does not keep. Give their table too.")
            tables[key] = source[f"{key}s"]
    try:
        of = read_tables(tables.get("node"), tables["edge"], source)
    except ValueError as error:
        if tables["edge"] is not source["edges"] or "node" not in passed:
            raise
        raise ValueError(
            f"{error} These are the edges of the training. For other nodes, give their edges, too."
        ) from error
    of = with_degrees(of) if {*DEGREES} & {*source["columns"].get("node", ())} else of
    graph, target = _graph(of, source, *_features(of, source)), source.get("target")
    if target is None and "pairs" in tables:
        pairs = frame_of(tables["pairs"], "pairs")
        check_columns([pairs], [source["src"], source["dst"]])
        ends = read_ids([(pairs, source["src"]), (pairs, source["dst"])], "Each pair needs both ends.", of.ids)
        graph.edge_label_index = ends_of(ends, of.sides, LEARNT if "ids" in source else "the nodes")
        names: dict[str, Sequence[Any]] = {end.name: presented([*end.of_rows], pairs, end.name) for end in ends}
        return Rows([graph], names, frames.get("pairs", pairs))
    item = "node" if target is None else target["item"]
    frame, order = of.of(item), of.order if item == "node" else None
    if target is not None and all(name in frame.columns for name in target["names"]):
        y = Targets(target["names"], target["classes"], source["missing"])(frame)
        (graph.y,) = objective_for([y], item, target["goal"]).convert([y], file_of(frame))
    if item in frames:
        return Rows([graph], of.names(item, source), frames[item], None if order is None else order.tolist())
    return Rows([graph], of.names(item, source), frame)


def _by_kind(source: Mapping[str, Any], data: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return later tables by their kind: node, edge or pairs; and the user's frames among them."""
    selected: dict[str, Any] = {}
    if isinstance(data, Mapping):
        known = {"nodes": "node", "edges": "edge", "pairs": "pairs"}
        if other := data.keys() - known.keys():
            raise ValueError(f"data has the key {min(other)}, expected some of {', '.join(known)}.")
        selected = {known[key]: table for key, table in data.items()}
        return selected, {key: table for key, table in selected.items() if hasattr(table, "columns")}
    several = [] if data is None else list(data) if isinstance(data, (list, tuple)) else [data]
    if len(several) == 1 and is_graph(several[0]):
        return {"edge": several[0]}, {}
    tables: dict[str, Any] = {}
    kinds = ["edge", "pairs"] if source.get("target") is None else ["edge"]
    frames = [frame_of(table, "data") for table in several]  # which are read once
    of_edges = [{source["src"], source["dst"]} <= {*frame.columns} for frame in frames]
    kinds = kinds[-1:] if sum(of_edges) == 1 else kinds
    for table, frame, is_of_edges in zip(several, frames, of_edges, strict=True):
        kind = kinds.pop(0) if is_of_edges and kinds else "node"
        if kind == "node" and source.get("are_two", False):
            tables.setdefault(kind, []).append(frame)
            continue
        if kind == "node" and (kind in tables or source["id"] not in frame.columns):
            shared = [len({*frame.columns} & {*source["columns"].get(item, ())}) for item in ("node", "edge")]
            is_of_nodes = source["id"] is not None and shared[0] + (kind not in tables) > shared[1]
            raise missing_column([frame], source["id"] if is_of_nodes else source["src"])
        tables[kind] = frame
        if hasattr(table, "columns"):
            selected[kind] = table
    return tables, selected


# Labels and splits ----------------------------------------------------------------------------------------------------


class Labels(NamedTuple):
    """The labels of a table's rows, which are nodes or edges."""

    targets: Targets
    y: Tensor  # [n] or [n, K]
    objective: Objective

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the outputs: of classes, labels or targets."""
        return tuple(self.targets.classes or self.targets.names)

    def describe(self) -> dict[str, Any]:
        """Return plain data by which `rows_of` reads later labels."""
        item, goal = self.objective.item, self.objective.goal
        return {"item": item, "goal": goal, "names": self.targets.names, "classes": self.targets.classes}


def _labels(
    frame: Any,
    item: str,
    goal: str | None,
    names: Sequence[str],
    categories: Sequence[str],
    missing: Sequence[str],
    like: Mapping[str, Any] | None,
    name: str,
) -> Labels | None:
    """Return the labels in the columns `names`, with the classes of `like` if any; None for links.

    Raises:
        ValueError: if none is known, a value cannot be meant, or the earlier task predicts something else.
    """
    if item == "link":
        if like is not None and (earlier := like.get("target")) is not None:
            predicted = " and ".join(earlier["names"])
            raise ValueError(f"{name}: the earlier run predicts {predicted}. Choose the same target.")
        return None
    targets = Targets.fit(frame, names, goal, categories, missing) if like is None else Targets.like(like, names)
    y = targets(frame)
    if not any_known(y).any():
        raise ValueError(f"{file_of(frame)}: {' and '.join(names)} is empty in all rows, expected known values.")
    kind = objective_for([y], item, goal)
    (y,) = kind.convert([y], name)
    objective = kind.for_labels([y], name)
    if like is not None and targets.classes is not None:
        objective = kind(len(targets.classes))
    return Labels(targets, y, objective)


def _masks(
    of: Tables, labels: Labels | None, column: str | None, time: str | None, sizes: Mapping[str, Any], name: str
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the masks of the rows by a column, by a time, or drawn, and the arguments that they depend on.

    Without column and time, there are none for links, which `link_task` draws.
    """
    item = "link" if labels is None else labels.objective.item
    frame = of.of(item)
    known = torch.ones(len(frame), dtype=torch.bool) if labels is None else any_known(labels.y)
    if column is not None:
        return masks_by_column(frame, column, known, sizes["val"], sizes["seed"])
    if time is not None:
        return masks_by_time(frame, time, known, sizes["val"], sizes["test"])
    if labels is None:
        return {}, ()
    data = Data(y=labels.y, edge_label_index=of.edge_index if item == "edge" else None)
    drawn = draw_masks(data, labels.objective, **sizes, name=name)
    return {key: data[key] for key in MASKS}, drawn


# The graph ------------------------------------------------------------------------------------------------------------


def _fit(
    of: Tables,
    source: Mapping[str, Any],
    train: Mapping[str, Any],
    left_out: Collection[Any],
    categories: Sequence[str],
    like: Mapping[str, Any] | None,
) -> dict[str, Features]:
    """Return the features of the tables of nodes and edges, with the encodings of `like` if any.

    `train` has the training rows of a table whose rows are split.
    """
    fitted = {}
    for item, ends in (("node", [source["id"]]), ("edge", [source["src"], source["dst"]])):
        if (frame := of.of(item)) is None:
            continue
        names = [name for name in frame.columns if name not in left_out and name not in ends and not unnamed(name)]
        reasons = {name: "it has no name" for name in frame.columns if unnamed(name)}
        if like is not None:
            if item not in like["columns"]:
                raise ValueError(f"{file_of(frame)} is a table of {item}s, which the earlier run did not have.")
            columns = like["columns"][item]
            reasons |= {name: "no feature of the earlier run" for name in names if name not in columns}
            fitted[item] = Features(columns, reasons, source["missing"])
            continue
        splits = warn_of_splits(frame, [name for name in names if name not in categories])
        names = [name for name in names if name not in splits]
        rows = train.get(item, np.ones(len(frame), bool))
        features = Features.fit(frame, names, rows, categories, source["missing"])
        for degree in {*DEGREES} & features.columns.keys():
            del features.columns[degree]["range"]
        features.left_out = reasons | dict.fromkeys(splits, "a split") | features.left_out
        fitted[item] = features
    return fitted


def _notes(
    of: Tables,
    source: Mapping[str, Any],
    labels: Labels | None,
    uses: Mapping[str, str | None],
    fitted: Mapping[str, Features],
) -> Iterator[str]:
    """Yield notes on the uses of columns, on values that are missing or not read, and on the direction of messages."""
    ends = [*dict.fromkeys(f"{end.name} of {file_of(end.frame)}" for end in of.ends)]
    parts = [] if of.nodes is None else [f"ids {source['id']} of {file_of(of.nodes)}"]
    parts += [f"ends {' and '.join(ends)}", *(f"{use} {name}" for use, name in uses.items() if name)]
    for item, features in fitted.items():
        own = [name for name in features.columns if name not in DEGREES]
        names = [*own] if len(own) <= LISTED else [f"{len(own)} columns"]
        names += ["the numbers of edges from and to each"] * (len(own) < len(features.columns))
        parts += [f"{features.size} feature{'s' * (features.size != 1)} of {item}s: {', '.join(names)}"] * bool(names)
    yield "; ".join(parts)
    for item, features in fitted.items():
        reasons = [f"{name} ({why})" for name, why in features.left_out.items() if name not in DEGREES]
        others = f" and {len(reasons) - LISTED} others" * (len(reasons) > LISTED)
        if reasons:
            yield f"left out of {file_of(of.of(item))}: {', '.join(reasons[:LISTED])}{others}"
        for name, counts in features.spellings.items():
            yield f"{name} is missing where it is {', '.join(f'{text!r} ({n:,})' for text, n in counts.items())}"
        yield from of.of(item).attrs.get("notes", ())
    if labels is not None and (note := labels.targets.note(labels.y, labels.objective.item)):
        yield note
    if source["reverse"] and "both" not in source:
        yield "messages pass over each edge in both directions, as dataset.undirected=true"


def _features(of: Tables, source: Mapping[str, Any], is_later: bool = True) -> tuple[Tensor, Tensor | None]:
    """Return the features of the nodes [N, F], without any their numbers, and of the rows of edges [M, D] or None."""
    nodes, edges = (Features(source["columns"].get(item) or {}, missing=source["missing"]) for item in ("node", "edge"))
    x = nodes(of.nodes, is_later) if nodes.columns else node_ids(len(of.ids))
    return x, edges(of.edges, is_later) if edges.columns else None


def _graph(of: Tables, source: Mapping[str, Any], x: Tensor, edge_attr: Tensor | None) -> Data:
    """Return the graph, and the edges as pairs with features if their labels are to be predicted.

    In place of edges, links are there once in each direction, with the mean of their features.
    """
    target, edge_index, data = source.get("target"), of.edge_index, Data(x)
    if target is not None and target["item"] == "edge":
        data.edge_label_index = edge_index
        if edge_attr is not None:
            data.edge_label_attr = edge_attr
    if target is None:
        pairs = edge_index.sort(0).values if source["reverse"] else edge_index
        edge_index, edge_attr = coalesce(pairs, edge_attr, reduce="mean")
    if source["reverse"]:
        E, is_way = edge_index.size(1), edge_index[0] != edge_index[1]  # a loop is its own reverse
        edge_index = torch.cat([edge_index, edge_index[:, is_way].flip(0)], 1)
        edge_attr = None if edge_attr is None else torch.cat([edge_attr, edge_attr[is_way]])
        if edge_attr is not None and target is not None and "both" not in source:
            is_reverse = torch.arange(edge_index.size(1)) >= E
            edge_attr = torch.cat([edge_attr, is_reverse[:, None].to(edge_attr.dtype)], 1)
    data.edge_index, data.edge_attr = edge_index, edge_attr
    return data


# Messages -------------------------------------------------------------------------------------------------------------


def _item(of: Tables, targets: Sequence[str], task: str | None) -> tuple[str, str | None]:
    """Return what is to be predicted, node, edge or link, and classification, regression or None."""
    if task not in (None, *TASKS) or str(task).startswith("graph_"):
        raise ValueError(f"task is {task}, but tables are one graph. Choose a task of nodes, edges or links.")
    if not targets or task == LINKS:
        if targets or task not in (None, LINKS):
            needed = "no target" if targets else "target, the column with the labels"
            raise ValueError(f"task={task} needs {needed}. To predict links, choose task={LINKS} without a target.")
        return "link", None
    only, _, goal = (task or "").partition("_")
    for item in ("node", "edge"):
        frame = of.of(item)
        if only in ("", item) and frame is not None and {*targets} <= {*frame.columns}:
            return item, goal or None
    tables = [of.of(only)] if only else [of.nodes, of.edges]
    check_columns(tables, targets)
    raise ValueError(f"The columns {', '.join(targets)} are in two tables, expected those of nodes or those of edges.")


def _names(names: Any, of: Tables) -> list[str]:
    """Return the names of columns in a list; the key of a matrix stands for its columns key.0, key.1, ..."""
    listed = [] if names is None else [names] if isinstance(names, str) else list(names)
    columns = [*(() if of.nodes is None else of.nodes.columns), *of.edges.columns]
    parts = {name: [column for column in columns if column.startswith(f"{name}.")] for name in listed}
    return [part for name in listed for part in ([name] if name in columns else parts[name] or [name])]


def _path(table: Any) -> Any:
    """Return the path or the paths of a table as plain data; None for a frame."""
    if isinstance(table, (str, Path)):
        return str(table)
    are_paths = are_several(table) and all(isinstance(path, (str, Path)) for path in table)
    return [str(path) for path in table] if are_paths else None


TABLES = Reader(("gat_pyg.data.tables",), ("nodes", "edges", "graph"), rows_of)
