"""Graphs of other programs, one or many, as tables: GraphML, GML, JSON, .mat, scipy.sparse and networkx."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from xml.etree import ElementTree
from zipfile import ZipFile

import numpy as np

from ...files import needs
from .files import named

FORMS = {  # other forms of JSON -> a key that shows them
    "adjacency_data of networkx": "adjacency",
    "tree_data of networkx": "children",
    "Cytoscape.js": "elements",
    "the JSON Graph Format": "graph",
}
MATRICES = ("a", "network", "adj", "adjacency", "w")  # usual names of the matrix of edges, without regard to case
IDS, GRAPHS = (("id",), ("node",), ("node_id",)), (("graph",), ("of_graph",))  # names of columns
ENDS = ("source", "target"), ("src", "dst"), ("from", "to")
FACEBOOK = ("status", "gender", "major", "second_major", "dorm", "year", "high_school")  # columns of local_info


class GraphTables(NamedTuple):
    """Frames of nodes and edges, and the names of the columns with the ids and with the ends of the edges."""

    nodes: Any
    edges: Any
    id: str
    src: str
    dst: str
    directed: bool
    graphs: Any = None  # of many graphs, a frame of their attributes; all three have the column `graph`
    graph: str = ""


class Graph(NamedTuple):
    """A graph as records of nodes and edges, with the keys of their ids and ends, and its own attributes."""

    nodes: Sequence[dict[str, Any]]
    edges: Sequence[dict[str, Any]]
    columns: tuple[str, str, str]
    directed: bool
    name: str
    attributes: Mapping[str, Any]
    key: str = "edges"  # the name of the list of edges in messages


def is_graph(data: Any) -> bool:
    """Return True for the path of a file that `graph_tables` reads, a graph of networkx or a matrix of SciPy.

    >>> is_graph("club.graphml"), is_graph("nodes.csv")
    (True, False)
    """
    if isinstance(data, (str, Path)):
        return Path(data).suffix.lower() in READERS
    return hasattr(data, "is_multigraph") or _is_sparse(data)


def are_graphs(data: Any) -> bool:
    """Return True for many graphs: a folder or .zip of files, a list in a JSON file, or a list of files or graphs.

    >>> are_graphs(["a.gml", "b.gml"]), are_graphs("a.gml")
    (True, False)
    """
    if not isinstance(data, (str, Path)):
        return isinstance(data, (list, tuple)) and len(data) > 0 and all(map(is_graph, data))
    path = Path(data).expanduser()
    if path.suffix.lower() == ".json" and path.is_file():
        with path.open("rb") as file:
            return file.read(100).lstrip(b"\xef\xbb\xbf \r\n\t")[:1] == b"["
    return path.is_dir() or path.suffix.lower() == ".zip"


def graphs_tables(data: Any) -> GraphTables:
    """Return the tables of many graphs, which `are_graphs` recognises, or of one in the form of many.

    `graph` is the column of all three with the name of the graph: its file, else an attribute `id` or `name` that tells
    the graphs apart, else its number. `graphs` has the attributes of the graphs.

    Raises:
        FileNotFoundError, ValueError: as `graph_tables`, or if some graphs are directed and others are not.

    Example:
        >>> import networkx as nx
        >>> tables = graphs_tables([nx.Graph([(0, 1)], toxic="no"), nx.Graph([(0, 1), (1, 2)], toxic="yes")])
        >>> tables.graphs.to_dict("list"), tables.edges.columns.tolist()
        ({'graph': [0, 1], 'toxic': ['no', 'yes']}, ['graph', 'source', 'target'])
    """
    several, name = [*data] if isinstance(data, (list, tuple)) else [data], "graphs"
    with TemporaryDirectory() as folder:
        if isinstance(data, (str, Path)):
            path = Path(data).expanduser()
            name, is_archive = path.name, path.suffix.lower() == ".zip" and path.is_file()
            if is_archive:
                ZipFile(path).extractall(folder)
            files = sorted((Path(folder) if is_archive else path).rglob("*"))
            several = [path] if path.is_file() and not is_archive else [f for f in files if f.suffix.lower() in SEVERAL]
            if not several:
                raise ValueError(f"{name} has no graphs, expected files that end in {', '.join(SEVERAL)}.")
        graphs = [
            [_of_networkx(each, f"graph {n}")] if hasattr(each, "nodes") else _records(each)
            for n, each in enumerate(several)
        ]
    return _tables([*chain(*graphs)], name, of_many=True)


def _records(path: str | Path) -> list[Graph]:
    """Return the graphs of a file."""
    graphs = _read(path, None)
    if isinstance(graphs, GraphTables):
        raise ValueError(f"{path} holds a matrix, expected one of many graphs in a file that ends in {SEVERAL}.")
    return graphs


def graph_tables(graph: Any, matrix: str | None = None) -> GraphTables:
    """Return the tables of a graph: a file, a graph of networkx, or a matrix of scipy.sparse.

    Ids and the names of attributes are those of the graph. An attribute that a node lacks is missing. Edges have no
    keys, and one of several between the same nodes is a row of its own. The kinds of files are

    - GraphML (`.graphml`) and GML (`.gml`), read by networkx. The id of a node in GML is its label where labels differ.
    - JSON (`.json`) in the form of networkx's `node_link_data`, of D3 and of vis.js: `nodes`, and `links` or `edges`.
      Ends that are no ids, but whole numbers, are positions in `nodes`, as networkx 1 and D3 wrote them.
    - MATLAB (`.mat`), read by SciPy: a square matrix of edges, and vectors and matrices with a row for each node. A
      matrix has the columns `key.0`, `key.1`, ...; `local_info` of Facebook100 has its own names and categories. Other
      square matrices are not read.
    - `scipy.sparse.save_npz` (`.npz`): the edges alone. A matrix has weights unless all of them are 1. NaN is no edge.

    `attrs["notes"]` of the edges lists what was not read.

    Args:
        graph: the path, the graph or the matrix.
        matrix: the key of the matrix of edges in a `.mat` file; by default `A`, `network`, `adj`, `adjacency` or `W`,
            else the only square sparse matrix, else the only square one.

    Raises:
        FileNotFoundError, ValueError: if the file cannot be read, or does not hold a graph.
        ImportError: if networkx, SciPy or pandas is not installed.

    Example:
        >>> import networkx as nx
        >>> tables = graph_tables(nx.karate_club_graph())
        >>> tables.nodes.columns.tolist(), tables.edges.columns.tolist(), tables.directed
        (['id', 'club'], ['source', 'target', 'weight'], False)
    """
    if hasattr(graph, "is_multigraph"):
        return _tables([_of_networkx(graph, "graph")], "graph")
    if _is_sparse(graph):
        return _of_matrix(graph, {}, "matrix")
    result = _read(graph, matrix)
    if isinstance(result, GraphTables):
        return result
    name = result[0].name
    note = f"{name} has {len(result)} graphs; the first one is read"
    return _with_notes(_tables(result[:1], name), [note] * (len(result) > 1))


def _read(path: str | Path, matrix: str | None) -> GraphTables | list[Graph]:
    """Return the graphs in a file, or the tables of its matrix."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist. Give the path of a graph: {', '.join(READERS)}.")
    suffix = path.suffix.lower()
    package, reader = READERS[suffix]
    needs(package, "formats")
    try:
        return reader(path, matrix)
    except _UnreadableError as error:
        raise ValueError(str(error)) from None
    except Exception as error:
        text = str(error).split("\n")[0] or type(error).__name__
        is_whole = type(error).__name__ == "NetworkXError" and " at (" not in text  # else the reason has a position
        hint = "" if is_whole else f" It is truncated or of another kind than {suffix}."
        raise ValueError(f"{path} cannot be read: {text.rstrip('.')}.{hint}") from error


class _UnreadableError(ValueError):
    """An error whose message names the file."""


# networkx and JSON ----------------------------------------------------------------------------------------------------


def _of_graphml(path: Path, _: str | None = None) -> list[Graph]:
    """Return the graphs in a GraphML file; a file without the namespace is read too."""
    reader = needs("networkx.readwrite.graphml", "formats").GraphMLReader()
    text = re.sub(rb"<graphml(?![^>]*xmlns=)", b'<graphml xmlns="%s"' % reader.NS_GRAPHML.encode(), path.read_bytes())
    for key in ElementTree.fromstring(text).findall(f"{{{reader.NS_GRAPHML}}}key"):
        if (kind := key.get("attr.type", "string")) not in reader.python_type:
            raise _UnreadableError(
                f"{path}: the attribute {key.get('attr.name')} is of type {kind}, expected boolean, int, long, float, "
                "double or string. Save it as one of these, a vector as an attribute for each of its elements."
            )
    graphs = [_of_networkx(graph, path.name) for graph in reader(string=text)]
    if not graphs:
        raise _UnreadableError(f"{path} has no graph, expected graphml with a graph in it.")
    return graphs


def _with_notes(tables: GraphTables, notes: list[str]) -> GraphTables:
    tables.edges.attrs["notes"] = notes
    return tables


def _of_networkx(graph: Any, name: str) -> Graph:
    nodes, edges = list(graph.nodes(data=True)), list(graph.edges(data=True))
    default = graph.graph.get("node_default", {}), graph.graph.get("edge_default", {})  # of GraphML
    attributes = [default[0] | values for _, values in nodes]
    of_edges = [default[1] | values for _, _, values in edges]
    (id,), (src, dst) = _free(attributes, IDS), _free(of_edges, ENDS)
    return Graph(
        [{id: node} | values for (node, _), values in zip(nodes, attributes, strict=True)],
        [{src: u, dst: v} | values for (u, v, _), values in zip(edges, of_edges, strict=True)],
        (id, src, dst),
        graph.is_directed(),
        name,
        {key: value for key, value in graph.graph.items() if key not in ("node_default", "edge_default")},
    )


def _of_json(path: Path, _: str | None = None) -> list[Graph]:
    content = json.loads(path.read_bytes())
    if not isinstance(content, list):
        return [_of_node_link(content, path.name)]
    return [_of_node_link(graph, f"{path.name}, graph {number}") for number, graph in enumerate(content)]


def _of_node_link(content: Any, name: str) -> Graph:
    key = next((key for key in ("links", "edges") if isinstance(content, dict) and key in content), None)
    if key is None or not all(_are_records(content.get(part)) for part in ("nodes", key)):
        form = next((form for form, where in FORMS.items() if isinstance(content, dict) and where in content), None)
        raise _UnreadableError(
            f"{name} has no graph in the form of node_link_data of networkx"
            + f", but one of {form}" * (form is not None)
            + ", expected the lists nodes and links (or edges), with id in each node, source and target in each link."
        )
    nodes, links, directed = content["nodes"], content[key], content.get("directed", False)
    directed = {"true": True, "false": False}.get(str(directed).lower(), directed)
    if directed not in (True, False):
        raise _UnreadableError(f"{name}: directed is {directed!r}, expected true or false.")
    src, dst = ("from", "to") if links and {"from", "to"} <= links[0].keys() else ("source", "target")
    for number, link in enumerate(links):
        if not {src, dst} <= link.keys():
            raise _UnreadableError(f"{name}, {key}, row {number}: {src} or {dst} is missing. Each link needs both.")
        if isinstance(link[src], dict) or isinstance(link[dst], dict):
            raise _UnreadableError(
                f"{name}, {key}, row {number}: {src} or {dst} is a whole node, as D3 leaves it, expected its id."
            )
    id, ends = "id", [link[end] for link in links for end in (src, dst)]
    are_positions = all(type(end) is int and 0 <= end < len(nodes) for end in ends)
    if not any("id" in node for node in nodes):  # D3 of old: the ends are positions in the list, or names
        if all(type(end) is int for end in ends):
            nodes = [{"id": number} | node for number, node in enumerate(nodes)]
        else:
            id = "name"
    elif are_positions and {str(node.get("id")) for node in nodes}.isdisjoint(map(str, ends)):  # of networkx 1
        links = [{**link, src: nodes[link[src]]["id"], dst: nodes[link[dst]]["id"]} for link in links]
    others = {part: content[part] for part in content if part not in ("nodes", key, "directed", "multigraph", "graph")}
    attributes = others | dict(content.get("graph") or {})
    return Graph(nodes, links, (id, src, dst), bool(directed), name, attributes, key)


def _are_records(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, dict) for value in values)


def _tables(graphs: Sequence[Graph], name: str, of_many: bool = False) -> GraphTables:
    """Return the tables of one graph, or of many with the columns `graph` and `graphs`."""
    pd, (first, *_) = needs("pandas", "formats"), graphs
    id, src, dst = first.columns
    for graph in graphs:
        if (graph.columns, graph.directed) != (first.columns, first.directed):
            forms = [f"{g.name} is {'' if g.directed else 'un'}directed, with {g.columns}" for g in (first, graph)]
            raise ValueError(f"{'; '.join(forms)}. Save all graphs in the same form.")
    rows = [[graph.nodes for graph in graphs], [graph.edges for graph in graphs]]
    of_graphs: list[dict[str, Any]] = [dict(graph.attributes) for graph in graphs]
    (column,) = _free([*chain(*chain(*rows)), *of_graphs], GRAPHS) if of_many else ("",)
    keys = [{column: key} if of_many else {} for key in _names(graphs)]
    rows = [[[key | row for row in part] for key, part in zip(keys, parts, strict=True)] for parts in rows]
    nodes, edges = (pd.DataFrame([*chain(*parts)]) for parts in rows)
    frames = [nodes, edges if len(edges) or not of_many else pd.DataFrame([], columns=[column, src, dst], dtype=object)]
    if not len(frames[0]) or id not in frames[0]:
        raise _UnreadableError(f"{name} has no nodes with {id}, expected at least one.")
    if not len(frames[1]) and not of_many:
        raise _UnreadableError(f"{name} has no edges, expected at least one.")
    if of_many:
        frames.append(pd.DataFrame([key | values for key, values in zip(keys, of_graphs, strict=True)]))
    for frame in frames:
        frame.columns = frame.columns.map(str)
    parts = zip(frames, ("nodes", first.key, "graphs"), strict=False)
    nodes, edges, *others = (named(frame, f"{name}, {part}") for frame, part in parts)
    nodes.attrs["of_graph"] = [*of_graphs[0]]
    return GraphTables(nodes, edges, id, src, dst, first.directed, *others, *[column] * of_many)


def _names(graphs: Sequence[Graph]) -> Sequence[Any]:
    """Return the names of graphs: those of their files, else an attribute that tells them apart, else numbers."""
    listed = [[graph.name if Path(graph.name).suffix.lower() in SEVERAL else "" for graph in graphs]]
    listed += [[str(graph.attributes.get(key, "")) for graph in graphs] for key in ("id", "name")]
    return next((names for names in listed if len({*names}) == len(names) and all(names)), range(len(graphs)))


def _free(rows: Iterable[Mapping[str, Any]], options: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the first tuple of names that are no attributes of the rows."""
    used = {str(key) for row in rows for key in row}
    return next((names for names in options if used.isdisjoint(names)), tuple(f"{name}_" for name in options[0]))


def _of_gml(path: Path, _: str | None = None) -> list[Graph]:
    """Return the graph of a GML file; labels that are the same, and edges twice, as in some data sets, are fine."""
    nx = needs("networkx", "formats")
    text = path.read_bytes().decode("utf-8", errors="replace")
    if not re.search(r"^\s*multigraph\s", text, re.MULTILINE):
        text = re.sub(r"(^|\s)graph(\s*)\[", r"\1graph\2[ multigraph 1 ", text, count=1)
    graph = nx.parse_gml(text.splitlines(), label=None)
    labels = [values.get("label") for _, values in graph.nodes(data=True)]
    if None not in labels and len({*map(str, labels)}) == len(labels):
        graph = nx.relabel_nodes(graph, dict(zip(graph, labels, strict=True)))
        for _, values in graph.nodes(data=True):
            del values["label"]
    return [_of_networkx(graph, path.name)]


# Matrices -------------------------------------------------------------------------------------------------------------


def _is_sparse(data: Any) -> bool:
    return type(data).__module__.startswith("scipy.sparse") and hasattr(data, "tocoo")


def _of_mat(path: Path, matrix: str | None) -> GraphTables:
    try:
        content = needs("scipy.io", "formats").loadmat(path, squeeze_me=False)
    except NotImplementedError as error:  # HDF5, which SciPy does not read
        raise _UnreadableError(
            f"{path} is a MATLAB file of version 7.3, which SciPy does not read. Save it by save('-v7', ...)."
        ) from error
    values = {key: value for key, value in content.items() if not key.startswith("__") and hasattr(value, "shape")}
    key = _matrix_of(values, matrix, path.name)
    return _of_matrix(values.pop(key), values, path.name)


def _matrix_of(values: Mapping[str, Any], matrix: str | None, name: str) -> str:
    """Return the key of the matrix of edges."""
    square = [key for key, value in values.items() if value.ndim == 2 and value.shape[0] == value.shape[1] > 1]
    usual = [key for usual in MATRICES for key in square if key.lower() == usual]
    sparse = [key for key in square if _is_sparse(values[key])]
    candidates = usual or sparse or square
    if matrix is None and len(candidates) == 1:
        return candidates[0]
    if matrix in square:
        return matrix
    reason = f"matrix is {matrix}, which it does not hold" if matrix else "none of them is clearly the edges"
    hint = " or ".join(f"dataset.matrix={key}" for key in square) or "there is none"
    raise _UnreadableError(f"{name} holds {_listed(values)}; {reason}. Choose the square matrix of the edges: {hint}.")


def _listed(values: Mapping[str, Any]) -> str:
    kinds = {key: " x ".join(map(str, value.shape)) + ", sparse" * _is_sparse(value) for key, value in values.items()}
    return "; ".join(f"{key} ({kind})" for key, kind in kinds.items()) or "no arrays"


def as_coo(matrix: Any, name: str) -> Any:
    """Return a matrix of edges with a row and a column for each node as coordinates; neither 0 nor NaN is an edge.

    Raises:
        ValueError: if it is not square.
    """
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise _UnreadableError(f"{name}: the matrix has shape {matrix.shape}, expected (N, N) for N nodes.")
    coo = needs("scipy.sparse", "formats").coo_array(matrix, copy=True)
    coo.data[np.isnan(coo.data)] = 0
    coo.eliminate_zeros()
    return coo


def _of_matrix(matrix: Any, others: Mapping[str, Any], name: str) -> GraphTables:
    """Return the tables of a matrix of edges, whose rows are their src, and of arrays with a row for each node."""
    pd, sparse = needs("pandas", "formats"), needs("scipy.sparse", "formats")
    coo, N = as_coo(matrix, name), matrix.shape[0]
    if not coo.nnz:
        raise _UnreadableError(f"{name} has a matrix of zeros, expected an edge for each other value.")
    directed = bool((sparse.csr_array(coo) != sparse.csr_array(coo).T).nnz)
    kept = slice(None) if directed else coo.row <= coo.col  # an undirected edge is one row
    edges = {"source": coo.row[kept], "target": coo.col[kept]}
    weights = coo.data[kept]
    if (weights != 1).any():
        edges["weight"] = weights.real
    columns: dict[str, Any] = {"id": np.arange(N)}
    others = {key: value.T if value.shape == (1, N) else value for key, value in others.items()}
    unread: dict[str, dict[str, Any]] = {reason: {} for reason in UNREAD}
    for key, value in others.items():
        square, short, uneven = UNREAD
        values = None if value.shape in ((N, N), ()) or value.shape[0] != N else _columns_of(key, value, N)
        columns |= values or {}
        if values is None:
            unread[square if value.shape == (N, N) else short if value.shape[:1] != (N,) else uneven][key] = value
    notes = [f"{name} also holds {_listed(values)}, {reason}" for reason, values in unread.items() if values]
    nodes, frame = named(pd.DataFrame(columns), name), named(pd.DataFrame(edges), f"{name}, edges")
    return _with_notes(GraphTables(nodes, frame, "id", "source", "target", directed), notes)


UNREAD = (
    "not read, since it may be another matrix of edges (dataset.matrix=NAME chooses)",
    "without a row for each node",
    "whose cells hold arrays of several sizes",
)


def _columns_of(key: str, value: Any, N: int) -> dict[str, Any] | None:
    """Return the columns of an array with a row for each node; None if its cells hold arrays of several sizes."""
    dense = (value.toarray() if _is_sparse(value) else np.asarray(value)).reshape(N, -1)
    if dense.dtype == object:  # cells, each with an array; one of MATLAB's empty ones is missing
        cells = [[np.asarray(cell).reshape(-1) for cell in row] for row in dense]
        sizes = [max(1, *(len(row[place]) for row in cells)) for place in range(dense.shape[1])]
        if any(len(cell) not in (0, size) for row in cells for cell, size in zip(row, sizes, strict=True)):
            return None
        rows = [
            [item for cell, size in zip(row, sizes, strict=True) for item in (cell.tolist() or [None] * size)]
            for row in cells
        ]
        dense = np.array(rows, object)
    K = dense.shape[1]
    names: Sequence[str] = [key] if K == 1 else [f"{key}.{number}" for number in range(K)]
    if key == "local_info" and len(FACEBOOK) == K:  # categories, 0 where missing
        codes = [[int(code) if code else None for code in column] for column in dense.T]
        return dict(zip(FACEBOOK, map(needs("pandas", "formats").Categorical, codes), strict=True))
    return dict(zip(names, dense.T.tolist() if dense.dtype == object else dense.T, strict=True))


def _of_npz(path: Path, _: str | None = None) -> GraphTables:
    return _of_matrix(needs("scipy.sparse", "formats").load_npz(path), {}, path.name)


SEVERAL = (".graphml", ".gml", ".json")  # a folder may have such a file for each graph
Read = Callable[[Path, str | None], "GraphTables | list[Graph]"]
READERS: dict[str, tuple[str, Read]] = {  # the package that a format needs, and its reader
    ".graphml": ("networkx", _of_graphml),
    ".gml": ("networkx", _of_gml),
    ".json": ("pandas", _of_json),
    ".mat": ("scipy", _of_mat),
    ".npz": ("scipy", _of_npz),
}
