"""Tables of nodes and edges as one graph: the ids of the nodes, and the numbers of the nodes at both ends of edges."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...files import needs
from .choice import are_of_one_kind, check_columns, choose_ends, id_column
from .files import file_of, frame_of
from .ids import Ids, check_distinct, positions, presented, read_ids
from .programs import graph_tables, is_graph

LEARNT = "nodes that the run learnt embeddings of"
DEGREES = ("edges from it", "edges to it")  # columns of nodes that are counted
_NODE, _END = "Each node needs an id.", "Each edge needs both ends."


class Tables(NamedTuple):
    """A graph in tables."""

    nodes: Any  # a frame, or None
    edges: Any
    sides: list[Any]  # pandas Indexes with the ids of the nodes in order; two if bipartite
    edge_index: Tensor  # [2, M], from each row of edges
    ends: list[Ids]  # of each row of edges
    order: Any = None  # the rows of the user's table of nodes in the order of `nodes`, if it is another one

    def of(self, item: str) -> Any:
        """Return the table of nodes or edges."""
        return self.nodes if item == "node" else self.edges

    @property
    def ids(self) -> list[str]:
        """The ids of all nodes."""
        return [*chain(*(side.tolist() for side in self.sides))]

    def names(self, item: str, source: Mapping[str, Any]) -> dict[str, Sequence[Any]]:
        """Return the columns with the ids of the rows of nodes or edges, as the user wrote them."""
        if item == "node":
            frame = None if self.nodes is None or len(self.sides) > 1 else self.nodes
            return {source["id"] or "node": presented(self.ids, frame, source["id"])}
        return {end.name: presented([*end.of_rows], end.frame, end.name) for end in self.ends}


def read_tables(nodes: Any, edges: Any, source: dict[str, Any], used: Collection[Any] = ()) -> Tables:
    """Read the tables, number their nodes, and write the names of the columns with ids into `source`.

    `used` are the columns with another use, such as the target, which are not the ends of edges.
    """
    if edges is None:
        raise ValueError("edges is missing (dataset.edges in the command), expected a table of the ends of edges.")
    if is_graph(edges):
        nodes, edges = _of_graph(nodes, edges, source)
    edges = frame_of(edges, "edges")
    choose_ends(edges, source, used)
    ends = [(edges, source["src"]), (edges, source["dst"])]
    source["are_two"] = bool(source["bipartite"]) and are_several(nodes) and len(nodes) == 2
    if source["are_two"]:
        return _of_two_kinds(nodes, ends, source)
    if nodes is None:
        pair = read_ids(ends, _END, chain(*source.get("ids", ())))
        sides, place = _sides(pair, source), file_of(edges)
        return Tables(None, edges, sides, ends_of(pair, sides, place), pair)
    nodes = frame_of(nodes, "nodes")
    source["id"] = source["id"] or id_column(nodes, ends)
    check_columns([nodes], [source["id"]])
    ids, *pair = read_ids([(nodes, source["id"]), *ends], _END, chain(*source.get("ids", ())))
    sides, place, order = [check_distinct(ids)], file_of(nodes), None
    nodes.attrs["id"] = source["id"]
    if "ids" in source:  # whose embeddings were learnt, in this order
        known, place = needs("pandas", "tables").Index(source["ids"][0], dtype=object), LEARNT
        number = positions(ids, known, place)
        if len(nodes) < len(known):
            raise ValueError(f"{file_of(nodes)} has {len(nodes)} of the {len(known)} {place}, expected all.")
        order = np.argsort(number)
        nodes, sides = nodes.iloc[order], [known]
    return Tables(nodes, edges, sides, ends_of(pair, sides, place), pair, order)


def _of_two_kinds(tables: Sequence[Any], ends: Sequence[tuple[Any, str]], source: dict[str, Any]) -> Tables:
    """Return two tables of nodes as one, whose columns begin with the name of an end as in `user.age`, with the edges.

    The values of the columns of the other kind are missing.

    Raises:
        ValueError: if a table has an id twice, or they are not the nodes whose embeddings were learnt.
    """
    pd = needs("pandas", "tables")
    frames, sides, pairs, source["id"] = [], [], [], "id"
    for table, end in zip(tables, ends, strict=True):
        frame = frame_of(table, f"the table of {end[1]}")
        id = id_column(frame, [end], [end[1]])
        ids, pair = read_ids([(frame, id), end], _NODE)
        sides.append(check_distinct(ids))
        pairs.append(pair)
        names = {name: "id" if name == id else f"{end[1]}.{name}" for name in frame.columns}
        frames.append(frame.rename(columns=names).assign(id=ids.of_rows))
    if "ids" in source and source["ids"] != [side.tolist() for side in sides]:
        raise ValueError(f"{' and '.join(map(file_of, frames))} have other {LEARNT}, or in another order.")
    offset = frames[0].index[-1] + 1
    files = [(file_of(frame), start) for frame, start in zip(frames, (0, offset), strict=True)]
    frames[1].index = frames[1].index + offset
    nodes = pd.concat(frames)
    attrs: dict[str, Any] = {"files": files, "id": "id", "categories": [], "parts": {}}
    for frame, (_, kind), first in zip(frames, ends, (0, len(frames[0])), strict=True):
        attrs["categories"] += [f"{kind}.{name}" for name in frame.attrs["categories"]]
        attrs["parts"][kind] = (first, first + len(frame))
    nodes.attrs = frames[0].attrs | attrs
    return Tables(nodes, ends[0][0], sides, ends_of(pairs, sides, file_of(nodes)), pairs)


def are_several(tables: Any) -> bool:
    """Return True for a list of tables."""
    return isinstance(tables, Sequence) and not isinstance(tables, str)


def _sides(ends: Sequence[Ids], source: dict[str, Any]) -> list[Any]:
    """Return the ids of the nodes, which are those of the edges: of two sides if these have ids of their own.

    Raises:
        ValueError: if that is not clear.
    """
    pd, (src, dst) = needs("pandas", "tables"), (end.name for end in ends)
    if "ids" in source:
        return [pd.Index(ids, dtype=object) for ids in source["ids"]]
    sides = [pd.Index(end.texts, dtype=object).unique() for end in ends]
    common, one_kind = sides[0].intersection(sides[1]), are_of_one_kind(src, dst)
    if source["bipartite"] is None and len(common) and not one_kind:
        raise ValueError(
            f"{file_of(ends[0].frame)}: {len(common):,} ids are both in {src} and in {dst}, such as {common[0]}. "
            f"Choose dataset.bipartite=true if {src} and {dst} are of two kinds, as users and items, and false if they "
            "are of one."
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


def with_degrees(of: Tables) -> Tables:
    """Return the tables with the logarithms of the numbers of edges from and to each node: attention cannot count."""
    N = len(of.nodes)
    counts = {name: np.bincount(ends, minlength=N) for name, ends in zip(DEGREES, of.edge_index.numpy(), strict=True)}
    return of._replace(nodes=of.nodes.assign(**{name: np.log1p(count) for name, count in counts.items()}))


def ends_of(ends: Sequence[Ids], sides: Sequence[Any], place: str) -> Tensor:
    """Return the numbers of the nodes at both ends of each edge [2, M]; `place` is where the nodes are."""
    src = positions(ends[0], sides[0], place)
    dst = positions(ends[1], sides[-1], place) + (len(sides[0]) if len(sides) > 1 else 0)
    return torch.from_numpy(np.stack([src, dst]))
