"""Graphs of other programs as tables: every format is the same task, and what is no graph is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pandas as pd
import pytest
import scipy.io
import scipy.sparse as sp
import torch
from torch_geometric.utils import is_undirected

from gat_pyg.data import from_file, from_networkx, from_pandas, from_scipy
from gat_pyg.data.rows import read_rows
from gat_pyg.data.tables.programs import FACEBOOK, graph_tables

N = 20


def club(directed: bool = False) -> Any:
    """A graph with two edges between two nodes, attributes that some nodes lack, and weights."""
    graph = nx.MultiDiGraph() if directed else nx.MultiGraph()
    draw = np.random.default_rng(0)
    for number in range(N):
        role = {} if number == 3 else {"role": "ab"[number % 2]}
        graph.add_node(
            f"n{number}", age=30.5 + number, **role, **({"club": "xy"[number % 3 > 1]} if number > 2 else {})
        )
    for number in range(N):
        graph.add_edge(f"n{number}", f"n{(number + 1) % N}", weight=float(draw.integers(1, 5)))
    graph.add_edge("n0", "n1", weight=7.0)
    return graph


def gml(graph: Any, path: Path) -> None:
    for node in graph:
        graph.nodes[node].setdefault("role", "NAN")
        graph.nodes[node].setdefault("club", "NAN")
    nx.write_gml(graph, path)
    path.write_text(
        path.read_text().replace('role "NAN"\n', "").replace('club "NAN"\n', "").replace("  multigraph 1\n", "")
    )


def node_link(key: str) -> Callable[[Any, Path], None]:
    def write(graph: Any, path: Path) -> None:
        nodes = [{"id": node} | values for node, values in graph.nodes(data=True)]
        links = [{"source": u, "target": v} | values for u, v, values in graph.edges(data=True)]
        path.write_text(json.dumps({"directed": graph.is_directed(), "nodes": nodes, key: links}))

    return write


FORMATS: dict[str, tuple[str, Callable[[Any, Path], Any]]] = {
    "GraphML": ("club.graphml", nx.write_graphml),
    "GML": ("club.gml", gml),
    "JSON of networkx": ("club.json", node_link("edges")),
    "JSON of D3": ("club.json", node_link("links")),
}


@pytest.mark.parametrize("directed", [False, True])
def test_a_graph_in_every_format_is_the_task_of_its_tables(directed: bool, tmp_path: Path):
    graph = club(directed)
    nodes = pd.DataFrame([{"id": node} | values for node, values in graph.nodes(data=True)])
    edges = pd.DataFrame([{"source": u, "target": v} | values for u, v, values in graph.edges(data=True)])
    expected = from_pandas(nodes, edges, "club", name="club", val=4, test=4, undirected=None if directed else True)
    data = expected.train[0]
    of = {"networkx": graph} | {name: tmp_path / file for name, (file, _) in FORMATS.items()}
    for name, source in of.items():
        if name in FORMATS:
            FORMATS[name][1](club(directed), source)
        task = from_networkx(source, "club", name="club", val=4, test=4)
        assert task.class_names == ("x", "y") and task.objective == expected.objective
        for key in ("x", "edge_index", "edge_attr", "y", "train_mask", "val_mask", "test_mask"):
            assert torch.equal(task.train[0][key], data[key]), (name, key)
        assert ("in both directions" in " ".join(task.notes)) == directed
        # later: other ids, an unknown role, the attributes in another order
        later = nx.relabel_nodes(club(directed), {f"n{number}": f"later {number}" for number in range(N)})
        (row,), ids, *_ = read_rows(task.preparation, later)
        assert ids == {"id": list(later)}
        for key in ("x", "edge_index", "edge_attr", "y"):
            assert torch.equal(row[key], data[key]), (name, key)
        if name in FORMATS:
            (row,), ids, *_ = read_rows(task.preparation)
            assert ids == {"id": list(graph)} and torch.equal(row.x, data.x)
    assert read_rows(task.preparation, [str(source)]).ids == {"id": list(graph)}


def test_one_way_and_labels_of_edges():
    one_way = from_networkx(club(True), "club", undirected=False)
    assert one_way.train[0].edge_index.size(1) == N + 1 and one_way.edge_dim == 1
    task = from_networkx(club(), "weight", task="edge_regression")
    assert task.train[0].edge_label_index.size(1) == N + 1 and is_undirected(task.train[0].edge_index)
    ids = read_rows(task.preparation, club()).ids
    assert ids["source"][0] == "n0" and len(ids["target"]) == N + 1


def matlab() -> dict[str, Any]:
    draw = np.random.default_rng(0)
    A = sp.random(N, N, 0.2, random_state=0) > 0
    return {
        "A": sp.csc_matrix(A + A.T).astype(float),
        "local_info": draw.integers(0, 3, size=(N, 7)),
        "group": sp.csc_matrix(draw.integers(0, 2, size=(N, 3)).astype(float)),
        "attributes": sp.csc_matrix(draw.integers(0, 2, size=(N, 5)).astype(float)),
        "names": np.array([[f"n{number}"] for number in range(N)], object),
        "other": np.zeros((3, 2)),
        "B": sp.eye_array(N).tocsc(),
        "C": np.eye(N),
        "cells": np.array([[number % 3, np.array([number, 1.5])] for number in range(N)], object),
        "uneven": np.array([[np.arange(1 + number % 3)] for number in range(N)], object),
    }


def test_matrices_of_matlab_and_scipy(tmp_path: Path):
    values = matlab()
    scipy.io.savemat(tmp_path / "campus.mat", values)
    labels = from_networkx(tmp_path / "campus.mat", "group", ignore=[*FACEBOOK, "names", "cells"])
    assert labels.class_names == ("group.0", "group.1", "group.2") and labels.num_features == 6
    assert torch.equal(labels.train[0].y, torch.from_numpy(values["group"].toarray()).float())
    notes = " ".join(labels.notes)
    assert "campus.mat also holds other (3 x 2), without a row for each node" in notes
    assert (
        f"also holds B ({N} x {N}, sparse); C ({N} x {N}), not read, since it may be another matrix of edges" in notes
    )
    assert f"also holds uneven ({N} x 1), whose cells hold arrays of several sizes" in notes
    tables = graph_tables(tmp_path / "campus.mat")
    assert {"cells.0", "cells.2"} < {*tables.nodes} and not {"B.0", "C.0", "uneven"} & {*tables.nodes}
    assert tables.nodes["cells.1"].tolist() == list(range(N))
    with_gaps = values["A"].toarray()
    with_gaps[with_gaps == 0] = np.nan
    for matrix in (sp.csr_array(with_gaps), sp.coo_array(with_gaps)):
        assert len(graph_tables(matrix).edges) == len(tables.edges)
        assert from_scipy(matrix, np.eye(N), np.arange(N) % 2).train[0].num_edges == values["A"].nnz
    data = labels.train[0]
    dense = torch.zeros(N, N).index_put((data.edge_index[0], data.edge_index[1]), torch.tensor(1.0))
    assert torch.equal(dense, torch.from_numpy(values["A"].toarray()).float())
    gender = from_networkx(tmp_path / "campus.mat", "gender", ignore=["group", "attributes", "names", "cells"])
    codes = torch.from_numpy(values["local_info"][:, 1])
    assert gender.class_names == ("1", "2") and torch.equal(gender.train[0].y, codes - 1)  # 0 is missing
    columns = gender.source["columns"]["node"]
    assert all(columns[name]["kind"] == "category" for name in FACEBOOK if name != "gender")
    adjacency = values["A"] * 2
    sp.save_npz(tmp_path / "edges.npz", adjacency)
    nodes = pd.DataFrame({"id": range(N), "age": np.arange(N) / 7, "label": np.arange(N) % 2})
    task = from_pandas(nodes, graph=tmp_path / "edges.npz", target="label")
    index = task.train[0].edge_index
    arrays = from_scipy(adjacency.tocsr(), task.train[0].x, nodes.label.to_numpy(), seed=3)
    assert arrays.num_features == 2 and arrays.objective == from_scipy(adjacency, np.eye(N), nodes.label).objective
    assert sorted(index.t().tolist()) == sorted(arrays.train[0].edge_index.t().tolist())
    assert (arrays.train[0].edge_attr == 2).all()
    with pytest.raises(ValueError, match=r"matrix: the matrix has shape \(3, 4\), expected \(N, N\)"):
        from_scipy(sp.eye_array(3, 4))


def test_a_column_with_a_part_of_the_label_is_named(tmp_path: Path):
    """Data of outliers have the kinds of outliers beside the label; a word that one class has by chance is none."""
    draw = np.random.default_rng(0)
    structural, contextual = draw.random(300) < 0.1, draw.random(300) < 0.1
    ring = sp.eye_array(300, k=1) + sp.eye_array(300, k=-299)
    values = {"A": ring.tocsc(), "Label": structural | contextual, "str_anomaly_label": structural}
    rare = np.isin(np.arange(300), np.flatnonzero(values["Label"])[:3])  # in three rows, all of them outliers
    scipy.io.savemat(tmp_path / "o.mat", {**values, "words": np.stack([draw.random(300) < 0.3, rare], 1).astype(float)})
    with pytest.warns(
        UserWarning, match=r"str_anomaly_label equals Label in all \d+ training rows .*leave it out"
    ) as w:
        from_networkx(tmp_path / "o.mat", "Label")
    assert len(w) == 1
    from_networkx(tmp_path / "o.mat", "Label", ignore=["str_anomaly_label"])


def test_graphs_as_they_are_in_the_wild(tmp_path: Path):
    # Newman's: labels that are the same, an edge twice in a graph that is not declared a multigraph
    (tmp_path / "blogs.gml").write_text(
        'Creator "x"\ngraph\n[\n directed 1\n node\n [\n id 1\n label "a"\n value 0\n ]\n node\n [\n id 2\n label "a"\n'
        " value 1\n ]\n edge\n [\n source 1\n target 2\n ]\n edge\n [\n source 1\n target 2\n ]\n]\n"
    )
    nodes, edges, *_ = tables = graph_tables(tmp_path / "blogs.gml")
    assert nodes.to_dict("list") == {"id": [1, 2], "label": ["a", "a"], "value": [0, 1]}
    assert edges.to_dict("list") == {"source": [1, 1], "target": [2, 2]} and tables.directed
    # D3 of old: ends are positions
    (tmp_path / "old.json").write_text(
        '{"nodes": [{"name": "a"}, {"name": "b"}], "links": [{"source": 1, "target": 0, "value": 1}]}'
    )
    assert graph_tables(tmp_path / "old.json").nodes.to_dict("list") == {"id": [0, 1], "name": ["a", "b"]}
    # networkx 1: ends are positions though nodes have ids; vis.js; a text for a truth value
    for content in (
        '{"directed": "false", "nodes": [{"id": "a"}, {"id": "b"}], "links": [{"source": 1, "target": 0}]}',
        '{"nodes": [{"id": "a"}, {"id": "b"}], "edges": [{"from": "b", "to": "a"}]}',
    ):
        (tmp_path / "old.json").write_text(content)
        _, edges, _, src, dst, directed, *_ = graph_tables(tmp_path / "old.json")
        assert (edges[src].tolist(), edges[dst].tolist(), directed) == (["b"], ["a"], False)
    # Cytoscape's GraphML without a namespace, and two graphs in a file
    (tmp_path / "two.graphml").write_text(
        '<graphml><graph edgedefault="directed"><node id="a"/><edge source="a" target="a"/></graph><graph/></graphml>'
    )
    tables = graph_tables(tmp_path / "two.graphml")
    assert tables.nodes["id"].tolist() == ["a"] and tables.edges.attrs["notes"] == [
        "two.graphml has 2 graphs; the first one is read"
    ]
    # a default of GraphML, and attributes with the usual names of ids
    (tmp_path / "d.graphml").write_text(
        '<graphml xmlns="http://graphml.graphdrawing.org/xmlns"><key id="c" for="node" attr.name="id" '
        'attr.type="string"><default>yellow</default></key><graph edgedefault="directed"><node id="n0"/><node id="n1">'
        '<data key="c">red</data></node><edge source="n0" target="n1"/></graph></graphml>'
    )
    assert graph_tables(tmp_path / "d.graphml").nodes.to_dict("list") == {"node": ["n0", "n1"], "id": ["yellow", "red"]}


def graphml(body: str, edge: str = "") -> bytes:
    text = f'<graphml xmlns="http://graphml.graphdrawing.org/xmlns">{body}<graph edgedefault="undirected">'
    return f'{text}<node id="a"/>{edge}</graph></graphml>'.encode()


BROKEN: dict[str, tuple[str, bytes]] = {
    "x.graphml: the attribute pos is of type vector_float, expected boolean, .* string. Save it": (
        ".graphml",
        graphml('<key id="k" for="node" attr.name="pos" attr.type="vector_float"/>'),
    ),
    r"x.graphml cannot be read: directed=true edge found in undirected graph\.$": (
        ".graphml",
        graphml("", '<edge source="a" target="a" directed="true"/>'),
    ),
    r"x.graphml cannot be read: GraphML reader doesn't support hyperedges\.$": (
        ".graphml",
        graphml("", "<hyperedge/>"),
    ),
    "x.graphml has no graph": (".graphml", b"<svg/>"),
    r"x.gml cannot be read: edge #0 has undefined source 2\.$": (
        ".gml",
        b"graph [ node [ id 1 ] edge [ source 2 target 1 ] ]",
    ),
    "x.json: directed is 'maybe', expected true or false": (
        ".json",
        b'{"directed": "maybe", "nodes": [{"id": 1}], "links": [{"source": 1, "target": 1}]}',
    ),
    "x.json has no graph in the form of node_link_data of networkx, but one of Cytoscape.js, expected": (
        ".json",
        b'{"elements": {"nodes": [], "edges": []}}',
    ),
    "x.json, links, row 0: source or target is a whole node, as D3 leaves it, expected its id": (
        ".json",
        b'{"nodes": [{"id": 1}], "links": [{"source": {"id": 1}, "target": 1}]}',
    ),
    "x.graphml cannot be read: unclosed token.* truncated or of another kind than .graphml": (".graphml", b"<graphml"),
    "x.gml cannot be read: expected '].*truncated": (".gml", b"graph [ node [ id 1"),
    "x.json cannot be read: Expecting": (".json", b'{"nodes": ['),
    "x.json has no graph in the form of node_link_data": (".json", b'{"nodes": [1]}'),
    "x.json, links, row 1: source or target is missing": (
        ".json",
        b'{"nodes": [{"id": 1}], "links": [{"source": 1, "target": 1}, {"source": 1}]}',
    ),
    "x.json, links, row 0: target 2 is not in x.json, nodes. Add its row there": (
        ".json",
        b'{"nodes": [{"id": 1, "y": 2}], "links": [{"source": 1, "target": 2}]}',
    ),
    "x.json has no edges, expected at least one": (".json", b'{"nodes": [{"id": 1}], "links": []}'),
    "x.mat cannot be read: .*truncated": (".mat", b"MATLAB 5.0"),
    "x.npz cannot be read: .*truncated": (".npz", b"PK"),
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_broken_graph_is_named(message: str, tmp_path: Path):
    suffix, content = BROKEN[message]
    (tmp_path / f"x{suffix}").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        from_networkx(tmp_path / f"x{suffix}", "y")


def test_what_a_file_of_matlab_holds_is_listed(tmp_path: Path):
    scipy.io.savemat(tmp_path / "two.mat", {"M": np.eye(3), "P": np.eye(4), "y": np.zeros((3, 1))})
    listed = r"two.mat holds M \(3 x 3\); P \(4 x 4\); y \(3 x 1\); "
    with pytest.raises(ValueError, match=listed + "none of .* edges: dataset.matrix=M or dataset.matrix=P"):
        from_networkx(tmp_path / "two.mat", "y")
    with pytest.raises(ValueError, match=listed + "matrix is Q, which it does not hold"):
        from_networkx(tmp_path / "two.mat", "y", matrix="Q")
    with pytest.raises(ValueError, match=r"There is no column z: two.mat has id, y"):
        from_networkx(tmp_path / "two.mat", "z", matrix="M")
    with pytest.raises(FileNotFoundError, match=r"none.gml does not exist. Give the path of a graph: .graphml"):
        from_networkx(tmp_path / "none.gml")
    sp.save_npz(tmp_path / "m.npz", sp.eye_array(3).tocsr())
    (tmp_path / "e.csv").touch()
    for name, hint in {
        "m.npz": "For scipy.sparse.save_npz, choose dataset=tables dataset.graph=",
        "two.mat": "Read it by dataset=tables dataset.graph=two.mat dataset.target=ATTRIBUTE",
        "e.csv": "Read it by dataset=tables dataset.edges=e.csv",
    }.items():
        with pytest.raises(ValueError, match=hint):
            from_file(tmp_path / name)
    with pytest.raises(ValueError, match="graph and edges are two sets of edges"):
        from_pandas(edges="e.csv", graph="g.gml")
