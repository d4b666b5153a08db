"""The roles of columns: the ids of nodes, and the two ends of edges."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from .files import check_columns, file_of, unnamed

IDS = (("id",), ("node",), ("vertex",), ("node", "id"), ("vertex", "id"))  # words of the usual names of ids
ENDS = (  # words of the ends of edges, alone or with others, as in from_account and to_account
    *(("src", "dst"), ("source", "target"), ("source", "destination"), ("source", "dest"), ("from", "to")),
    *(("sender", "receiver"), ("sender", "recipient"), ("payer", "payee"), ("head", "tail"), ("orig", "dest")),
    *(("origin", "destination"), ("origin", "dest"), ("caller", "callee"), ("follower", "followee")),
    *(("citing", "cited"), ("start", "end")),
)
PAIRS = (("u", "v"), ("a", "b"), ("1", "2"), ("i", "j"))  # likewise, alone or with a word of OBJECTS
USERS = ("user", "customer", "client", "buyer", "reviewer", "member", "person", "patient", "author", "reader")
ITEMS = (
    *("item", "product", "movie", "film", "book", "song", "track", "artist", "article", "paper", "business"),
    *("merchant", "shop", "store", "seller", "restaurant", "venue", "game", "drug", "course", "asin", "anime", "sku"),
)
OBJECTS = ("node", "id", "vertex", "protein", "gene", "account", "company", "ip", "city", "station", *USERS, *ITEMS)
ATTRIBUTES = {"time", "date", "day", "year", "at", "lat", "lon", "lng", "amount", "balance", "price", "value", "type"}
_ROWS = ("index", "level_0", "row", "rownames", "row_names", "row_number", "x")  # usual names of the numbers of rows


def words_of(name: str) -> list[str]:
    """Return the words and numbers of a name in small letters.

    >>> words_of("fromAccount_ID"), words_of("node1")
    (['from', 'account', 'id'], ['node', '1'])
    """
    return re.findall(r"[^\W\d_]+|\d+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())


class Roles(NamedTuple):
    """Names of the columns with ids, and what the ids are, in the form of `Task.source`; None where to be chosen."""

    id: str | None
    src: str | None
    dst: str | None
    bipartite: bool | None = None  # src and dst are ids of two kinds
    matrix: str | None = None  # key of the matrix of edges in a file
    are_two: bool = False  # each kind has a table of nodes of its own
    both: bool = False  # the edges are those of a graph without directions
    ids: list[list[str]] | None = None  # ids of the nodes whose embeddings were learnt, in order, of each kind
    graph_id: str | None = None  # of many graphs: the column of all tables with the graph of a row
    missing: Sequence[str] = ()  # values that are missing in all columns but ids

    @classmethod
    def of(cls, source: Mapping[str, Any]) -> Roles:
        """Return the roles in an earlier task."""
        return cls(**{key: source[key] for key in cls._fields if key in source})

    def describe(self) -> dict[str, Any]:
        """Return plain data for `of`."""
        return {key: value for key, value in self._asdict().items() if key not in ("both", "ids", "graph_id") or value}


def choose_ends(edges: Any, roles: Roles, used: Collection[Any]) -> Roles:
    """Return the roles with the columns of an edge's ends, found by their names or as the only two without a use.

    Args:
        edges: the table of edges.
        roles: the names that the user has chosen.
        used: columns with another use, such as the target.

    Raises:
        ValueError: if they are not clear, or there are no such columns.
    """
    if (roles.src is None) != (roles.dst is None):
        raise ValueError(f"src is {roles.src}, dst is {roles.dst}: expected the names of two columns, or none.")
    if roles.src is None:
        pairs = _pairs([name for name in edges.columns if not unnamed(name) and name not in used])
        if len(pairs) != 1:
            several = " or ".join(f"{src} and {dst}" for src, dst in pairs)
            problem = f"the ends of edges may be {several}" if pairs else "no two columns are clearly the ends of edges"
            raise ValueError(
                f"{file_of(edges)}: {problem}. Choose dataset.src and dataset.dst from its columns: "
                f"{', '.join(edges.columns)}."
            )
        roles = roles._replace(src=pairs[0][0], dst=pairs[0][1])
    check_columns([edges], [roles.src, roles.dst])
    return roles


def _pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs of columns that may be the ends, the likely ones alone."""
    plain = {tuple(word for word in words_of(name) if word != "id"): name for name in reversed(names)}
    for src, dst in (*ENDS, *PAIRS):
        if (src,) in plain and (dst,) in plain:
            return [(plain[src,], plain[dst,])]
    if pairs := [(src, dst) for src in names for dst in names if _are_ends(words_of(src), words_of(dst))]:
        return pairs
    kinds = [[name for words, name in plain.items() if len(words) == 1 and words[0] in kind] for kind in (USERS, ITEMS)]
    if len(kinds[0]) == len(kinds[1]) == 1:
        return [(kinds[0][0], kinds[1][0])]
    return [(names[0], names[1])] if len(names) == 2 else []


def _are_ends(src: Sequence[str], dst: Sequence[str]) -> bool:
    """Return True if the words of two names differ as those of from_account and to_account."""
    differing = [pair for pair in zip(src, dst, strict=False) if pair[0] != pair[1]]
    if len(src) != len(dst) or len(differing) != 1 or {*src} & ATTRIBUTES:
        return False
    others = [word for word in src if word != differing[0][0]]
    return differing[0] in ENDS or (differing[0] in PAIRS and all(word in OBJECTS for word in others))


def are_of_one_kind(src: str, dst: str) -> bool:
    """Return True if two names of columns differ as from_account and to_account.

    >>> are_of_one_kind("src", "dst"), are_of_one_kind("nodeA", "nodeB"), are_of_one_kind("user", "item")
    (True, True, False)
    """
    return _are_ends(words_of(src), words_of(dst))


def have_no_direction(src: str, dst: str) -> bool:
    """Return True if two names of columns show no direction.

    >>> have_no_direction("node1", "node2"), have_no_direction("from_bus", "to_bus")
    (True, False)
    """
    return are_of_one_kind(src, dst) and [*zip(words_of(src), words_of(dst), strict=True)][-1] in PAIRS


def id_column(nodes: Any, ends: Sequence[tuple[Any, str]], names: Sequence[str] = ()) -> str:
    """Return the column with the ids of a table of nodes.

    It has a usual name, one of `names`, or else the words that both ends share, as `account`. Otherwise it is the only
    column with a name that has the ids of all `ends`, or the first one with a name.

    Raises:
        ValueError: if several columns have the ids of all ends, or no column has a name.
    """
    named: list[str] = [name for name in nodes.columns if not unnamed(name)]
    words = [words_of(end) for _, end in ends]
    shared = [word for word in words[0] if word in words[-1] and word != "id"]
    for usual in (*map(words_of, names), *IDS, shared, [*shared, "id"]):
        for name in named:
            if usual and words_of(name) == [*usual]:
                return name
    named.sort(key=lambda name: name.lower() in _ROWS)  # after the others
    if not named:
        raise ValueError(f"{file_of(nodes)}: no column has a name, expected one with the ids of the nodes.")
    wanted_ids = {_plain(id) for frame, end in ends for id in frame[end].dropna().unique().tolist()}
    having = [name for name in named if nodes[name].is_unique and wanted_ids <= {*map(_plain, nodes[name].tolist())}]
    if len(having) > 1 and wanted_ids and having[-1].lower() not in _ROWS:
        raise ValueError(
            f"{file_of(nodes)}: {' and '.join(having)} each have the ids of all ends. Choose dataset.id from them."
        )
    return (having if wanted_ids and having else named)[0]


def _plain(id: Any) -> str:
    return str(id).strip().removesuffix(".0")


def warn_of_header(frame: Any, names: Sequence[Any]) -> None:
    """Warn if the name of a column of ids is one of their ids, or like them: the file's first row is no header."""
    usual = {*chain(*IDS, *ENDS, *PAIRS)}
    for name in names:
        shapes = [re.sub("[0-9]+", "0", str(id)) for id in (name, *frame[name].head(100))]
        is_like_ids = "0" in shapes[0] and len({*shapes}) == 1 and not {*words_of(name)} & {*OBJECTS}
        if name.lower() not in usual and (is_like_ids or any((frame[other] == name).any() for other in names)):
            text = (
                f"{file_of(frame)}: the name of the column {name} is {'like the ids' if is_like_ids else 'an id'} in it"
            )
            warnings.warn(f"{text}. If row 1 is no header, add one: this row is lost.", stacklevel=4)
            return
