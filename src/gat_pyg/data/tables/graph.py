"""Tables of nodes and edges as one graph: ids are text, and number the nodes and both ends of each edge."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import coalesce

from ...files import needs
from ...tasks.node_ids import node_ids
from .features import Features
from .files import are_several, check_columns, file_of, frame_of, refuse, shown, where
from .programs import graph_tables, is_graph
from .roles import Roles, are_of_one_kind, choose_ends, id_column

LEARNT = "nodes that the run learnt embeddings of"
DEGREES = ("edges from it", "edges to it", "edges of it")  # columns of nodes that are counted
LIMIT = 2**53  # floats do not tell larger whole numbers apart
_WHOLE = re.compile(r"(-?(?:0|[1-9][0-9]{0,15}))(\.0*)?")
_LARGE = re.compile(r"[0-9]{16,}\.0*|[0-9]+\.[0-9]*[eE]\+?[0-9]+")  # of a float


class Ids(NamedTuple):
    """The ids in a column: the distinct ones as text, and the position of each row's among them."""

    frame: Any
    name: str
    codes: Any
    texts: list[str]

    @property
    def of_rows(self) -> Any:
        """The id of each row."""
        return np.array(self.texts, object)[self.codes]


class Tables(NamedTuple):
    """A graph in tables."""

    nodes: Any  # a frame, or None
    edges: Any
    roles: Roles
    sides: list[Any]  # pandas Indexes with the ids of the nodes in order; two if bipartite
    ends: list[Ids]  # the two of each row of edges
    edge_index: Tensor  # [2, M], from each row of edges
    order: Any = None  # the rows of the user's table of nodes in the order of `nodes`
    graphs: Any = None  # of many graphs: a frame with a row for each
    batch: Any = None  # the graph of each node, in increasing order
    node_names: Sequence[Any] = ()  # their ids within their graphs

    def of(self, item: str) -> Any:
        """Return the table of nodes, edges or graphs."""
        return self.nodes if item == "node" else self.graphs if item == "graph" else self.edges

    def graph_of(self, item: str) -> Any:
        """Return the number of the graph of each node or edge."""
        return self.batch if item == "node" else self.batch[self.edge_index[0].numpy()]

    @property
    def ids(self) -> list[str]:
        """The ids of all nodes."""
        return [*chain(*(side.tolist() for side in self.sides))]

    def names(self, item: str) -> dict[str, Sequence[Any]]:
        """Return the columns with the ids of the rows of nodes or edges, as the user wrote them."""
        if item == "graph":
            ids = self.graphs[self.roles.graph_id]
            return {str(self.roles.graph_id): presented([*map(str, ids)], self.graphs, str(self.roles.graph_id))}
        if item == "node":
            frame = None if self.nodes is None or len(self.sides) > 1 else self.nodes
            return {self.roles.id or "node": presented(self.ids, frame, str(self.roles.id))}
        return {end.name: presented([*end.of_rows], end.frame, end.name) for end in self.ends}

    def with_degrees(self) -> Tables:
        """Return the tables with the logarithms of each node's numbers of edges, since attention cannot count."""
        counts = [np.bincount(end, minlength=len(self.nodes)) for end in self.edge_index.numpy()]
        if self.roles.both:
            columns = {DEGREES[2]: np.log1p(counts[0] + counts[1])}
        else:
            columns = dict(zip(DEGREES, map(np.log1p, counts), strict=False))
        return self._replace(nodes=self.nodes.assign(**columns))


class _Kind(NamedTuple):
    """A table of nodes, and the ids in those ends of edges that are in it."""

    nodes: Any
    id: str  # its column
    side: Any  # the ids in order
    ends: list[Ids]
    order: Any  # the rows of the user's table


def read_tables(nodes: Any, edges: Any, roles: Roles, used: Collection[Any] = ()) -> Tables:
    """Read the tables, choose the columns with ids, and number the nodes.

    Args:
        nodes, edges: the tables, as the arguments of `gat_pyg.data.tables`; `edges` may be a graph.
        roles: the columns that the user has chosen, or those of an earlier task.
        used: the columns with another use, such as the target, which are not the ends of edges.
    """
    if edges is None:
        raise ValueError("edges is missing (dataset.edges in the command), expected a table of the ends of edges.")
    are_two = bool(roles.bipartite) and are_several(nodes) and len(nodes) == 2
    if is_graph(edges):
        of = graph_tables(edges, roles.matrix)
        names = {"src": of.src, "dst": of.dst} | ({"id": of.id} if nodes is None else {})
        selected: dict[str, Any] = {key: getattr(roles, key) or name for key, name in names.items()}
        renamed = {name: selected[key] for key, name in names.items()}
        nodes = of.nodes.rename(columns=renamed) if nodes is None else nodes
        edges = of.edges.rename(columns=renamed)
        roles = roles._replace(**selected, both=roles.both or not of.directed)
    edges = frame_of(edges, "edges", roles.missing)
    tables = [] if nodes is None else [nodes] if not are_two else nodes
    names_of = [f"nodes[{k}]" if are_two else "nodes" for k in range(len(tables))]
    frames = [frame_of(*each, roles.missing) for each in zip(tables, names_of, strict=True)]
    roles = choose_ends(edges, roles, used)._replace(are_two=are_two)
    ends = [(edges, str(roles.src)), (edges, str(roles.dst))]
    if not frames:
        pair = read_ids(ends, chain(*roles.ids or ()))
        sides, roles = _sides(pair, roles)
        return Tables(None, edges, roles, sides, pair, numbered(pair, sides, file_of(edges)))
    of_kinds = [[end] for end in ends] if are_two else [ends]
    learnt: Sequence[Any] = roles.ids or [None] * len(frames)
    kinds = [_read_nodes(*each, roles) for each in zip(frames, of_kinds, learnt, strict=True)]
    sides, pair = [kind.side for kind in kinds], [end for kind in kinds for end in kind.ends]
    nodes, order, place = kinds[0].nodes, kinds[0].order, file_of(frames[0])
    roles = roles._replace(id="id" if are_two else kinds[0].id)
    if are_two:
        nodes, order = _joined(kinds), None
        place = file_of(nodes)
    nodes.attrs["id"] = roles.id
    return Tables(nodes, edges, roles, sides, pair, numbered(pair, sides, LEARNT if roles.ids else place), order)


def _read_nodes(frame: Any, ends: list[tuple[Any, str]], learnt: list[str] | None, roles: Roles) -> _Kind:
    """Read the ids of a table of nodes and those in some ends of edges; if `learnt`, nodes are in the order of these.

    Raises:
        ValueError: if an id is there twice, or they are not the nodes whose embeddings were learnt.
    """
    id = id_column(frame, ends, [ends[0][1]]) if roles.are_two else roles.id or id_column(frame, ends)
    check_columns([frame], [id])
    ids, *of_ends = read_ids([(frame, id), *ends], learnt or ())
    side = check_distinct(ids)
    if learnt is None:
        return _Kind(frame, id, side, of_ends, None)
    known = needs("pandas", "tables").Index(learnt, dtype=object)
    number = positions(ids, known, LEARNT)
    if len(frame) < len(known):
        raise ValueError(f"{file_of(frame)} has {len(frame)} of the {len(known)} {LEARNT}, expected all.")
    order = np.argsort(number)
    return _Kind(frame.iloc[order], id, known, of_ends, order)


def _joined(kinds: Sequence[_Kind]) -> Any:
    """Return two tables of nodes as one, whose columns begin with the name of an end, as in `user.age`.

    The values of the columns of the other kind are missing.
    """
    frames, offset, first = [], 0, 0
    attrs: dict[str, Any] = {"files": [], "categories": [], "parts": {}}
    for kind in kinds:
        frame, end = kind.nodes, kind.ends[0].name
        attrs["files"].append((file_of(frame), offset))
        attrs["categories"] += [f"{end}.{name}" for name in frame.attrs["categories"]]
        attrs["parts"][end] = (first, first + len(frame))
        names = {name: "id" if name == kind.id else f"{end}.{name}" for name in frame.columns}
        frames.append(frame.rename(columns=names).assign(id=kind.side).set_axis(frame.index + offset))
        offset, first = frame.index.max() + offset + 1, first + len(frame)
    nodes = needs("pandas", "tables").concat(frames)
    nodes.attrs = frames[0].attrs | attrs
    return nodes


def _sides(ends: Sequence[Ids], roles: Roles) -> tuple[list[Any], Roles]:
    """Return the ids of the nodes, which are those of the edges: of two sides if these have ids of their own.

    Raises:
        ValueError: if that is not clear.
    """
    pd, (src, dst) = needs("pandas", "tables"), (end.name for end in ends)
    if roles.ids is not None:
        return [pd.Index(ids, dtype=object) for ids in roles.ids], roles
    sides = [pd.Index(end.texts, dtype=object).unique() for end in ends]
    common, one_kind = sides[0].intersection(sides[1]), are_of_one_kind(src, dst)
    if roles.bipartite is None and len(common) and not one_kind:
        raise ValueError(
            f"{file_of(ends[0].frame)}: {len(common):,} ids are both in {src} and in {dst}, such as {common[0]}. "
            f"Choose dataset.bipartite=true if {src} and {dst} are of two kinds, as users and items, and false if they "
            "are of one."
        )
    if roles.bipartite is None:
        roles = roles._replace(bipartite=not len(common) and not one_kind)
    one = sides[0].append(sides[1][~sides[1].isin(sides[0])])  # those of `src` first: see `two_sides`
    return sides if roles.bipartite else [one], roles


def numbered(ends: Sequence[Ids], sides: Sequence[Any], place: str) -> Tensor:
    """Return the numbers of the nodes at both ends of each edge [2, M]; `place` is where the nodes are."""
    src = positions(ends[0], sides[0], place)
    dst = positions(ends[1], sides[-1], place) + (len(sides[0]) if len(sides) > 1 else 0)
    return torch.from_numpy(np.stack([src, dst]))


def rows_graph(of: Tables, source: Mapping[str, Any], is_later: bool = True) -> Data:
    """Return the graph with x and with the rows of edges as `edge_index` [2, M] and `edge_attr` [M, D].

    Without features of nodes, x is their ids, or ones in many graphs.

    Args:
        of: the tables.
        source: `Task.source`.
        is_later: warn of columns that differ from those of the training.
    """
    nodes, edges = (Features(source["columns"].get(item) or {}) for item in ("node", "edge"))
    without = node_ids(len(of.ids)) if of.graphs is None else torch.ones(len(of.nodes), 1)
    x = nodes(of.nodes, is_later) if nodes.columns else without
    return Data(x, of.edge_index, edges(of.edges, is_later) if edges.columns else None)


def with_messages(rows: Data, source: Mapping[str, Any]) -> Data:
    """Return the graph of `rows_graph` with the edges that pass messages.

    The rows are pairs with features if their labels are to be predicted. Links are there once in each direction, with
    the mean of their features.
    """
    target, edge_index, edge_attr, data = source.get("target"), rows.edge_index, rows.edge_attr, Data(rows.x)
    if target is not None and target["item"] == "edge":
        data.edge_label_index = edge_index
        if edge_attr is not None:
            data.edge_label_attr = edge_attr
    if target is None:
        pairs = edge_index.sort(0).values if source["reverse"] else edge_index
        edge_index, edge_attr = coalesce(pairs, edge_attr, reduce="mean")
    if source["reverse"]:
        edge_index = edge_index.sort(0).values if "both" in source else edge_index  # the order of ends has no effect
        E, is_way = edge_index.size(1), edge_index[0] != edge_index[1]  # a loop is its own reverse
        edge_index = torch.cat([edge_index, edge_index[:, is_way].flip(0)], 1)
        edge_attr = None if edge_attr is None else torch.cat([edge_attr, edge_attr[is_way]])
        if edge_attr is not None and target is not None and "both" not in source:
            is_reverse = torch.arange(edge_index.size(1)) >= E
            edge_attr = torch.cat([edge_attr, is_reverse[:, None].to(edge_attr.dtype)], 1)
    data.edge_index, data.edge_attr = edge_index, edge_attr
    return data


def pairs_in(frame: Any, of: Tables) -> tuple[Tensor, dict[str, Sequence[Any]]]:
    """Return pairs of nodes in a table [2, L], and the columns with their ids."""
    src, dst = str(of.roles.src), str(of.roles.dst)
    check_columns([frame], [src, dst])
    ends = read_ids([(frame, src), (frame, dst)], of.ids)
    names: dict[str, Sequence[Any]] = {end.name: presented([*end.of_rows], frame, end.name) for end in ends}
    return numbered(ends, of.sides, LEARNT if of.roles.ids else "the nodes"), names


# Ids ------------------------------------------------------------------------------------------------------------------


def read_ids(columns: Sequence[tuple[Any, str]], known: Iterable[str] = ()) -> list[Ids]:
    """Return the ids in columns of tables, which are compared with each other and with `known` as they are written.

    If all of them are whole numbers below 2^53, as 7.0 in a column with empty fields, the point is left out.

    Raises:
        ValueError: for an empty id, one with a space at an end, or a large number that a float has rounded.
    """
    result = []
    for frame, name in columns:
        codes, values = needs("pandas", "tables").factorize(frame[name])
        texts = [*map(str, values.tolist())]
        empty = np.array([*(not text.strip() for text in texts), True])[codes]
        refuse(frame, empty, f"{name} is empty. Each node needs an id, each edge both ends.")
        for problem, wrong in (
            ("has a space at an end. Delete it: ids are compared as they are written.", lambda t: t != t.strip()),
            (
                "was written as a float, which rounds such numbers. Save the ids as text, or as whole numbers.",
                lambda t: _LARGE.fullmatch(t) and float(t) >= LIMIT,
            ),
        ):
            refuse(frame, np.array([bool(wrong(text)) for text in texts])[codes], f"{name} {{{name}}} {problem}")
        result.append(Ids(frame, name, codes, texts))
    every = [*(text for ids in result for text in ids.texts), *known]
    if any("." in text for text in every):
        wholes = [_WHOLE.fullmatch(text) for text in every]
        if all(whole is not None and abs(int(whole[1])) < LIMIT for whole in wholes):
            return [ids._replace(texts=[text.partition(".")[0] for text in ids.texts]) for ids in result]
    return result


def check_distinct(ids: Ids) -> Any:
    """Return the ids of a table of nodes as a pandas Index.

    Raises:
        ValueError: if two rows have the same.
    """
    index, frame, column = needs("pandas", "tables").Index(ids.of_rows, dtype=object), ids.frame, ids.name
    again = index.duplicated()
    if again.any():
        first = where(frame, frame.index[int((index == index[again][0]).argmax())])
        refuse(frame, again, f"{column} {{{column}}} stands twice, first in {first}. Give each one row.")
    return index


def positions(ends: Ids, index: Any, nodes: str) -> Any:
    """Return the position in `index` of the id of each row, int64; `nodes` is the name of the table of the index.

    Raises:
        ValueError: if an id is not there.
    """
    found = index.get_indexer(ends.texts)
    if (found < 0).any():
        unknown = ends.texts[int(np.argmax(found < 0))]
        column = ends.name
        similar = [id for id in index if _alike(id) == _alike(unknown)]
        hint = f"Did you mean {shown(similar[0])}?" if similar else "Add its row there, or leave this row out."
        refuse(ends.frame, (found < 0)[ends.codes], f"{column} {{{column}}} is not in {nodes}. {hint}")
    return found.astype(np.int64)[ends.codes]


def _alike(id: str) -> str:
    return id.strip().casefold().lstrip("0").removesuffix(".0")


def presented(ids: Sequence[str], frame: Any = None, name: str = "") -> list[Any]:
    """Return the ids of rows for tables of predictions: as they are in the user's frame, numbers of a CSV file as such.

    >>> presented(["7", "8"]), presented(["7", "08"])
    ([7, 8], ['7', '08'])
    """
    are_texts = frame is not None and not frame.attrs.get("is_text", False) and frame[name].dtype.kind not in "iuf"
    are_numbers = not are_texts and all(_WHOLE.fullmatch(id) and "." not in id for id in ids)
    return [*map(int, ids)] if are_numbers else [*ids]
