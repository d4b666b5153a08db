"""Later tables of a run: the graph to predict, read with the columns, encodings and classes of the training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...tasks.objectives import objective_for
from ..reader import Reader, Rows
from .files import file_of, frame_of, missing_column
from .graph import DEGREES, pairs_in, read_tables, rows_graph, with_messages
from .many import divided, graph_column, read_graphs
from .programs import are_graphs, is_graph
from .roles import Roles
from .targets import Targets


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
    if source.get("graph_id") is not None:
        return _rows_of_graphs(source, data)
    tables, frames = _by_kind(source, data)
    has_nodes = "node" in tables
    for key in ("node", "edge"):
        if key == "node" and source["nodes"] is None and is_graph(tables.get("edge", source["edges"])):
            continue  # the nodes are in the graph
        if key in source["columns"] and key not in tables:
            if source[f"{key}s"] is None:
                raise ValueError(f"The {key}s of the run were a frame, which it does not keep. Give their table too.")
            tables[key] = source[f"{key}s"]
    try:
        of = read_tables(tables.get("node"), tables["edge"], Roles.of(source))
    except ValueError as error:
        if tables["edge"] is not source["edges"] or not has_nodes:
            raise
        raise ValueError(
            f"{error} These are the edges of the training. For other nodes, give their edges, too."
        ) from error
    of = of.with_degrees() if {*DEGREES} & {*source["columns"].get("node", ())} else of
    graph, target = with_messages(rows_graph(of, source), source), source.get("target")
    if target is None and "pairs" in tables:
        pairs = frame_of(tables["pairs"], "pairs")
        graph.edge_label_index, names = pairs_in(pairs, of)
        return Rows([graph], names, frames.get("pairs", pairs))
    item = "node" if target is None else target["item"]
    frame, order = of.of(item), of.order if item == "node" else None
    if target is not None and all(name in frame.columns for name in target["names"]):
        y = Targets(target["names"], target["classes"])(frame)
        (graph.y,) = objective_for([y], item, target["goal"]).convert([y], file_of(frame))
    numbers = None if order is None or item not in frames else order.tolist()
    ids: Mapping[str, Any] = of.names(item)
    if target is not None and of.roles.are_two and item == "node":  # nodes of both kinds may have the same id
        kinds = zip(of.ends, of.sides, strict=True)
        ids = {str(of.roles.id): [f"{end.name} {id}" for end, side in kinds for id in side]}
    return Rows([graph], {**ids}, frames.get(item, frame), numbers)


def _rows_of_graphs(source: Mapping[str, Any], data: Any) -> Rows:
    """Return the graphs of later tables of many graphs: of files, or the three tables in any order."""
    named = source if data is None else data if isinstance(data, Mapping) else {}
    tables: dict[str, Any] = {key: named.get(key) for key in ("nodes", "edges", "graphs")}
    if data is not None and not isinstance(data, Mapping):
        several = [*data] if isinstance(data, (list, tuple)) else [data]
        files = [each for each in several if is_graph(each) or are_graphs(each)]
        tables["edges"] = files if len(files) > 1 else next(iter(files), None)
        for frame in (frame_of(each, "data") for each in several if not is_graph(each) and not are_graphs(each)):
            is_of_edges, is_of_nodes = {source["src"], source["dst"]} <= {*frame}, source["id"] in frame
            is_of_nodes = is_of_nodes and graph_column(frame, source["graph_id"]) is not None
            tables["edges" if is_of_edges else "nodes" if is_of_nodes else "graphs"] = frame
    of = read_graphs(tables["nodes"], tables["edges"], tables["graphs"], Roles.of(source)).with_degrees()
    target, y = source["target"], dict[str, Any]()
    if all(name in of.graphs.columns for name in target["names"]):
        labels = Targets(target["names"], target["classes"])(of.graphs)
        (y["y"],) = objective_for([labels], "graph", target["goal"]).convert([labels], file_of(of.graphs))
    graphs, first = divided(of, source, **y), 0
    for graph in graphs:
        graph.node_names = [*of.node_names[first : first + len(graph.x)]]
        first += len(graph.x)
    return Rows(graphs, of.names("graph"), None if tables["graphs"] is None else of.graphs)


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
            wanted, kind = (source["id"], "nodes") if is_of_nodes else (source["src"], "edges")
            if wanted in frame.columns:
                raise ValueError(f"{file_of(frame)} is a second table of {kind}, expected one. Leave one of them out.")
            raise missing_column([frame], wanted)
        tables[kind] = frame
        if hasattr(table, "columns"):
            selected[kind] = table
    return tables, selected


TABLES = Reader(
    ("gat_pyg.data.tables",),
    ("nodes", "edges", "graph", "graphs"),
    rows_of,
    node_names=lambda graph: [*map(str, graph.get("node_names", range(len(graph.x))))],
)
