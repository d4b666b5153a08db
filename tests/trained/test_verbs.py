"""Predict and evaluate, over the table of kinds."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import networkx
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure
from sklearn.metrics import f1_score, roc_auc_score
from torch_geometric.data import Batch, Data
from torch_geometric.utils import is_undirected

import gat_pyg.run
from gat_pyg import calibration, evaluate, explain, load, predict
from gat_pyg.data.rows import read_rows
from gat_pyg.report import explanation_figure
from gat_pyg.runs.result import Result, result_in
from gat_pyg.runs.task import task_of
from gat_pyg.tasks.preparation import build_transform
from gat_pyg.trained import top_links
from gat_pyg.trained.export import Prepared
from gat_pyg.trained.predict import selected, table
from gat_pyg.trained.trained import Trained
from tests.commands import run_command
from tests.kinds import KINDS, Kind, M, N, tables

SMALL = ("training.max_epochs=2", "model.hidden_channels=[4]", "model.heads=[2,1]")
Runs = Callable[[Kind], tuple[Path, list[Path]]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The folder of the run on a kind, and its files: trained once."""
    runs: dict[str, tuple[Path, list[Path]]] = {}

    def run(kind: Kind) -> tuple[Path, list[Path]]:
        if kind.name not in runs:
            folder = tmp_path_factory.mktemp("kind")
            files = kind.write(folder)
            settings = " ".join(kind.settings).format(*files).split()
            run_command(*settings, *SMALL, f"hydra.run.dir={folder / 'run'}", f"outputs={folder / 'outputs'}")
            runs[kind.name] = folder / "run", files
        return runs[kind.name]

    return run


@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
def test_the_verbs_on_every_kind(kind: Kind, trained: Runs, tmp_path: Path):
    run, files = trained(kind)
    evaluation = evaluate(run)
    assert {seed: next(iter(scores.values())) for seed, scores in evaluation.scores.items()} == evaluation.recorded
    result, several = result_in(run), len(evaluation.scores) > 1
    assert result is not None and result.value == pytest.approx(next(iter(evaluation.averaged.values())), 1e-4)
    if not several:  # its other scores are repeated too
        assert {**evaluation.scores[result.seed]}.items() >= {**(result.scores or {})}.items()
    frame = predict(run, out=tmp_path / "p.csv")
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "p.csv").astype(frame.dtypes), frame)
    frame = without_rows(frame)
    assert (*frame.columns,) == (*kind.ids, *kind.columns, *(f"{name}_std" for name in kind.probabilities if several))
    model: Any = load(run, seed=0 if several else None)
    check_explanation(run, kind, model, frame)
    if "task=link_prediction" in kind.settings:
        return  # whose file has no pairs
    preparation: Any = model.preparation
    graphs = read_rows(preparation, files).graphs
    values = predict(run, graphs)
    check_exported(run, graphs, values)
    every = without_rows(predict(run, files))
    chosen = frame.merge(every, "left", [*kind.ids, *kind.columns])
    assert len(chosen) == len(frame) <= len(every) <= len(values)
    if len(every) == len(values):  # else rows without a label
        np.testing.assert_array_equal(every[[*kind.probabilities]].to_numpy().squeeze(), values.squeeze())
    if kind.later is None:
        return
    shutil.copytree(run, tmp_path / "copy")  # which works without the files of the training
    write, warning = kind.later
    with pytest.warns(UserWarning, match=warning):
        later = without_rows(predict(tmp_path / "copy", write(tmp_path)))
    names = later[[*kind.ids]].apply(lambda column: column.str.removeprefix("new"))
    later = later.assign(**names).sort_values([*kind.ids, *kind.probabilities], ignore_index=True)
    every = every.sort_values([*kind.ids, *kind.probabilities], ignore_index=True)
    known = later.merge(every[[*kind.ids]].drop_duplicates())
    pd.testing.assert_frame_equal(known, every, rtol=1e-4)


def check_exported(run: Path, graphs: list[Data], values: torch.Tensor) -> None:
    """The network that `export` writes returns the predictions, after what it leaves to its caller."""
    network = Prepared(Trained.open(run).predictor).eval()
    for transform in network.before:
        graphs = [build_transform(transform)(graph) for graph in graphs]
    inputs = Batch.from_data_list(graphs)
    network.objective.complete(inputs)
    with torch.no_grad():
        out = network(**{key: inputs[key] for key in network.widths})
    torch.testing.assert_close(out, values, rtol=1e-4, atol=1e-5)


def without_rows(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.drop(columns="row", errors="ignore")


@pytest.mark.parametrize(("name", "keep", "target"), [("nodes.csv", "city", "fraud"), ("edges.csv", "amount", "risk")])
def test_predictions_join_the_users_table(name: str, keep: str, target: str, trained: Runs):
    run, files = trained(next(kind for kind in KINDS if kind.name == name))
    table = pd.read_csv(files[name == "edges.csv"])
    frame = predict(run, files, keep=[keep])
    assert ("row" in frame) == (name == "edges.csv")  # an id names a node
    rows = table.iloc[frame["row"]] if "row" in frame else table.set_index("account").loc[frame.account]
    np.testing.assert_array_equal(frame[keep].astype(str), rows[keep].astype(str))
    for other, message in (
        ("x", f"no column x: {files[name == 'edges.csv'].name} has "),
        (target, f"two columns called {target}"),
    ):
        with pytest.raises(ValueError, match=message):
            predict(run, files, keep=[other])


def test_no_column_of_the_predictions_replaces_another(trained: Runs):
    run, files = trained(next(kind for kind in KINDS if kind.name == "nodes.csv"))
    opened = Trained.open(run)
    alike = replace(opened, preparation=replace(opened.preparation, class_names=("no", "no_std")))
    with torch.no_grad(), pytest.raises(ValueError, match="two columns called p_no_std. Rename .* or choose one seed"):
        table(alike, selected(alike, files))


@pytest.mark.parametrize("name", ["nodes.csv", "molecules.csv", "nodes.npz"])
def test_the_files_of_the_training_are_warned_of(name: str, trained: Runs, tmp_path: Path):
    run, files = trained(next(kind for kind in KINDS if kind.name == name))
    for paths in (files, [Path(shutil.copy(file, tmp_path)) for file in files]):
        with pytest.warns(UserWarning, match="files that the run was trained on, so most of these rows trained it"):
            evaluate(run, paths)


def check_explanation(run: Path, kind: Kind, model: Any, frame: pd.DataFrame) -> None:
    """The prediction of the first row is explained, and occlusion is its loss without an edge."""
    objective, first = model.objective, [frame[name].iloc[0] for name in kind.ids]
    which: dict[str, Any] = {"link": first} if objective.has_pairs else {objective.item: first[-1]}
    if len(first) == 2 and not objective.has_pairs:  # a node of several graphs
        which["graph"] = first[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gat_pyg.trained.explain.EPOCHS", 2)
        explained = explain(run, **which)
    assert explained.kinds == ["attention", "gradient", "gnn_explainer", "occlusion"]
    values = frame[[*kind.probabilities]].iloc[0].astype(float).to_numpy()
    column = 0 if objective.column == "target" else int(values.argmax())
    is_not = objective.column not in ("target", "class") and values[column] < 0.5
    before = 1 - values[column] if is_not else values[column]
    number = re.search(r"(?:= |probability )(-?[\d.e-]+)(?:,|$)", explained.prediction)
    assert number is not None and float(number[1]) == pytest.approx(before, abs=1e-3)
    has_names = isinstance(first[-1], str) or kind.ids[-1] not in ("node", "graph", "dst")
    if objective.item == "link" or has_names:
        assert {*map(str, first)} <= {*explained.names} or objective.item == "graph"
        return
    graph = read_rows(model.preparation).graphs[int(which.get("graph", 0))]
    src, dst = explained.edges.iloc[0, :2].astype(int)
    ways = [[src, dst], [dst, src]][: 1 + is_undirected(graph.edge_index)]
    kept = torch.tensor([pair not in ways for pair in graph.edge_index.t().tolist()])
    pairs = {} if objective.item != "edge" else {"edge_label_index": torch.tensor(first).view(2, 1)}
    rows = predict(run, Data(graph.x, graph.edge_index[:, kept], **pairs))
    after = float(rows[first[-1] if objective.item == "node" else 0][column])
    assert explained.edges.occlusion[0] == pytest.approx(before - (1 - after if is_not else after), abs=1e-4)


@pytest.mark.parametrize("name", ["links.npz", "pairs.csv"])
def test_the_best_links_are_those_of_all_pairs_that_are_no_links(name: str, trained: Runs):
    kind = next(kind for kind in KINDS if kind.name == name)
    run, _ = trained(kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(top_links, "NUMBERS", 64)  # several blocks
        frame = predict(run, top_k=3)
    rows = read_rows(load(run).preparation)  # type: ignore[arg-type]
    graph, names = rows.graphs[0], next(iter(rows.ids.values()), range(N))
    ends = (range(12), range(12, 27)) if name == "pairs.csv" else (range(N), range(N))
    known = {*map(tuple, graph.edge_index.t().tolist())}
    pairs = [(i, j) for i in ends[0] for j in ends[1] if i != j and (i, j) not in known]
    probability = predict(run, Data(graph.x, graph.edge_index, edge_label_index=torch.tensor(pairs).t(), num_nodes=27))
    for node, best in frame.groupby(kind.ids[0]):
        own = {names[j]: float(p) for (i, j), p in zip(pairs, probability, strict=True) if names[i] == node}
        assert best["rank"].tolist() == [1, 2, 3][: len(own)]
        np.testing.assert_allclose(best.probability, sorted(own.values(), reverse=True)[:3], rtol=1e-5)
        np.testing.assert_allclose(best.probability, [own[other] for other in best[kind.ids[1]]], rtol=1e-5)
    assert {*frame[kind.ids[0]]} == {names[i] for i, _ in pairs}
    with pytest.raises(ValueError, match="predicts links: give data.edge_label_index"):
        predict(run, Data(graph.x, graph.edge_index))


def test_recall_counts_the_links_of_each_node_that_its_best_links_have(trained: Runs, tmp_path: Path):
    run, files = trained(next(kind for kind in KINDS if kind.name == "pairs.csv"))
    data = task_of(run).test[0]
    links = {tuple(pair) for pair in data.edge_label_index[:, data.test_mask & (data.y == 1)].t().tolist()}
    held = data.edge_label_index[:, (data.val_mask | data.train_mask) & (data.y == 1)].t().tolist()
    known = {*map(tuple, data.edge_index.t().tolist()), *map(tuple, held)}
    pairs = [(i, j) for i in range(12) for j in range(12, 27) if (i, j) not in known]
    probability = predict(run, Data(data.x, data.edge_index, edge_label_index=torch.tensor(pairs).t()))
    order = [pairs[number] for number in probability.argsort(descending=True).tolist()]
    best = {i: set([pair for pair in order if pair[0] == i][:4]) for i in range(12)}
    shares = [len(best[i] & links) / len(its) for i in range(12) if (its := {pair for pair in links if pair[0] == i})]
    (scores,) = evaluate(run, top_k=4).scores.values()
    assert scores["recall@4"] == pytest.approx(np.mean(shares), abs=1e-5)

    chosen = predict(run, top_k=3).query("rank == 2")[["user", "item"]]  # new links, as later purchases
    pd.concat([chosen, pd.read_csv(files[0])[:3]]).to_csv(tmp_path / "later.csv", index=False)
    with pytest.warns(UserWarning, match=f"3 of {len(chosen) + 3} links are edges of the graph, which the model sees"):
        (scores,) = evaluate(run, tmp_path / "later.csv", top_k=2).scores.values()
    assert scores["recall@2"] == 1 and scores["roc_auc"] > 0.5


def test_other_labelled_data_are_scored_by_scikit_learn(trained: Runs):
    run, files = trained(next(kind for kind in KINDS if kind.name == "edges.pt"))
    with pytest.warns(UserWarning, match="files that the run was trained on"):
        (scores,) = evaluate(run, files).scores.values()
    y, predicted = np.arange(M) % 2, predict(run, files)
    assert scores["accuracy"] == pytest.approx(100 * (predicted["class"] == y).mean(), abs=1e-5)
    assert scores["roc_auc"] == pytest.approx(roc_auc_score(y, predicted.p_1), abs=2e-5)
    assert scores["macro_f1"] == pytest.approx(f1_score(y, predicted["class"], average="macro"), abs=2e-5)


def test_a_level_adds_sets_and_intervals(
    trained: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    kinds = {kind.name: kind for kind in KINDS}
    run, _ = trained(kinds["nodes.csv"])
    plain, frame, seeds = predict(run), predict(run, level=0.6), calibration(run)
    p = seeds.probabilities(torch.tensor(plain[["p_no", "p_yes"]].to_numpy())).numpy()
    np.testing.assert_allclose(frame[["p_no", "p_yes"]], p, rtol=1e-5)
    limit = 1 - seeds.at(0.6, seeds.quantiles)[0]
    pairs = [{"no": one >= limit, "yes": two >= limit} for one, two in p.tolist()]
    named = [
        sorted((name for name in its if its[name]), key=lambda n: -row["p_" + n])
        for its, (_, row) in zip(pairs, frame.iterrows(), strict=True)
    ]
    assert frame.fraud_set.tolist() == [" | ".join(its) for its in named]
    assert [*frame.drop(columns="fraud_set")] == [*plain]
    shutil.copytree(run, tmp_path / "copy")
    (tmp_path / "copy" / "calibration.json").unlink()
    read: list[Path] = []
    monkeypatch.setattr("gat_pyg.trained.trained.task_of", lambda run, trust: read.append(run) or task_of(run))
    again = predict(tmp_path / "copy", level=0.6)  # computed from the data, which are read once
    assert again.attrs["uncertainty"] == seeds.text(0.6) and read == [tmp_path / "copy" / "seed-0"]
    np.testing.assert_allclose(again[["p_no", "p_yes"]], p, rtol=1e-5)
    assert evaluate(run, level=0.6).uncertainty == seeds.text(0.6)
    capsys.readouterr()
    run_command("predict", str(run), "--level", "0.6", "--out", str(tmp_path / "p.csv"))
    text = f"{len(frame)} predictions in {tmp_path / 'p.csv'}\n{seeds.text(0.6)}\n"
    assert capsys.readouterr().out.startswith(text)
    run, files = trained(kinds["molecules.csv"])
    frame = predict(run, files, level=0.5)
    width = calibration(run).at(0.5, calibration(run).quantiles)[0]
    np.testing.assert_allclose(frame.logS_high - frame.logS, width, rtol=1e-4)
    np.testing.assert_allclose(frame.logS - frame.logS_low, width, rtol=1e-4)
    known = pd.read_csv(files[0]).dropna()
    known.to_csv(tmp_path / "known.csv", index=False)
    error = predict(run, tmp_path / "known.csv").logS.to_numpy() - known.logS.to_numpy()
    text = evaluate(run, tmp_path / "known.csv", level=0.5).uncertainty
    assert text == f"50 % intervals hold {100 * (abs(error) <= width).mean():.1f} % of the labels, ± {width:.3g}"
    for name, item in (("labels.pt", "2 node labels"), ("links.npz", "links")):
        with pytest.raises(ValueError, match=f"predicts {item}"):
            predict(trained(kinds[name])[0], level=0.9)


def test_the_verbs_read_labels(tmp_path: Path):
    (nodes, edges), run = tables(tmp_path), tmp_path / "run"
    for file in (nodes, edges):  # ids are numbers
        pd.read_csv(file).replace("^A", "1", regex=True).to_csv(file, index=False)
    frame, settings = pd.read_csv(nodes), ["dataset=tables", f"dataset.nodes={nodes}", f"dataset.edges={edges}"]
    small = ["training.label_rate=0.5", "encoding=columns", "training.max_epochs=1", "model=mlp", "runs=2"]
    small += ["model.hidden_channels=4"]
    small += [f"hydra.run.dir={run}", f"outputs={tmp_path}", "baselines=false"]
    run_command(*settings, "dataset.target=age", "dataset.ignore=[fraud]", *small)
    evaluation = evaluate(run)
    assert {seed: scores["rmse"] for seed, scores in evaluation.scores.items()} == evaluation.recorded
    texts = frame.drop(columns="age").astype({"account": str})
    without = predict(run, [texts, edges]).astype({"account": int})  # whose training labels are known by their ids
    own = predict(run).set_index("account").age  # those without an age
    assert own.to_dict() == pytest.approx(without.set_index("account").age[own.index].to_dict(), rel=1e-5)
    before, other = (predict(run, [each, edges]) for each in (frame, frame.assign(age=frame.age.fillna(40))))
    assert {*before.account} == {*own.index} and len(other) == len(frame)
    moved = frame.assign(age=frame.age.fillna(40))
    moved.loc[7, "age"] += 30  # changes what others predict, not its own prediction
    after = predict(run, [moved, edges])
    changed = after.age.to_numpy() != other.age.to_numpy()
    assert not changed[7] and changed.any()
    explained = explain(run, [moved, edges], node=frame.account[7]).features
    assert {"known label", "age"}.isdisjoint(explained.feature)  # its own label is hidden
    names = {"neighbours' labels", "max of the neighbours' since", "encoding edges to it", "encoding PageRank"}
    assert names <= {*explained.feature} and not explained.feature.str.fullmatch(r"encoding \d+").any()
    with pytest.raises(ValueError, match=r"reads the known labels of other nodes .*, but the data have none"):
        predict(run, Data(torch.zeros(2, 6), torch.tensor([[0], [1]]), torch.zeros(1, 3)))
    with pytest.raises(ValueError, match="reads the known labels of other nodes .*, which a file cannot do"):
        gat_pyg.export(run, tmp_path / "model.onnx")


def test_an_interrupted_run_predicts_as_when_it_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    settings = (*SMALL, "seed=3", "checkpoint_every=0", f"hydra.run.dir={tmp_path}/run", f"outputs={tmp_path}/outputs")
    with monkeypatch.context() as patch:
        patch.setattr("gat_pyg.runs.sequential.write_outputs", interrupted)
        with pytest.raises(SystemExit, match="130"):
            run_command(*settings)
    with pytest.warns(UserWarning, match=r"run is not finished: the weights are those of epoch \d, the best of 2\."):
        before = predict(tmp_path / "run"), evaluate(tmp_path / "run").scores
    run_command(*settings, "ckpt_path=last")
    after = predict(tmp_path / "run"), evaluate(tmp_path / "run").scores
    pd.testing.assert_frame_equal(before[0], after[0])
    assert before[1] == after[1]


@pytest.mark.parametrize(
    ("arguments", "message", "status"),
    [
        (["predict"], "usage: gat-pyg predict", 2),
        (["predict", "nowhere", "--top", "3"], "unrecognized arguments: --top 3", 2),
        (["predict", "nowhere"], "gat-pyg: nowhere is not a run folder", 1),
        (["predict", "nowhere", "--out", "p.xls"], "gat-pyg: p.xls ends in '.xls', expected .csv, .parquet, .jsonl", 1),
        (
            ["predct", "nowhere"],
            "predct cannot be read as a setting, expected name=value.* verb: gat-pyg --help lists them",
            1,
        ),
    ],
)
def test_wrong_usage_has_a_message(arguments: list[str], message: str, status: int, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match=str(status)):
        run_command(*arguments)
    error = capsys.readouterr().err
    assert re.search(message, error) and "Traceback" not in error


def test_the_command_writes_json_lines_and_parquet(
    trained: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    run, _ = trained(KINDS[0])
    capsys.readouterr()  # of the training, if this test is the first
    below = Result("GAT", "own", "accuracy", 50.0, 1, 9, 8, 50.0, 1.0, 0.1, 9, baselines={"neighbours' labels": 90.0})
    text = "the test score accuracy 50.0 % is worse than the neighbours' labels (90.0 %, standard error 0.0 %)"
    results = {run: below, run / "seed-0": below, run / "seed-1": replace(below, value=91.0)}
    monkeypatch.setattr("gat_pyg.trained.trained.result_in", results.get)
    for name, read, seed, warning in (  # of the prediction that is returned
        ("p.jsonl", partial(pd.read_json, lines=True), ["--seed", "1"], ""),
        ("p.parquet", pd.read_parquet, [], f"warning: {text}\n"),
    ):
        run_command("predict", str(run), *seed, "--out", str(tmp_path / name))
        frame = predict(run, seed=1 if seed else None)
        assert capsys.readouterr().out == f"{len(frame)} predictions in {tmp_path / name}\n{warning}"
        pd.testing.assert_frame_equal(read(tmp_path / name), frame, check_dtype=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.jsonl", "p.parquet"]
    run_command("evaluate", str(run), "--seed", "1")
    assert re.fullmatch(r"seed 1      accuracy \d+\.\d % \(as recorded\), balanced .*\n", capsys.readouterr().out)


def test_an_explanation_has_the_names_and_values_of_the_tables(
    trained: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("gat_pyg.trained.explain.EPOCHS", 2)
    run, files = trained(next(kind for kind in KINDS if kind.name == "nodes.csv"))
    nodes, edges = pd.read_csv(files[0], index_col="account"), pd.read_csv(files[1])
    capsys.readouterr()
    run_command("explain", str(run), "--node", "A00", "--k", "2", "--out", str(tmp_path / "e.svg"))
    assert capsys.readouterr().out.startswith("node A00: fraud = ")
    assert (tmp_path / "e.svg").read_text().rstrip().endswith("</svg>")
    graph: Any = networkx.from_pandas_edgelist(edges, "src", "dst")
    within = networkx.ego_graph(graph, "A00", 1).nodes
    expected = {frozenset(ends) for ends in graph.edges if {*ends} & {*within} and len({*ends}) == 2}
    rows = pd.read_csv(tmp_path / "e-edges.csv")
    assert {frozenset(ends) for ends in rows[["src", "dst"]].to_numpy().tolist()} == expected and len(rows) == len(
        expected
    )
    features = pd.read_csv(tmp_path / "e-features.csv").query("node == 'A00'").set_index("feature").value
    assert float(features["age"]) == pytest.approx(nodes.age["A00"], rel=1e-3) and features["city"] == nodes.city["A00"]
    assert features["since"] == nodes.since["A00"] and float(features["edges from it"]) == (edges.src == "A00").sum()
    assert (*pd.read_csv(tmp_path / "e-faithfulness.csv")["kind"],)[3:] == ("occlusion", "random")
    for options, message in {
        ("--node", "A33x"): "There is no node A33x among 40, such as A00 and A39. Did you mean A33",
        ("--graph", "0"): "The run predicts 2 node classes: give one, node=ID or --node ID",
        ("--node", "A00", "--output", "maybe"): "output is maybe, expected one of no, yes",
        ("--node", "A00", "--k", "99"): f"k is 99, expected 1 to {len(expected)}: node A00 depends on ",
    }.items():
        with pytest.raises(SystemExit, match="1"):
            run_command("explain", str(run), *options)
        assert message in " ".join(capsys.readouterr().err.split())


def test_a_prediction_without_edges_is_explained_by_its_features(trained: Runs, tmp_path: Path):
    kind = next(kind for kind in KINDS if kind.name == "nodes.csv")
    run, files = trained(kind)
    assert kind.later is not None
    write, warning = kind.later
    with pytest.warns(UserWarning, match=warning):
        of_isolated = explain(run, write(tmp_path), node="newA99")
    settings = " ".join(kind.settings).format(*files).replace("runs=2", "model=mlp training.max_epochs=1").split()
    run_command(*settings, f"hydra.run.dir={tmp_path / 'mlp'}", f"outputs={tmp_path / 'outputs'}")
    for node, explained in {"newA99": of_isolated, "A00": explain(tmp_path / "mlp", node="A00")}.items():
        assert explained.kinds == [] and explained.k == len(explained.edges) == 0
        assert set(explained.features.node) == {node} and "edges" not in str(explained).partition("features")[0]
        _, _, file = explained.write(tmp_path / "e.png")
        assert [*pd.read_csv(file)] == ["kind", "removed", "alone", "removed_std", "alone_std"]
        figure = explanation_figure(explained)
        assert figure.get_supxlabel() == "The prediction depends on no edge." and len(figure.axes) == 1


def test_a_prediction_without_features_is_explained_by_its_edges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gat_pyg.trained.explain.EPOCHS", 2)
    np.savez(tmp_path / "ring.npz", edge_index=[np.arange(N), (np.arange(N) + 1) % N], y=np.arange(N) % 2)
    places = (f"dataset.path={tmp_path / 'ring.npz'}", f"hydra.run.dir={tmp_path / 'run'}", f"outputs={tmp_path}")
    run_command("dataset=file", *places, *SMALL)
    explained = explain(tmp_path / "run", node=5)
    assert explained.edges[["src", "dst"]].to_numpy().tolist() in ([["4", "5"], ["3", "4"]], [["3", "4"], ["4", "5"]])
    assert explained.features.empty and [*explained.features] == ["node", "feature", "value", "occlusion"]
    assert explanation_figure(explained, tmp_path / "e.png").axes and (tmp_path / "e.png").exists()
    yours = Figure()
    panels = yours.subplots(1, len(explained.kinds) + 1)
    assert explanation_figure(explained, axes=panels[:-1]) is yours and yours.get_supxlabel() == ""
    titles = [panel.get_title().partition(":")[0] for panel in panels]
    assert titles == [*explained.kinds, ""] and not panels[-1].has_data()
    with pytest.raises(ValueError, match=f"axes has {len(panels)} entries, expected {len(explained.kinds)} Matplotlib"):
        explanation_figure(explained, axes=panels)
