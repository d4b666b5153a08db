"""Many graphs in tables: nodes and edges with the graph that they are of, and a row of labels for each graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from ...files import needs
from ..arrays.batched_graphs import graphs_of
from ..splits import draw_graphs, fold_graphs, masks_of
from .features import Features
from .files import file_of, frame_of, missing_column, named, refuse
from .graph import Ids, Tables, check_distinct, numbered, positions, read_ids, rows_graph, with_messages
from .programs import are_graphs, graphs_tables, is_graph
from .roles import Roles, choose_ends, id_column, words_of

NAMES = (["graph"], ["graph", "id"], ["id"], ["file"], ["filename"], ["file", "name"], ["name"])  # of ids of graphs


def read_graphs(nodes: Any, edges: Any, graphs: Any, roles: Roles, used: Collection[Any] = ()) -> Tables:
    """Read the tables of many graphs as those of their union, with the nodes in the order of their graphs.

    Args:
        nodes, edges: the tables, or many graphs as `edges`; without `nodes`, they are the ends of edges.
        graphs: the table of graphs; None for the attributes of the graphs in `edges`.
        roles, used: as in `gat_pyg.data.tables.graph.read_tables`.

    A row of nodes or edges has the id of its graph in a column `graph`, `graph_id` or with the name that the column of
    ids has in `graphs`. Ids of nodes are those within a graph; if edges have no such column, those of all nodes.

    Raises:
        ValueError: as `read_tables`; also if a graph has no nodes, or a column with the graph of each row is missing.
    """
    if are_graphs(edges) or is_graph(edges):
        nodes, edges, graphs, roles = _unpacked(edges, graphs, roles)
    tables = {"nodes": nodes, "edges": edges, "graphs": graphs}
    nodes, edges, graphs = (frame_of(table, name, roles.missing) for name, table in tables.items())
    if graphs is None or edges is None:
        raise ValueError("Many graphs in tables need three: dataset.graphs, dataset.nodes and dataset.edges.")
    own, within = _id_column(graphs), edges if nodes is None else nodes
    if (column := graph_column(within, own)) is None:
        raise missing_column([within], "graph")
    key = roles.graph_id or column
    graphs = graphs.rename(columns={key if key in graphs.columns else own: key})
    edges = edges.rename(columns={graph_column(edges, own): key})
    roles = choose_ends(edges, roles._replace(graph_id=key), (*used, key))
    pair = [(edges, str(end)) for end in (roles.src, roles.dst)]
    nodes = _ends(pair, key) if nodes is None else nodes.rename(columns={graph_column(nodes, own): key})
    roles = roles._replace(id=roles.id or id_column(nodes.drop(columns=key), pair))
    graph_ids, *keys = read_ids([(frame, key) for frame in (graphs, nodes, edges) if key in frame])
    ids, *ends = read_ids([(nodes, str(roles.id)), *pair])
    batch = positions(keys[0], check_distinct(graph_ids), file_of(graphs))
    empty = np.bincount(batch, minlength=len(graphs)) == 0
    refuse(graphs, empty, f"{key} {{{key}}} has no nodes in {file_of(nodes)}. Add them, or leave this row out.")
    order, names = np.argsort(batch, kind="stable"), ids.of_rows
    if len(keys) > 1:  # edges say which graph they are of
        ids, *ends = map(_within, (ids, *ends), (keys[0], keys[1], keys[1]))
        nodes.attrs["id"] = edges.attrs["id"] = key  # which messages have
    side, nodes = check_distinct(ids)[order], nodes.iloc[order]
    edge_index = numbered(ends, [side], file_of(nodes))
    return Tables(nodes, edges, roles, [side], ends, edge_index, order, graphs, batch[order], names[order])


def _unpacked(data: Any, table: Any, roles: Roles) -> tuple[Any, Any, Any, Roles]:
    """Return the tables of many graphs, those of a table of graphs alone if there is one, and their roles."""
    of = graphs_tables(data)
    if roles.graph_id is not None and not (roles.both or of.directed):
        raise ValueError(f"{file_of(of.graphs)} is undirected, unlike the earlier graphs.")
    names = {"graph_id": of.graph, "id": of.id, "src": of.src, "dst": of.dst}
    selected: dict[str, Any] = {key: getattr(roles, key) or name for key, name in names.items()}
    renamed, key = {name: selected[key] for key, name in names.items()}, selected["graph_id"]
    nodes, edges, graphs = (frame.rename(columns=renamed) for frame in (of.nodes, of.edges, of.graphs))
    roles = roles._replace(**selected, both=roles.both or not of.directed)
    if (table := frame_of(table, "graphs")) is None:
        return nodes, edges, graphs, roles
    whole, column = [*map(str, graphs[key])], _id_column(table)
    of_stem = {Path(name).stem: name for name in whole} | dict(zip(whole, whole, strict=True))
    table = table.rename(columns={column: key})
    table[key] = table[key].map(lambda id: of_stem.get(str(id), id))  # without the ending of the file
    nodes, edges = (frame[frame[key].isin({*table[key]})] for frame in (nodes, edges))
    return nodes, edges, table, roles


def divided(of: Tables, source: Mapping[str, Any], is_later: bool = True, **others: Tensor) -> list[Data]:
    """Return the graphs of tables, with rows of labels or masks `[G]` in `others`."""
    union = with_messages(rows_graph(of, source, is_later), source)
    union.update({"batch": torch.from_numpy(of.batch), **others})
    if columns := source["columns"].get("graph"):
        union.graph_attr = Features(columns)(of.graphs, is_later)
    return graphs_of(union, "graph", file_of(of.graphs))


def drawn_masks(
    y: Tensor, known: Tensor, val: int | None, test: int | None, seed: int, folds: Any, fold: int, name: str
) -> tuple[dict[str, Tensor], tuple[str, ...], int]:
    """Return the masks of a random split or fold of the labelled graphs, its arguments and the number of folds."""
    (rows,) = known.nonzero(as_tuple=True)
    stubs = [Data(y=label) for label in y[rows].split(1)]
    place = {id(stub): row for stub, row in zip(stubs, rows.tolist(), strict=True)}
    if folds is None:
        parts, count, arguments = draw_graphs(stubs, val, test, seed, name), 1, ("val", "test", "seed")
    else:
        parts, count = fold_graphs(stubs, folds, fold, seed, name)
        arguments = ("folds", "fold", "seed")
    return masks_of([torch.tensor([place[id(stub)] for stub in part]) for part in parts], len(y)), arguments, count


def _id_column(graphs: Any) -> str:
    """Return the column with the ids of a table of graphs: the first with a usual name, else the first one."""
    usual = [column for words in NAMES for column in graphs.columns if words_of(column) == words]
    return str([*usual, *graphs.columns][0])


def graph_column(frame: Any, name: str) -> str | None:
    """Return the column with the graph of each node or edge, called `name` unless that may be its own id; or None."""
    usual = [column for column in frame.columns if words_of(column) in NAMES[:2]]
    return next(iter(usual), name if name in frame.columns and words_of(name) != ["id"] else None)


def _ends(pair: Any, key: str) -> Any:
    """Return the table of the nodes at the ends of edges."""
    columns = [edges[[key, end]].set_axis([key, "node"], axis=1) for edges, end in pair]
    nodes = needs("pandas", "tables").concat(columns).drop_duplicates(ignore_index=True)
    return named(nodes, f"the ends of {file_of(pair[0][0])}")


def _within(ids: Ids, graphs: Ids) -> Ids:
    """Return the ids of nodes with those of their graphs, which tell all nodes apart."""
    pairs = [f"{graph} / {id}" for graph, id in zip(graphs.of_rows, ids.of_rows, strict=True)]
    codes, texts = needs("pandas", "tables").factorize(np.array(pairs, object))
    return Ids(ids.frame, ids.name, codes, texts.tolist())
