"""Tables of nodes and edges as tasks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data
from torch_geometric.utils import is_undirected

from ...tasks.metrics import LINKS
from ...tasks.objective import MASKS, any_known
from ...tasks.objectives import TASKS
from ...tasks.task import Task
from ..arrays.from_pyg import from_dataset
from ..links import divided_links, link_task
from ..reader import name_of_file
from ..splits import check_classes, draw_masks
from .features import Features
from .files import check_columns, file_of, path_of
from .graph import DEGREES, Tables, read_tables, rows_graph, with_messages
from .many import divided, drawn_masks, read_graphs
from .programs import are_graphs
from .roles import Roles, are_of_one_kind, have_no_direction, warn_of_header
from .split_columns import masks_of_rows, times_of
from .targets import Labels

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
    undirected: bool | None = None,
    bipartite: bool | None = None,
    disjoint: float = 0.0,
    negatives: str = "auto",
    per_class: int | None = None,
    val: int | None = None,
    test: int | None = None,
    seed: int = 0,
    column: str | None = None,
    time: str | None = None,
    task: str | None = None,
    positive: str | None = None,
    name: str | None = None,
    graph: Any = None,
    matrix: str | None = None,
    graphs: Any = None,
    folds: int | str | Path | None = None,
    fold: int = 0,
    like: Mapping[str, Any] | None = None,
) -> Task:
    """Convert tables to a task: classes or regression targets of nodes, edges or many graphs, or links.

    A table is a CSV, TSV or Parquet file, a pandas frame, or a list of files with the same columns. Each row of `nodes`
    has an id and features; without it, the ids in `edges` are the nodes, whose embeddings are learnt
    (`gat_pyg.models.Encoded`). Each row of `edges` has its two ends and features. Rows with the same ends are edges of
    their own, except for links.

    The training rows decide if a column has numbers, categories or dates: rows of nodes if their labels are to be
    predicted, rows of edges if theirs are, else all (`gat_pyg.data.tables.features.Features`). This and the encoding
    are part of the task's `source`, by which `gat_pyg.data.rows.read_rows` reads later tables, each row by itself: ids
    may be others, columns in another order. The first of `notes` names the columns with their uses.

    Args:
        nodes, edges: the path of each table, such as nodes.csv, a list of paths, or a frame.
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
        undirected: True: edges have no direction, so it does not matter which end is which. False: messages follow the
            direction. None: they pass in both, and the features of a reverse edge have a further column, which is 1; of
            ends with names such as `node1` and `node2`, as True.
        bipartite: True if `src` and `dst` are ids of two kinds, such as users and items, False if they are of one;
            None: True if no id is in both columns. If True, `nodes` may be a list of two tables, of `src` and of
            `dst`, whose columns then have names such as `user.age`.
        disjoint: of links, the share of the training links that are predicted and pass no messages.
        per_class, val, test, seed: arguments of a random split, as in `gat_pyg.data.from_dataset`.
        negatives: of links, how pairs without a link are drawn: as `LinkLabels`, by default with the same user and
            other items where users and items are two kinds.
        column: the column with the split of each row, train, val or test.
        time: a column of dates or numbers: the earliest rows are for training, the latest for the test.
        task: `node_`, `edge_` with `classification` or `regression`, or `link_prediction`, as in `from_dataset`.
        positive: the positive one of two classes, which becomes class 1: average precision is that of this class. By
            default the second, or the first if it has a name and less than 30 % of the training rows.
        name: name of the task; by default the file's name, or the name of the folder of nodes.csv or edges.csv.
        graph: a file with a graph, a graph of networkx or a matrix of scipy.sparse, in place of `edges`, and of `nodes`
            unless they are given too: see `gat_pyg.data.tables.programs.graph_tables`. A matrix of a `.mat` file with a
            row for each node is a target by its key. `undirected` is of directed graphs.
        matrix: the key of the matrix of edges in a `.mat` file.
        graphs: of many graphs, a table with a row for each: its id, its labels and features. Rows of `nodes` and
            `edges` have the id of their graph: see `gat_pyg.data.tables.many.read_graphs`. With `graph`, the ids are
            names of files. Without it, `graph` may be many graphs whose attributes are the columns, such as a folder.
        folds, fold: of many graphs, as in `from_dataset`.
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
    are_many = graphs is not None or are_graphs(edges)
    missing = [*map(str, missing)]
    roles = Roles(id, src, dst, bipartite, matrix, missing=missing) if like is None else Roles.of(like)
    used = (*([target] if isinstance(target, str) else target or ()), *ignore, column, time)
    of = read_graphs(nodes, edges, graphs, roles, used) if are_many else read_tables(nodes, edges, roles, used)
    roles = of.roles
    warn_of_header(of.edges, [roles.src, roles.dst])
    if of.nodes is not None and not roles.are_two:
        warn_of_header(of.nodes, [roles.id])
    paths = {"nodes": path_of(nodes), "edges": path_of(edges)} | ({"graphs": path_of(graphs)} if are_many else {})
    name = name or name_of_file(paths["nodes"] or paths["edges"] or "tables")
    targets, ignore, categories = (_names(names, of) for names in (target, ignore, categories))
    check_columns([of.graphs, of.nodes, of.edges], [*ignore, *categories])
    item, goal = _item(of, targets, task)
    if like is None and not roles.bipartite:
        both = undirected or (undirected is None and have_no_direction(str(roles.src), str(roles.dst)))
        of = of._replace(roles=roles._replace(both=roles.both or bool(both)))
        roles = of.roles

    labels = None
    if item != "link":
        labels = Labels.fit(of.of(item), item, goal, targets, categories, like, name)
    elif like is not None and (earlier := like.get("target")) is not None:
        predicted = " and ".join(earlier["names"])
        raise ValueError(f"{name}: the earlier run predicts {predicted}. Choose the same target.")
    known = torch.ones(len(of.edges), dtype=torch.bool) if labels is None else any_known(labels.y)
    masks, drawn = masks_of_rows(of.of(item), known, column, time, val, test, seed)
    count = 1
    if labels is not None and item == "graph" and not masks:
        masks, drawn, count = drawn_masks(labels.y, known, val, test, seed, folds, fold, name)
    elif labels is not None and not masks:
        data = Data(y=labels.y, edge_label_index=of.edge_index if item == "edge" else None)
        drawn = draw_masks(data, labels.objective, per_class, val, test, seed, name)
        masks = {key: data[key] for key in MASKS}
    if labels is not None and like is None:
        labels = labels.with_positive(positive, masks["train_mask"])
    elif labels is not None and positive not in (None, labels.names[-1]):
        raise ValueError(f"dataset.positive is {positive}, but that of the earlier run is {labels.names[-1]}. Omit it.")

    of = of.with_degrees() if item in ("node", "graph") else of
    fitted: dict[str, Features] = {}
    for each, left_out in (("node", [roles.id]), ("edge", [roles.src, roles.dst]), ("graph", [])):
        if (frame := of.of(each)) is None:
            continue
        if like is not None and each not in like["columns"]:
            raise ValueError(f"{file_of(frame)} is a table of {each}s, which the earlier run did not have.")
        left_out = [*left_out, roles.graph_id, *ignore, *targets, column, time]
        names = [name for name in frame.columns if name not in left_out]
        is_split = masks and each == ("edge" if item == "link" else item)
        rows = masks["train_mask"].numpy() if is_split else np.ones(len(frame), bool)
        if item == "graph" != each:
            rows = masks["train_mask"].numpy()[of.graph_of(each)]
        earlier = None if like is None else like["columns"][each]
        fitted[each] = Features.of_table(frame, names, rows, categories, earlier)
        if labels is not None and is_split and like is None:
            labels.targets.warn_of_copies(frame, fitted[each].columns, labels.y, rows)
    for degree in {*DEGREES} & fitted.get("node", Features({})).columns.keys():
        fitted["node"].columns[degree].pop("range", None)

    undirected = undirected is not False or roles.both
    source: dict[str, Any] = {
        "_target_": "gat_pyg.data.tables",
        **paths,
        **roles.describe(),
        "reverse": undirected and (item == "link" or not is_undirected(of.edge_index, num_nodes=len(of.ids))),
        "columns": {each: features.columns for each, features in fitted.items()},
    }
    if labels is not None:
        source["target"] = labels.describe()
    if not source["columns"].get("node") and of.graphs is None:
        source["ids"] = [side.tolist() for side in of.sides]
    uses = {"target": ", ".join(targets), "split": column, "time": time}
    notes = [f"{name}: {note}" for note in _notes(of, source["reverse"], labels, uses, fitted)]
    if labels is not None and item == "graph":
        every = divided(of, source, like is not None, y=labels.y, **masks)
        every = [graph for graph, is_known in zip(every, known.tolist(), strict=True) if is_known]
        if len(every) < len(known):
            notes.append(f"{name}: {len(known) - len(every):,} of {len(known):,} graphs have no known label, left out")
        result = from_dataset(every, name, task=f"graph_{labels.objective.goal}")
        check_classes(result)
        return result.split_by(drawn, count).read_from(source, notes, class_names=labels.names)
    rows_of_edges = rows_graph(of, source, is_later=like is not None)
    if masks and labels is None:
        if time is not None:  # the latest last
            order = torch.from_numpy(times_of(of.edges, time).argsort(kind="stable"))
            rows_of_edges, masks = rows_of_edges.edge_subgraph(order), {key: mask[order] for key, mask in masks.items()}
        if disjoint:
            raise ValueError(
                f"{name}: disjoint={disjoint} divides links at random, but a column divides them. Omit it."
            )
        return divided_links(rows_of_edges, masks, undirected, name, seed, drawn, negatives).read_from(source, notes)
    data = with_messages(rows_of_edges, source)
    if labels is None:
        return link_task([[data]], name, val, test, seed, 0, (), disjoint, negatives).read_from(source, notes)
    data.update({"y": labels.y, **masks})
    D = None if data.edge_attr is None else data.edge_attr.size(1)
    result = Task(name, [data], [data], [data], data.x.size(1), labels.objective, D, labels.names, (), 1, drawn)
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


def _notes(
    of: Tables,
    reverse: bool,
    labels: Labels | None,
    uses: Mapping[str, str | None],
    fitted: Mapping[str, Features],
) -> Iterator[str]:
    """Yield notes on the uses of columns, on values that are missing or not read, and on the direction of messages."""
    ends = [*dict.fromkeys(f"{end.name} of {file_of(end.frame)}" for end in of.ends)]
    parts = [] if of.nodes is None else [f"ids {of.roles.id} of {file_of(of.nodes)}"]
    parts += [] if of.graphs is None else [f"{len(of.graphs):,} graphs {of.roles.graph_id} of {file_of(of.graphs)}"]
    parts += [f"ends {' and '.join(ends)}", *(f"{use} {name}" for use, name in uses.items() if name)]
    for item, features in fitted.items():
        own = [name for name in features.columns if name not in DEGREES]
        names = [*own] if len(own) <= LISTED else [f"{len(own)} columns"]
        degrees = "number of edges of" if DEGREES[2] in features.columns else "numbers of edges from and to"
        names += [f"the {degrees} each"] * (len(own) < len(features.columns))
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
    pair = str(of.roles.src), str(of.roles.dst)
    if reverse and not of.roles.both:
        advice = "; if edges have no direction, like cables: dataset.undirected=true" * are_of_one_kind(*pair)
        yield f"messages pass over each edge in both directions{advice}"
    elif reverse and have_no_direction(*pair):
        yield "edges have no direction, as the names of their ends show; otherwise choose dataset.undirected=false"


def _item(of: Tables, targets: Sequence[str], task: str | None) -> tuple[str, str | None]:
    """Return what is to be predicted, node, edge or link, and classification, regression or None."""
    if task not in (None, *TASKS) or (of.graphs is None and str(task).startswith("graph_")):
        raise ValueError(
            f"task is {task}, but tables are one graph. Choose a task of nodes, edges or links, or give many graphs: "
            "dataset.graphs=graphs.csv with a row for each, or dataset.graph=FOLDER."
        )
    if of.graphs is not None:
        check_columns([of.graphs], targets)
        if not targets or not str(task or "graph_").startswith("graph_"):
            columns = ", ".join(name for name in of.graphs.columns if name != of.roles.graph_id)
            raise ValueError(
                f"Of many graphs, their labels are predicted: choose dataset.target from the columns of "
                f"{file_of(of.graphs)}: {columns or 'it has no other than the id'}."
            )
        return "graph", None if task is None else task.removeprefix("graph_")
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
    columns = [column for frame in (of.nodes, of.edges, of.graphs) if frame is not None for column in frame.columns]
    parts = {name: [column for column in columns if column.startswith(f"{name}.")] for name in listed}
    return [part for name in listed for part in ([name] if name in columns else parts[name] or [name])]
