"""Tables of nodes and edges as one graph: which of their columns are ids, and the numbers of the nodes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...files import needs
from .columns import missing_column
from .files import file_of, named, node_ids, plain_ids, positions, read_table, unnamed
from .programs import graph_tables, is_graph

IDS = ("id", "node", "node_id")  # usual names of the column of ids, without regard to case
ENDS = (  # and of the ends of edges, alone or with other words, as in from_account and to_account
    *(("src", "dst"), ("source", "target"), ("from", "to"), ("sender", "receiver"), ("payer", "payee")),
    *(("head", "tail"), ("u", "v"), ("a", "b"), ("1", "2")),
)

LEARNT = "nodes that the run learnt embeddings of"
DEGREES = ("edges from it", "edges to it")  # columns of nodes that are counted


class Tables(NamedTuple):
    """A graph in tables."""

    nodes: Any  # a frame, or None
    edges: Any
    sides: list[Any]  # pandas Indexes with the ids of the nodes in order, as the user wrote them; two if bipartite
    edge_index: Tensor  # [2, M], from each row of edges

    def of(self, item: str) -> Any:
        """Return the table of nodes or edges."""
        return self.nodes if item == "node" else self.edges

    @property
    def ids(self) -> list[Any]:
        """The ids of all nodes."""
        return [*chain(*(side.tolist() for side in self.sides))]


def read_tables(nodes: Any, edges: Any, source: dict[str, Any]) -> Tables:
    """Read the tables, number their nodes, and write the names of the columns with ids into `source`."""
    if edges is None:
        raise ValueError("edges is missing (dataset.edges in the command), expected a table of the ends of edges.")
    pd = needs("pandas", "tables")
    if is_graph(edges):
        nodes, edges = _of_graph(nodes, edges, source)
    edges = frame_of(edges, "edges", [source["src"], source["dst"]] if source["src"] else [*chain(*ENDS)])
    _choose_ends(edges, source)
    sides: list[Any] = []
    source["are_two"] = bool(source["bipartite"]) and are_several(nodes) and len(nodes) == 2
    if source["are_two"]:
        nodes, sides = _of_two_kinds(nodes, source)
    elif nodes is not None:
        nodes = frame_of(nodes, "nodes", [source["id"] or "id", *IDS])
        source["id"] = source["id"] or _usual_id(nodes)
        check_columns([nodes], [source["id"]])
        sides = [node_ids(nodes, source["id"])]
    place = file_of(edges if nodes is None else nodes)
    if "ids" in source and not source["are_two"]:  # whose embeddings were learnt, in this order
        sides, place = [pd.Index(ids) for ids in source["ids"]], LEARNT
        if nodes is not None:
            number = positions(nodes, source["id"], sides[0], place)
            if len(nodes) < len(sides[0]):
                raise ValueError(f"{file_of(nodes)} has {len(nodes)} of the {len(sides[0])} {place}, expected all.")
            nodes = nodes.iloc[np.argsort(number)]
    sides = sides or _sides(edges, source)
    return Tables(nodes, edges, sides, ends_of(edges, sides, source, place))


def _of_two_kinds(tables: Sequence[Any], source: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Return two tables of nodes as one, whose columns begin with the name of an end as in `user.age`, and their ids.

    The values of the columns of the other kind are missing.

    Raises:
        ValueError: if a table has an id twice, or they are not the nodes whose embeddings were learnt.
    """
    pd = needs("pandas", "tables")
    frames, sides, source["id"] = [], [], "id"
    for table, end in zip(tables, (source["src"], source["dst"]), strict=True):
        frame = frame_of(table, f"the table of {end}", [end, *IDS])
        id = end if end in frame.columns else _usual_id(frame)
        sides.append(node_ids(frame, id))
        frames.append(frame.rename(columns={name: "id" if name == id else f"{end}.{name}" for name in frame.columns}))
    if "ids" in source and source["ids"] != [side.tolist() for side in sides]:
        raise ValueError(f"{' and '.join(map(file_of, frames))} have other {LEARNT}, or in another order.")
    offset = frames[0].index[-1] + 1
    files = [(file_of(frame), start) for frame, start in zip(frames, (0, offset), strict=True)]
    frames[1].index = frames[1].index + offset
    nodes = pd.concat(frames)
    nodes.attrs = {"files": files}
    return nodes, sides


def _usual_id(nodes: Any) -> Any:
    return next((name for name in nodes.columns if name.lower() in IDS), nodes.columns[0])


def are_several(tables: Any) -> bool:
    """Return True for a list of tables."""
    return isinstance(tables, Sequence) and not isinstance(tables, str)


def _sides(edges: Any, source: dict[str, Any]) -> list[Any]:
    """Return the ids of the nodes, which are those of the edges: of two sides if these have ids of their own.

    Raises:
        ValueError: if that is not clear.
    """
    pd, src, dst = needs("pandas", "tables"), source["src"], source["dst"]
    sides = [pd.Index(plain_ids(edges[end].dropna())).unique() for end in (src, dst)]
    if sides[0].dtype != sides[1].dtype:
        sides = [side.astype(str) for side in sides]
    common, one_kind = sides[0].intersection(sides[1]), _are_of_one_kind(src, dst)
    if source["bipartite"] is None and len(common) and not one_kind:
        raise ValueError(
            f"{file_of(edges)}: {len(common):,} ids are both in {src} and in {dst}, such as {common[0]}. Choose "
            f"dataset.bipartite=true if {src} and {dst} are of two kinds, as users and items, and false if they are of "
            "one."
        )
    if source["bipartite"] is None:
        source["bipartite"] = not len(common) and not one_kind
    # of one kind, those of `src` come first: see `two_sides`
    return sides if source["bipartite"] else [sides[0].append(sides[1][~sides[1].isin(sides[0])])]


def _of_graph(nodes: Any, graph: Any, source: dict[str, Any]) -> tuple[Any, Any]:
    """Return the tables of a graph, with columns of the names in `source`, or write those of the graph there."""
    of = graph_tables(graph, source["matrix"])
    if not of.directed:
        source["both"] = True
    names = {"src": of.src, "dst": of.dst} | ({"id": of.id} if nodes is None else {})
    for key, name in names.items():
        source[key] = source[key] or name
    renamed = {name: source[key] for key, name in names.items()}
    return of.nodes.rename(columns=renamed) if nodes is None else nodes, of.edges.rename(columns=renamed)


def frame_of(table: Any, name: str, ids: Collection[str]) -> Any:
    """Return a table as a frame with the names of its files; None for None."""
    pd = needs("pandas", "tables")
    if table is None:
        return None
    if not isinstance(table, pd.DataFrame):
        return read_table(table if isinstance(table, (str, Path)) else list(table), ids)
    if "files" in table.attrs:  # of a graph
        return table
    frame = named(table.reset_index(drop=table.index.name is None), name)
    frame.columns = frame.columns.map(str)
    return frame


def with_degrees(of: Tables) -> Tables:
    """Return the tables with the logarithms of the numbers of edges from and to each node: attention cannot count."""
    N = len(of.nodes)
    counts = {name: np.bincount(ends, minlength=N) for name, ends in zip(DEGREES, of.edge_index.numpy(), strict=True)}
    return of._replace(nodes=of.nodes.assign(**{name: np.log1p(count) for name, count in counts.items()}))


def _choose_ends(edges: Any, source: dict[str, Any]) -> None:
    """Write the names of the columns of an edge's ends into `source`, unless they are there."""
    names = {name.lower().removesuffix("_id"): name for name in edges.columns}
    if (source["src"] is None) != (source["dst"] is None):
        raise ValueError(f"src is {source['src']}, dst is {source['dst']}: expected the names of two columns, or none.")
    if source["src"] is None:
        pair = next((pair for pair in ENDS if names.keys() >= {*pair}), None)
        if pair is None and sum(not unnamed(name) for name in edges.columns) < 2:
            raise ValueError(f"{file_of(edges)} has one column, expected two for the ends of edges.")
        source["src"], source["dst"] = (
            [names[end] for end in pair] if pair else [name for name in edges.columns if not unnamed(name)][:2]
        )
    check_columns([edges], [source["src"], source["dst"]])


def _are_of_one_kind(src: str, dst: str) -> bool:
    """Return True if two names of columns differ as from_account and to_account."""
    left, right = src.lower(), dst.lower()
    return any(a in left and left.replace(a, "", 1) == right.replace(b, "", 1) and b in right for a, b in ENDS)


def ends_of(edges: Any, sides: list[Any], source: Mapping[str, Any], place: str) -> Tensor:
    """Return the numbers of the nodes at both ends of each edge [2, M]; `place` is where the nodes are."""
    src = positions(edges, source["src"], sides[0], place)
    dst = positions(edges, source["dst"], sides[-1], place) + (len(sides[0]) if len(sides) > 1 else 0)
    return torch.from_numpy(np.stack([src, dst]))


def check_columns(frames: Sequence[Any], names: Collection[str]) -> None:
    """Raise ValueError if a name is a column of none of the tables."""
    frames = [frame for frame in frames if frame is not None]
    for name in names:
        if not any(name in frame.columns for frame in frames):
            raise missing_column(frames, name)
