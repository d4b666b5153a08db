"""Many graphs from files and tables: every form is the same task, later ones are read alike, faults are named."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import networkx as nx
import pandas as pd
import pytest
import torch

from gat_pyg.data import from_file, from_networkx, tables
from gat_pyg.data.content_hash import content_of
from gat_pyg.data.rows import read_rows

G = 20


def molecules(directed: bool = True) -> list[Any]:
    """Rings and paths of different sizes with names of atoms, a node without edges, and the class of each graph."""
    graphs = []
    for number in range(G):
        size = 3 + number % 5
        graph = (nx.cycle_graph if number % 2 else nx.path_graph)(size, nx.DiGraph if directed else nx.Graph)
        graph.graph.update(name=f"m{number:02}", ring=("no", "yes")[number % 2])
        graph.add_node(size)
        for node in graph:
            graph.nodes[node].update(atom="CNO"[(node + number) % 3], charge=0.5 * node)
        for u, v in graph.edges:
            graph.edges[u, v]["bond"] = "=-"[(u + v) % 2]
        graphs.append(graph)
    return graphs


def written(graphs: list[Any], folder: Path) -> dict[str, dict[str, Any]]:
    """Write graphs in every form; return the arguments of `tables` for each."""
    for kind in ("graphml", "gml"):
        (folder / kind).mkdir()
        for graph in graphs:
            getattr(nx, f"write_{kind}")(graph, folder / kind / f"{graph.graph['name']}.{kind}")
    (folder / "list.json").write_text(json.dumps([nx.node_link_data(graph, edges="links") for graph in graphs]))
    with zipfile.ZipFile(folder / "all.zip", "w") as archive:
        for graph in graphs:
            archive.write(folder / "graphml" / f"{graph.graph['name']}.graphml", f"{graph.graph['name']}.graphml")
    names = [graph.graph["name"] for graph in graphs]
    pd.DataFrame({"file": names, "ring": [graph.graph["ring"] for graph in graphs]}).to_csv(
        folder / "graphs.csv", index=False
    )
    nodes = [{"graph": g.graph["name"], "node": n} | values for g in graphs for n, values in g.nodes(data=True)]
    edges = [{"graph": g.graph["name"], "src": u, "dst": v} | at for g in graphs for u, v, at in g.edges(data=True)]
    for name, rows, key in (("nodes", nodes, "node"), ("edges", edges, "src")):  # those of several graphs alternate
        pd.DataFrame(rows).sort_values(key, kind="stable").to_csv(folder / f"{name}.csv", index=False)
    of_tables = {name: folder / f"{name}.csv" for name in ("graphs", "nodes", "edges")}
    return {
        "json": {"graph": folder / "list.json"},
        "graphml": {"graph": folder / "graphml"},
        "gml": {"graph": folder / "gml"},
        "zip": {"graph": folder / "all.zip"},
        "files": {"graph": [folder / "graphml" / f"{name}.graphml" for name in names]},
        "labels": {"graph": folder / "graphml", "graphs": folder / "graphs.csv"},
        "networkx": {"graph": graphs},
        "tables": of_tables,
    }


@pytest.mark.parametrize("directed", [False, True])
def test_every_form_is_the_same_task(directed: bool, tmp_path: Path):
    forms = written(molecules(directed), tmp_path)
    if not directed:  # an edge in a table has a direction
        del forms["tables"]
    first: Any = None
    for form, arguments in forms.items():
        task = tables(target="ring", undirected=False, name="m", val=5, test=4, **arguments)
        first = first or task
        assert task.class_names == ("no", "yes") and task.edge_dim == 2, form
        for split in ("train", "val", "test"):
            for graph, expected in zip(task.graphs(split), first.graphs(split), strict=True):
                for key in ("x", "edge_index", "edge_attr", "y"):
                    assert torch.equal(graph[key], expected[key]), (form, key)
        if form != "networkx":
            rows = read_rows(task.preparation)
            assert [name[:3] for name in rows.ids["graph"]] == [f"m{n:02}" for n in range(G)]
            assert [int(graph.y) for graph in rows.graphs] == [n % 2 for n in range(G)]
        one = molecules(directed)[3]  # later: one graph, without its label, with other ids
        del one.graph["ring"]
        one = nx.relabel_nodes(one, {node: f"atom {node}" for node in one})
        if form != "tables":
            (row,), *_ = read_rows(task.preparation, one)
            assert torch.equal(row.x, rows.graphs[3].x) and row.y is None and row.node_names[0] == "atom 0"


def test_labels_of_some_graphs_folds_and_a_column_of_splits(tmp_path: Path):
    forms = written(molecules(), tmp_path)
    frame = pd.read_csv(tmp_path / "graphs.csv").assign(part=["train"] * 12 + ["val"] * 4 + ["test"] * 4)
    frame["file"] += ".graphml"
    frame.loc[0, "ring"] = None
    frame["acid"] = [1, 3] * 10  # a feature of the graphs, beside their readout
    frame.drop(index=1).to_csv(tmp_path / "some.csv", index=False)
    task = tables(graph=forms["graphml"]["graph"], graphs=tmp_path / "some.csv", target="ring", column="part")
    assert [len(task.graphs(split)) for split in ("train", "val", "test")] == [10, 4, 4]
    assert task.train[0].graph_attr.shape == (1, 1) and "1 feature of graphs: acid" in task.notes[0]
    assert "1 of 19 graphs have no known label" in " ".join(task.notes)
    rows = read_rows(task.preparation)
    assert rows.ids["graph"][0] == "m00.graphml" and rows.graphs[0].y.tolist() == [-1] and len(rows.graphs) == 19
    tests = [tables(**forms["tables"], target="ring", folds=4, fold=fold) for fold in range(4)]
    assert tests[0].num_splits == 4 and sum(len(task.test) for task in tests) == G
    # ids of nodes that tell all nodes apart, without the graphs in the table of edges and without its other columns
    nodes, edges = (pd.read_csv(forms["tables"][name]) for name in ("nodes", "edges"))
    nodes["node"] += 100 * nodes["graph"].str[1:].astype(int)
    edges["src"], edges["dst"] = (edges[end] + 100 * edges["graph"].str[1:].astype(int) for end in ("src", "dst"))
    frame = pd.read_csv(tmp_path / "graphs.csv")
    of_ids = tables(nodes, edges.drop(columns="graph"), "ring", graphs=frame, val=4, test=4)
    task = tables(nodes, edges, "ring", graphs=frame, val=4, test=4)
    assert all(torch.equal(a.edge_index, b.edge_index) for a, b in zip(task.train, of_ids.train, strict=True))


def test_graphs_without_attributes_have_ones():
    rings = [nx.cycle_graph(3 + number % 4, nx.Graph) for number in range(G)]
    for number, graph in enumerate(rings):
        graph.graph["odd"] = number % 2
    task = from_networkx(rings, "odd")
    assert all(torch.equal(graph.x, torch.ones(len(graph.x), 1)) for graph in task.train)
    (row,), *_ = read_rows(task.preparation, nx.empty_graph(9))
    assert torch.equal(row.x, torch.ones(9, 1)) and row.edge_index.size(1) == 0


def test_without_direction_the_order_of_the_ends_has_no_effect(tmp_path: Path):
    files, options = written(molecules(), tmp_path), {"target": "ring", "undirected": True, "val": 5, "test": 4}
    edges = pd.read_csv(files["tables"]["edges"])
    other, rows, ends = edges.copy(), edges.index % 2 == 1, ["src", "dst"]
    other.loc[rows, ends] = edges.loc[rows, ends[::-1]].to_numpy()
    task, exchanged = (tables(**{**files["tables"], "edges": frame}, **options) for frame in (edges, other))
    assert task.num_features == 5  # atom, charge, and the number of edges
    for a, b in zip(task.train + task.test, exchanged.train + exchanged.test, strict=True):
        for key in ("x", "edge_index", "edge_attr"):
            assert torch.equal(a[key], b[key]), key
    of_files = tables(**files["graphml"], **options)
    assert of_files.num_features == 5 and len(read_rows(of_files.preparation, molecules()).graphs) == G


def test_what_is_missing_is_named(tmp_path: Path):
    graphs, forms = molecules(), written(molecules(), tmp_path)
    mixed = [graphs[0], graphs[1].to_undirected()]
    nodes = pd.read_csv(forms["tables"]["nodes"])
    (tmp_path / "empty").mkdir()
    faults: list[tuple[dict[str, Any], str]] = [
        ({"graph": mixed, "target": "ring"}, "graph 0 is directed, .*; graph 1 is undirected"),
        ({"graph": graphs, "target": "rings"}, r"no column rings: .*has graph, name, ring.* Did you mean ring\?"),
        ({"graph": graphs}, "choose dataset.target from the columns of graphs, graphs: name, ring"),
        ({"graph": graphs[0], "target": "ring"}, "attribute of the graph: give many graphs"),
        ({"graph": tmp_path / "empty", "target": "ring"}, "empty has no graphs, expected files that end in .graphml"),
        ({**forms["tables"], "nodes": None, "edges": None, "target": "ring"}, "need three: dataset.graphs"),
        (
            {**forms["tables"], "nodes": nodes.drop(columns="graph"), "target": "ring"},
            "no column graph: nodes has node",
        ),
        ({**forms["tables"], "nodes": nodes[nodes["graph"] != "m03"], "target": "ring"}, "file|graph"),
        ({**forms["tables"], "nodes": nodes.replace("m03", "m99"), "target": "ring"}, "'m99' is not in graphs.csv"),
        ({**forms["tables"], "nodes": pd.concat([nodes, nodes[:1]]), "target": "ring"}, "stands twice, .*m00"),
    ]
    for arguments, message in faults:
        with pytest.raises(ValueError, match=message):
            tables(**arguments)
    with pytest.raises(
        ValueError, match="gml has graphs, expected .* dataset=tables dataset.graph=gml dataset.target="
    ):
        from_file(tmp_path / "gml")
    before = content_of({"_target_": "gat_pyg.data.tables", "graph": str(tmp_path / "gml")})
    (tmp_path / "gml" / "m00.gml").write_text("graph [ node [ id 0 ] ]")
    assert None is not before != content_of({"_target_": "gat_pyg.data.tables", "graph": str(tmp_path / "gml")})
