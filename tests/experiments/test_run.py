from __future__ import annotations

import csv
import errno
import hashlib
import importlib
import json
import logging
import os
import pathlib
import pickle
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from email.message import Message
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError, URLError

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from lightning import LightningModule, Trainer
from omegaconf import OmegaConf
from safetensors.torch import load_file
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.datasets import Amazon, KarateClub, Planetoid

import gat_pyg.run
import gat_pyg.runs.folder
import gat_pyg.runs.process
import gat_pyg.runs.sequential
import gat_pyg.runs.stacked
import gat_pyg.seeds.planning
import gat_pyg.sweeps.job
import gat_pyg.sweeps.messages
import gat_pyg.training.stopping
from gat_pyg import GAT, load, predict
from gat_pyg.data import digits, from_file, links, planted
from gat_pyg.files import try_lock, unlock
from gat_pyg.kernels.cpu import cache
from gat_pyg.report.general import rows_of
from gat_pyg.report.runs import gathered
from gat_pyg.report.runs import lines_of as report_lines
from gat_pyg.runs.build import task_of
from gat_pyg.runs.folder import Run
from gat_pyg.runs.pruning import pruned_by
from gat_pyg.runs.reference_scores import Baselines
from gat_pyg.runs.result import BASELINES, Result, read
from gat_pyg.seeds import Outcome
from gat_pyg.settings.conf import VERSION_BASE, config_folder
from gat_pyg.settings.names import run_name
from gat_pyg.tasks.nodes import NodeLabels
from gat_pyg.trained.uncertainty import Rows, calibrated
from tests.graphs import amazon_files
from tests.processes import python

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated")

Command = Callable[..., str]
SMALL = ("model=mlp", "model.hidden_channels=8", "training.lr=0.05")
NORM = ("model._target_=torch_geometric.nn.MLP", "+model.norm=batch_norm", "+model.norm_kwargs.momentum=null")

LEFT_BY_A_SEED = {"config.yaml", "metrics.csv", "model.safetensors", "result.json"}
FAILS_FOR_SEED_1 = """
import gat_pyg.runs.workers as shared
from gat_pyg.settings.errors import message
from gat_pyg.run import main

def one_run(settings, task, seed, folder, run=shared.one_run):
    if seed == 1:
        raise ValueError("bad luck")
    return run(settings, task, seed, folder)

shared.one_run, shared.message = one_run, str
main()
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory of its own, one thread, and nothing left behind in the environment."""
    monkeypatch.chdir(tmp_path)
    before = os.environ.copy()
    torch.use_deterministic_algorithms(False)  # whatever an earlier test left
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(threads)
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run the command in this process; returns its stdout, or its stderr if it `fails`."""

    def run(*arguments: str, fails: bool = False) -> str:
        monkeypatch.setattr(sys, "argv", ["gat-pyg", *arguments])
        if not fails:
            gat_pyg.run.main()
            return capsys.readouterr().out
        with pytest.raises(SystemExit) as stopped:
            gat_pyg.run.main()
        assert stopped.value.code == 1
        error = capsys.readouterr().err
        assert "Traceback" not in error
        return error

    return run


def outside(*arguments: str) -> Any:
    """The command in a process of its own."""
    return python("-m", "gat_pyg.run", *arguments, env={**os.environ, "OMP_NUM_THREADS": "1"})


def runs(folder: str = "outputs") -> list[Path]:
    return sorted(path.parent for path in Path(folder).rglob("model.safetensors"))


def graph_of(y: np.ndarray[Any, Any] | None = None, N: int = 60, **arrays: Any) -> dict[str, Any]:
    """The arrays of a random graph, whose edges have one direction each."""
    draw = np.random.default_rng(0)
    return {
        "x": draw.random((N, 4)),
        "edge_index": np.sort(draw.integers(0, N, (2, 4 * N)), axis=0),
        **({} if y is None else {"y": y}),
    } | arrays


# Files of a run --------------------------------------------------------------------------------------------------


def test_a_run_leaves_its_settings_metrics_weights_and_one_line(command: Command):
    output = command(*SMALL, "seed=5", "training.max_epochs=20")
    (folder,) = runs()
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.yaml",
        "metrics.csv",
        "model.safetensors",
        "result.json",
    ]
    assert sorted(path.name for path in Path("outputs").iterdir()) == sorted([folder.name, "results.jsonl"])
    (result,) = read("outputs/results.jsonl")
    assert result == Result.from_json((folder / "result.json").read_text())
    assert (result.method, result.dataset, result.metric, result.seed, result.epochs) == (
        "MLP",
        "digits",
        "accuracy",
        5,
        20,
    )
    assert result.versions is not None
    assert torch.__version__.startswith(result.versions["torch"])  # whose build (+cu130) a package need not tell
    assert Path(result.run_dir) == folder.absolute()
    settings = OmegaConf.load(folder / "config.yaml")
    assert (settings.seed, settings.training.max_epochs, settings.results) == (5, 20, "outputs/results.jsonl")
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["epoch"]) for row in rows] == list(range(1, 21))
    assert float(rows[result.best_epoch - 1]["val_accuracy"]) == pytest.approx(result.val)
    for words in (
        "digits",
        "MLP",
        f"20 (best {result.best_epoch}; reached max_epochs=20)",
        f"accuracy {result.value:.1f} %",
        str(folder),
        "outputs/results.jsonl",
    ):
        assert words in output


MODELS = {  # the argument -> the method in the Result
    "model=mlp": "MLP",
    "model=gat": "GAT",
    "model=const_gat": "Const-GAT",
    "model.mechanism=gatv2 model.reproduction=false": "GAT",
    "~model.mechanism +model.mechanism._target_=gat_pyg.conv.DotProduct": "GAT",
    "model=mlp model._target_=torch_geometric.nn.GCN": "GCN",
    "model=mlp model._target_=torch_geometric.nn.GAT": "PyG's GAT",
}


@pytest.mark.parametrize("model", MODELS)
def test_a_trained_model_comes_back_with_its_score(command: Command, model: str):
    command(*model.split(), "training.max_epochs=2", "training.lr=0.05")
    (result,) = read("outputs/results.jsonl")
    assert result.method == MODELS[model]
    trained, data = load(result.run_dir), digits().test[0]
    arguments = (data.x,) if model == "model=mlp" else (data.x, data.edge_index)
    with torch.no_grad():
        out = trained(*arguments)
    assert torch.equal(load(Path(result.run_dir) / "model.safetensors")(*arguments), out)
    assert not torch.are_deterministic_algorithms_enabled()  # the run's setting ends with the run
    right = (out.argmax(1) == data.y)[data.test_mask]
    assert 100 * right.float().mean().item() == pytest.approx(result.value, abs=1e-4)


def predicted(run: str | Path, reads: str) -> tuple[float, list[int], tuple[str, ...] | None]:
    """The score, the shape of the prediction and the class names, of data that other code reads."""
    names: dict[str, Any] = {"torch": torch}
    exec(reads, names)
    out, model = predict(run, names["data"]), load(run)
    right = (out.argmax(1) == names["data"].y)[names["mask"]].double().mean().item()
    return 100 * right, [*out.shape], model.preparation.class_names  # type: ignore[union-attr, return-value]


def test_a_run_on_a_file_predicts_from_the_same_arrays_read_by_numpy(command: Command, tmp_path: Path):
    data = digits().test[0]
    masks = {key: data[key].numpy() for key in ("train_mask", "val_mask", "test_mask")}
    edge_attr = np.random.default_rng(0).random(data.num_edges)  # float64 [E], which becomes float32 [E, 1]
    arrays = {"x": data.x.double().numpy(), "edge_index": data.edge_index.numpy(), "y": data.y.numpy()}
    np.savez(tmp_path / "mine.npz", edge_attr=edge_attr, **arrays, **masks)
    command("dataset=file", "dataset.path=mine.npz", "training.max_epochs=3", "training.lr=0.05")
    (result,) = read("outputs/results.jsonl")
    reads = """
import numpy
from torch_geometric.data import Data
arrays = {key: torch.from_numpy(value) for key, value in numpy.load("mine.npz").items()}
data, mask = Data(**arrays), arrays["test_mask"]
"""
    score, shape, names = predicted(result.run_dir, reads)
    assert score == pytest.approx(result.value, abs=1e-5)
    assert (shape, names) == ([1797, 10], None)
    trained, data = load(result.run_dir), digits().test[0]
    with pytest.warns(
        UserWarning, match=r"row of x has the absolute sum 313 .*, but those of the run.s training data 15\.7 to 24\.8"
    ):
        trained(16 * data.x, data.edge_index, edge_attr=torch.ones(data.num_edges, 1))
    with pytest.raises(ValueError, match=r"edge_attr is missing, expected \(E, 1\)"):
        predict(result.run_dir, data)


def test_a_transform_of_the_settings_is_applied_to_the_same_data_set_without_it(command: Command):
    karate = ("dataset._target_=torch_geometric.datasets.KarateClub", "split.val=10", "split.test=15")
    profile = "+dataset.transform._target_=torch_geometric.transforms.LocalDegreeProfile"  # five features more
    command(*karate, profile, "training.max_epochs=5")
    (result,) = read("outputs/results.jsonl")
    reads = """
from gat_pyg.data import from_dataset
from torch_geometric.datasets import KarateClub
data, mask = KarateClub()[0], from_dataset(KarateClub(), val=10, test=15).test[0].test_mask
"""
    score, shape, _ = predicted(result.run_dir, reads)
    assert score == pytest.approx(result.value, abs=1e-5)
    assert shape == [34, 4]
    raw = KarateClub()[0]
    preparation: Any = load(result.run_dir).preparation
    once = preparation(raw)
    assert (raw.x.size(1), once.x.size(1)) == (34, 39)
    assert torch.equal(preparation(once).x, once.x)  # it is recognised as prepared
    with pytest.raises(ValueError, match=r"x has shape \(34, 34\), expected \(N, 39\)"):
        load(result.run_dir)(raw.x, raw.edge_index)


def test_links_are_predicted_with_their_recorded_scores(command: Command):
    settings = (
        "dataset._target_=gat_pyg.data.links",
        "+dataset.dataset._target_=gat_pyg.data.digits",
        "model.dropout=0",
    )
    output = command(*settings, "+dataset.name=pairs", "+model.decoder=mlp", "training.max_epochs=3", "runs=2")
    result, _ = read("outputs/results.jsonl")
    assert (result.item, result.metric, result.majority) == ("link", "roc_auc", 0.5) and result.scores is not None
    assert result.scores.keys() == {"average_precision", "mrr", "hits@20", "hits@50", "hits@100"} and "also" in output
    data = links(digits()).train[0]
    test = Data(data.x, data.edge_index, edge_label_index=data.edge_label_index[:, data.test_mask])
    y, probabilities = data.y[data.test_mask], predict(result.run_dir, test)
    assert roc_auc_score(y, probabilities) == pytest.approx(result.value, abs=2e-5)
    assert average_precision_score(y, probabilities) == pytest.approx(result.scores["average_precision"], abs=2e-5)
    mean = roc_auc_score(y, predict(Path(result.run_dir).parent, test, seed="all"))
    assert f"(averaged prediction {mean:.3f}, " in output
    with pytest.raises(ValueError, match="predicts links: give data.edge_label_index"):
        predict(result.run_dir, Data(data.x, data.edge_index))
    assert "whose ends may be in two parts" in command(*settings, "loader=cluster", "loader.num_parts=2", fails=True)


@pytest.mark.skipif("GAT_PYG_DATA" not in os.environ, reason="GAT_PYG_DATA names no folder with the real data")
@pytest.mark.parametrize("reproduction", ["false", "true"])
def test_a_run_on_cora_predicts_from_what_pyg_reads(command: Command, tmp_path: Path, reproduction: str):
    command("dataset=cora", f"model.reproduction={reproduction}", "training.max_epochs=5")
    (result,) = read("outputs/results.jsonl")
    shutil.copytree(Path(os.environ["GAT_PYG_DATA"]) / "Planetoid" / "Cora" / "raw", tmp_path / "Cora" / "raw")
    reads = f"""
from torch_geometric.datasets import Planetoid
data = Planetoid({str(tmp_path)!r}, "Cora")[0]
mask = data.test_mask
"""
    score, shape, names = predicted(result.run_dir, reads)
    assert score == pytest.approx(result.value, abs=1e-5)
    assert (shape, names[3]) == ([2708, 7], "Neural Networks")
    data = Planetoid(str(tmp_path), "Cora")[0]
    with pytest.warns(
        UserWarning, match=r"the absolute sum 20 \(median\), .* training data 1\. .* prepared by NormalizeFeatures"
    ):
        load(result.run_dir)(data.x, data.edge_index)


class Prior(nn.Module):
    """A method that fits itself: the class that most training nodes have, and chance."""

    def __init__(self, in_channels: int, out_channels: int, **others: Any) -> None:
        super().__init__()
        self.register_buffer("logits", torch.zeros(out_channels))

    def fit(self, data: Data) -> None:
        self.logits += data.y[data.train_mask].bincount(minlength=len(self.logits)) + torch.rand(()).log()

    def forward(self, x: Tensor) -> Tensor:
        return self.logits.expand(len(x), -1)


def test_a_method_that_fits_itself_writes_the_same_files(command: Command):
    command("model=mlp", f"model._target_={__name__}.Prior", "runs=2")
    results, data = read("outputs/results.jsonl"), digits().test[0]
    assert [(one.method, one.epochs, one.seed) for one in results] == [("Prior", 0, 0), ("Prior", 0, 1)]
    logits = [load(one.run_dir, model=Prior(64, 10)).logits for one in results]
    assert not logits[0].equal(logits[1])  # each seed has its chance
    right = (data.y == logits[0].argmax()).double() * 100
    for one in results:
        assert one.value == pytest.approx(right[data.test_mask].mean().item(), abs=1e-4)
        assert one.val == pytest.approx(right[data.val_mask].mean().item(), abs=1e-4)


class Constant(nn.Module):
    """A model that sees nothing: the same logits for all nodes."""

    def __init__(self, in_channels: int, out_channels: int, **others: Any) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(out_channels))

    def forward(self, x: Tensor) -> Tensor:
        return self.logits.expand(len(x), -1)


@pytest.mark.parametrize(("dataset", "vectorize"), [("digits", "auto"), ("digits", "off"), ("planted", "auto")])
def test_a_constant_prediction_is_warned_of(
    command: Command, dataset: str, vectorize: str, monkeypatch: pytest.MonkeyPatch
):
    if dataset == "planted":  # as if it were a long training
        monkeypatch.setattr("gat_pyg.sweeps.job.LARGE", 0)
        calls: list[str] = []
        for place in ("sweeps.job", "runs.sequential"):
            once = partial(lambda place, *_: calls.append(place) or Baselines({"linear model": 0.0}, 0.0), place)
            monkeypatch.setattr(f"gat_pyg.{place}.baselines_of", once)
    output = command(
        "model=mlp",
        f"model._target_={__name__}.Constant",
        f"dataset={dataset}",
        f"vectorize={vectorize}",
        "runs=2",
        "training.max_epochs=2",
        "baselines=true",
    )
    first, _ = read("outputs/results.jsonl")
    if dataset == "digits":
        assert first.baselines is not None and first.baselines.keys() == {"linear model", "random forest", "degrees"}
        score = max(first.baselines.values())
        assert output.count(f"worse than {BASELINES[first.best_baseline]} ({score:.1f} %, standard error ") == 3
        assert f"\nbaselines   linear model {first.baselines['linear model']:.1f} %, random" in output
        assert "\ntry " in output
        data = digits().test[0]
        majority = 100 * data.y[data.test_mask].bincount().max() / 1000
        assert first.majority == pytest.approx(majority.item())
        message = f"no better than predicting the majority class for every node ({majority:.1f} %)"
    else:
        message = f"no better than the best prediction that is the same for every node ({first.majority:.3f})"
        assert calls == ["sweeps.job", "runs.sequential", "runs.sequential"]  # before the training, too
    assert first.value <= first.majority
    assert output.count(message) == 3  # of each seed and of both
    assert f"\nwarning     2 of 2 runs are {message}" in output


def test_a_network_without_an_output_layer_takes_the_lists_of_one_with_it(command: Command):
    settings = [setting for setting in many_graphs() if "folds" not in setting]
    for arguments in (
        ["model.jk=cat"],
        ["dataset=file", "+recipe/setup=planted", *settings, "model.readout=attentional", *KARATE],
    ):
        command(*arguments, "training.max_epochs=1")
        model = load(read("outputs/results.jsonl")[-1].run_dir)
        assert [conv.heads for module in model.modules() if isinstance(module, GAT) for conv in module.convs] == [8]
    error = command("model.jk=cat", "model.heads=[4,1]", fails=True)
    assert "model.heads has no effect: the last entry, 1, is for an output layer" in error


def test_a_training_that_cannot_learn_is_warned_of(command: Command):
    with (
        pytest.warns(UserWarning, match=r"training\.lr is 0, so the weights keep"),
        pytest.warns(UserWarning, match=r"model\.dropout is 1, so training drops everything"),
        pytest.warns(UserWarning, match=r"model\.edge_dropout is 1"),
    ):
        command("training.lr=0", "model.dropout=1", "model.edge_dropout=1", "training.max_epochs=1")


@pytest.mark.parametrize(
    ("epochs", "best", "criterion", "text"),
    [
        (346, 80, "both", "346 (best 80; stopped: neither score nor loss improved for 100)"),
        (180, 80, "accuracy", "180 (best 80; stopped: the score did not improve for 100)"),
        (180, 80, "loss", "180 (best 80; stopped: the loss did not improve for 100)"),
        (90, 80, "both", "90 (best 80; stopped: diverged)"),
        (400, 80, "loss", "400 (best 80; reached max_epochs=400)"),
        (0, 0, "both", ""),
    ],
)
def test_summary_has_the_reason_of_the_stop(epochs: int, best: int, criterion: str, text: str):
    settings: Any = SimpleNamespace(
        training=SimpleNamespace(patience=100, criterion=criterion), trainer={"max_epochs": 400}
    )
    result = Result("GAT", "d", "accuracy", 80.0, 0, epochs, best, 80.0, 1.0, 0.1, 9)
    assert gat_pyg.sweeps.messages.epochs(result, settings) == text


def test_summary_has_the_sizes_and_no_warning_for_a_model_that_learns(command: Command):
    output = command(*SMALL, "training.max_epochs=20")
    (result,) = read("outputs/results.jsonl")
    assert result.value > result.majority
    assert "warning" not in output
    assert "data set    digits: 1,797 nodes, 12,618 edges, 10 node classes; 200 / 500 / 1,000 nodes\n" in output
    output = command("dataset=planted", *SMALL, "training.max_epochs=1")
    graphs = [data for split in (planted().train, planted().val, planted().test) for data in split]
    edges = sum(data.num_edges for data in graphs)
    assert f"planted: {100 * len(graphs):,} nodes, {edges:,} edges, 16 node labels; 20 / 5 / 5 graphs\n" in output


def test_the_score_for_a_sweeper_is_highest_for_the_best(command: Command, monkeypatch: pytest.MonkeyPatch):
    scores = []
    execute = gat_pyg.sweeps.job.execute
    monkeypatch.setattr(gat_pyg.sweeps.job, "execute", lambda config: scores.append(execute(config)))
    command(*QUANTITIES, *SMALL, "metric=rmse", "runs=2", "training.max_epochs=2")
    assert scores == pytest.approx([-np.mean([result.val for result in read("outputs/results.jsonl")])])


def test_several_seeds_each_leave_their_line_and_a_mean(command: Command):
    small = (*SMALL, "training.max_epochs=5")
    output = command(*small, "runs=3", "seed=4")
    results = read("outputs/results.jsonl")
    assert [result.seed for result in results] == [4, 5, 6]
    assert [path.name for path in runs()] == ["seed-4", "seed-5", "seed-6"]
    assert len({result.config_hash for result in results}) == 1
    values = [result.value for result in results]
    assert f"3 runs: test accuracy {np.mean(values):.1f} ± {np.std(values, ddof=1):.1f} %" in output
    command(*small, "seed=5")
    again = read("outputs/results.jsonl")[-1]
    assert (again.value, again.config_hash) == (results[1].value, results[1].config_hash)  # the seed alone decides


@pytest.mark.parametrize("model", ["gat", pytest.param("mlp", marks=pytest.mark.weekly)])
def test_seeds_together_leave_what_they_leave_one_by_one(command: Command, model: str):
    arguments = (f"model={model}", "model.dropout=0.0", "runs=3", "training.max_epochs=8", "training.patience=5")
    output = {}
    for vectorize, size in (("off", "auto"), ("auto", "auto"), ("on", 2)):
        how = (f"vectorize={vectorize}", f"seeds_per_pass={size}", f"outputs={vectorize}")
        output[vectorize] = command(*arguments, *how)
    last = {
        how: re.search("^digits, 3 runs: .*(?:\n(?:epochs|validation) .*){2}", text, re.M)
        for how, text in output.items()
    }
    assert last["off"][0] == last["auto"][0] == last["on"][0]  # with the score of the averaged prediction
    assert re.fullmatch(
        r"seed 0: \d+ epochs, best \d+, validation accuracy \d+\.\d %, test accuracy \d+\.\d %",
        output["auto"].splitlines()[0],
    )
    single = read("off/results.jsonl")
    for place in ("auto", "on"):
        for one, other in zip(single, read(f"{place}/results.jsonl"), strict=True):
            assert other.seconds > 0 and (other.peak_mib is None or 100 < other.peak_mib < 10_000)
            differ = ("seconds", "seconds_per_epoch", "peak_mib", "run_dir", "timestamp")
            assert replace(other, **{key: getattr(one, key) for key in differ}) == one
        for a, b in zip(runs("off"), runs(place), strict=True):
            assert sorted(path.name for path in a.iterdir()) == sorted(path.name for path in b.iterdir())
            assert OmegaConf.load(a / "config.yaml").seed == OmegaConf.load(b / "config.yaml").seed
            assert_close(a, b)


def assert_close(a: Path, b: Path) -> None:
    """The runs in two folders have the same weights and metrics up to rounding."""
    for key, value in weights(a).items():
        torch.testing.assert_close(weights(b)[key], value, rtol=1e-3, atol=1e-4)
    rows = [csv.DictReader((folder / "metrics.csv").read_text().splitlines()) for folder in (a, b)]
    for one, other in zip(*rows, strict=True):
        assert one.keys() == other.keys()
        assert [float(other[key]) for key in one] == pytest.approx([float(one[key]) for key in one], rel=1e-3)


def test_the_averaged_prediction_is_that_of_the_stack(command: Command):
    output = command("model=gat", "runs=3", "training.max_epochs=3")
    (folder,) = {path.parent for path in runs()}
    stack, data = load(folder, seed="all"), digits().test[0]
    with torch.no_grad():
        out = stack(data.x, data.edge_index)  # [S, N, K]
        for seed in range(3):
            torch.testing.assert_close(load(folder, seed=seed)(data.x, data.edge_index), out[seed])
    p = out.softmax(-1).double().mean(0)
    right = (p.argmax(-1) == data.y)[data.test_mask].double().mean().item()
    assert f"(averaged prediction {100 * right:.1f} %, " in output
    rows = [Rows(p[data[f"{split}_mask"]], data.y[data[f"{split}_mask"]]) for split in ("val", "test")]
    own = "the split is the data's own, and coverage holds if validation and test have the same distribution"
    assert f"uncertainty {calibrated(NodeLabels(10), *rows, own).text()}\n" in output


def test_seeds_of_many_graphs_together_name_the_seed_of_their_order(command: Command):
    many = ("dataset=planted", "dataset.graphs=8", *SMALL, "training.batch_size=2", "training.max_epochs=3")
    command(*many, "runs=3", "seed=5", "seeds_per_pass=2")
    command(*many, "seed=5", "outputs=alone")
    first, second, third = read("outputs/results.jsonl")
    assert (first.order, second.order, third.order) == (None, 5, 5)
    assert first.config_hash == second.config_hash
    (alone,) = read("alone/results.jsonl")
    assert alone.config_hash == first.config_hash and alone.value == pytest.approx(first.value, rel=1e-4)
    assert '"order"' not in Path("alone/results.jsonl").read_text()


@pytest.mark.kernels
@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL is a POSIX signal")
def test_processes_share_seeds_that_are_trained_one_by_one(command: Command):
    seeds = (*SMALL, "runs=4", "vectorize=off", "training.max_epochs=20", "checkpoint_every=0")
    one = command(*seeds, "outputs=one")
    process = outside(*seeds, "processes=2", "outputs=two")
    while process.poll() is None and len(list(Path("two").rglob("last.ckpt"))) < 2:  # of two seeds at once
        time.sleep(0.005)
    kill(process)
    assert len(list(Path("two").rglob("last.ckpt"))) == 2
    process = outside(*seeds, "processes=2", "outputs=two", "ckpt_path=last")
    output, stderr = process.communicate(timeout=200)
    assert process.returncode == 0, stderr
    assert [line for line in output.splitlines() if "seed " in line] == [
        line for line in one.splitlines() if "seed " in line
    ]  # in the same order
    assert "\ndigits, 4 runs: test accuracy" in output
    values_ = [{result.seed: result.value for result in read(f"{place}/results.jsonl")} for place in ("one", "two")]
    assert values_[0] == values_[1] and len(values_[0]) == 4
    (folder,) = {path.parent for path in runs("two")}
    for inner in folder.glob("seed-*"):
        assert {path.name for path in inner.iterdir()} == LEFT_BY_A_SEED


@pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")
def test_a_seed_that_fails_in_a_process_is_named(place: Path):
    (place / "outside.py").write_text(FAILS_FOR_SEED_1)
    process = python("outside.py", "model=mlp", "runs=3", "vectorize=off", "processes=2", "training.max_epochs=2")
    _, stderr = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "seed 1 failed: bad luck" in stderr, stderr
    assert "gat-pyg: The process that trained seed 1 failed, as printed above. The same command with" in stderr


ORPHANS = """
import os, signal, sys, time
from contextlib import suppress
from pathlib import Path
from gat_pyg.run import main

def late(number, parent=os.getpid()):  # called first in each process: the job dies before
    with open("children", "a") as file:
        print(os.getpid(), file=file, flush=True)
    with suppress(ProcessLookupError):
        os.kill(parent, signal.SIGKILL)
    while os.getppid() == parent:
        time.sleep(0.01)
    set_signal(number)

spawn = sys.modules["torch.multiprocessing.spawn"]
set_signal, spawn._prctl_pr_set_pdeathsig = spawn._prctl_pr_set_pdeathsig, late
main()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads states from /proc")
@pytest.mark.parametrize("how", [("vectorize=off", "processes=2"), ("vectorize=on", "trainer=ddp_cpu")], ids="-".join)
def test_processes_whose_job_died_while_they_started_train_nothing(place: Path, how: tuple[str, ...]):
    (place / "orphans.py").write_text(ORPHANS)
    process = python("orphans.py", *SMALL, "runs=2", "training.max_epochs=3", *how)
    process.communicate(timeout=60)
    children = (place / "children").read_text().split()
    assert process.returncode == -signal.SIGKILL and children

    def is_running(child: str) -> bool:
        with suppress(FileNotFoundError):
            return Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        return False

    while any(map(is_running, children)):
        time.sleep(0.01)
    assert not [*Path("outputs").rglob("metrics.csv"), *Path("outputs").rglob("result.json")]


def test_a_job_waits_for_the_processes_of_the_one_that_was_killed(place: Path, monkeypatch: pytest.MonkeyPatch):
    folder = gat_pyg.runs.folder
    child = try_lock(place / "1.lock")
    part = place / ".result.json.7.part"  # which it is writing
    part.touch()
    monkeypatch.setattr(folder.time, "sleep", lambda seconds: (part.unlink(), unlock(place / "1.lock", child)))
    with folder.Job(None, place).held(try_lock(place / ".lock")):
        assert not part.exists()
    assert not [*place.iterdir()]


def test_a_rank_whose_first_rank_died_while_it_started_ends(place: Path, monkeypatch: pytest.MonkeyPatch):
    folder = gat_pyg.runs.folder
    monkeypatch.setattr(folder, "is_first", lambda: False)
    monkeypatch.setenv(folder.RUN_DIR, str(place))
    monkeypatch.setenv(folder.PARENT, str(os.getppid()))
    with folder.started_job(None, folder.Invocation(place, False, None, ())) as job:
        assert job.folder == place
    monkeypatch.setenv(folder.PARENT, str(os.getpid()))  # as if another process were the parent now
    with pytest.raises(SystemExit, match="1"), folder.started_job(None, folder.Invocation(place, False, None, ())):
        pytest.fail("it goes on")


def test_reasons_for_sequential_training_are_printed(command: Command, monkeypatch: pytest.MonkeyPatch):
    def says(*arguments: str) -> str:
        output: list[str] = []
        with monkeypatch.context() as patch:
            patch.setattr(gat_pyg.runs.stacked, "rank_zero_print", output.append)
            command(*SMALL, "runs=2", "training.max_epochs=1", *arguments)
        return "\n".join(output)

    assert says() == says("vectorize=off") == ""
    with monkeypatch.context() as patch:
        patch.setattr(gat_pyg.seeds.planning, "CPU_BUDGET", 1)
        small = r"digits: 2 runs one by one, since a run takes \d+ MiB, and only one fits in memory at a time"
        assert re.fullmatch(small, says())
    many = ("dataset=planted", "dataset.graphs=6")
    assert says(*many) == "planted: 2 runs as one, on the same batches of graphs, in the order of seed 0"
    with monkeypatch.context() as patch:
        patch.setattr(gat_pyg.runs.stacked, "LARGE", 1000)
        large = r"planted: 2 runs one by one, since a step has \d+ million elements, and so .* not faster as one"
        assert re.fullmatch(large, says(*many))
    compiles = ("training.compile=true", "training.max_epochs=1")
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: None)
    assert says(*compiles) == "digits: 2 runs one by one, since training.compile is true"
    reason = "it calls .item() on a tensor, which torch.func.vmap does not allow"
    assert says(*NORM) == f"digits: 2 runs one by one, since MLP cannot be stacked: {reason}"
    assert "since gradients would be clipped over all seeds" in says("+trainer.gradient_clip_val=1.0")
    assert "whose scale would be that of all seeds" in says("+trainer.precision=bf16-mixed")
    assert len(read("outputs/results.jsonl")) == 2 * 9


@pytest.mark.filterwarnings("ignore:.* are not a category of (the )?training")
def test_test_rows_change_no_bit_of_the_weights(command: Command, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    tables = importlib.import_module("tables")
    for name in ("node classes", "links", "molecules", "series"):
        case, weights = tables.CASES[name], []
        for change in (None, case.changed):
            draw = np.random.default_rng(0)
            files = case.files(draw, 40)
            if change is not None:
                change(files, draw)
            tables.save_files(files, Path())
            shutil.rmtree("outputs", ignore_errors=True)
            command(*case.settings, "baselines=false", "training.max_epochs=2")
            weights.append(load_file(runs()[0] / "model.safetensors"))
        before, after = weights
        assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before), name


@pytest.mark.parametrize("kind", ["folder", "links"])  # links of a file
@pytest.mark.filterwarnings("ignore:mine. keys that are not read")
def test_hash_includes_the_content_of_files(command: Command, kind: str):
    def write(seed: int) -> None:
        draw = np.random.default_rng(seed)
        edge_index = np.sort(draw.integers(0, 60, (2, 200)), axis=0)
        arrays = {"x": draw.random((60, 4)), "y": draw.integers(0, 3, 60), "edge_index": edge_index}
        np.savez("mine.npz", **arrays)
        Path("mine").mkdir(exist_ok=True)
        for name, values in (arrays | {"ignored": draw.random(3)}).items():
            np.save(f"mine/{name}.npy", values)

    path = "mine" if kind == "folder" else "mine.npz"
    arguments = [*SMALL, "dataset=file", f"dataset.path={path}", "split.per_class=5", "split.val=10", "split.test=10"]
    if kind == "links":
        links = ("dataset._target_=gat_pyg.data.links", "+dataset.dataset._target_=gat_pyg.data.from_file")
        split = [f"+dataset.dataset.{key}={size}" for key, size in (("per_class", 5), ("val", 10), ("test", 10))]
        arguments = [*SMALL, *links, f"+dataset.dataset.path={path}", *split]
    for seed in (0, 0, 1):
        write(seed)
        command(*arguments, "training.max_epochs=2")
    first, again, other = read("outputs/results.jsonl")
    assert (first.config_hash, first.data) == (again.config_hash, again.data)
    assert first.config_hash != other.config_hash and first.data != other.data
    assert len(rows_of(gathered(report_lines("outputs/results.jsonl")))["MLP"]) == 2  # columns
    Path(first.run_dir, "result.json").unlink()
    shutil.rmtree(again.run_dir)
    error = command(*arguments, "training.max_epochs=2", f"hydra.run.dir={first.run_dir}", "ckpt_path=last", fails=True)
    assert re.search(r"other settings: the content of the data files was \w{12}, is \w{12}\. Resume", error)
    shutil.rmtree(other.run_dir)
    error = command(*arguments, "training.max_epochs=2", "ckpt_path=last", fails=True)
    assert re.search(r"the same settings, but the content of the data files was \w{12}, is .* Restore the file", error)
    with pytest.raises(ValueError, match=r"The content of the data files was \w{12} when the run began, is \w{12}"):
        task_of(first.run_dir)
    write(0)
    assert Path(first.run_dir).name in command(*arguments, "training.max_epochs=2", "ckpt_path=last")


def test_hash_includes_the_source_of_own_classes(command: Command, place: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder not in ("", str(place))])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (place / "mine.py").write_text(
        "from collections.abc import Sized\nimport parts\nclass Net(parts.Base):\n    pass\n"
    )
    settings = ("model=mlp", "model._target_=mine.Net", "model.num_layers=2", "training.max_epochs=1")
    for base in ("MLP", "MLP", "GCN"):
        for name in ("mine", "parts"):
            sys.modules.pop(name, None)
        (place / "parts.py").write_text(f"from torch_geometric.nn import {base} as Base\n")
        command(*settings)
    first, again, other = read("outputs/results.jsonl")
    assert first.config_hash == again.config_hash != other.config_hash
    changed = r"the source of your own classes was \w{12}, is \w{12}"
    for result in (other, again):
        shutil.rmtree(result.run_dir)
    assert re.search(
        rf"the same settings, but {changed}\. Restore the file", command(*settings, "ckpt_path=last", fails=True)
    )
    (place / "parts.py").write_text("from torch_geometric.nn import MLP as Base\n")
    sources = b"".join(
        name.encode() + (place / f"{name}.py").read_bytes() for name in ("mine", "parts")
    )  # and no other
    assert OmegaConf.load(Path(first.run_dir) / "config.yaml").code == hashlib.sha256(sources).hexdigest()[:12]


def test_dataset_from_a_file_and_from_a_class_of_pyg(command: Command):
    np.savez("mine.npz", **graph_of(np.arange(60) % 3))
    split = ("split.per_class=5", "split.val=10", "split.test=10")
    command("dataset=file", "dataset.path=mine.npz", *split, *SMALL, "training.max_epochs=2")
    fake = ("dataset._target_=torch_geometric.datasets.FakeDataset", "+dataset.num_graphs=9")
    command(*fake, "+dataset.task=node", "split.val=2", "split.test=2", *SMALL, "training.max_epochs=2")
    assert [result.dataset for result in read("outputs/results.jsonl")] == ["mine", "fakedataset"]


@pytest.mark.parametrize("reproduction", ["false", "true"])
def test_few_non_zeros_are_a_sparse_matrix(command: Command, monkeypatch: pytest.MonkeyPatch, reproduction: str):
    draw = np.random.default_rng(0)
    x = draw.random((60, 100)) * (draw.random((60, 100)) < 0.05)
    np.savez("mine.npz", x=x, y=draw.integers(0, 3, 60), edge_index=draw.integers(0, 60, (2, 200)))
    arguments = ("dataset=file", "dataset.path=mine.npz", "split.per_class=5", "split.val=10", "split.test=10")
    arguments += ("model=gat", f"model.reproduction={reproduction}", "training.max_epochs=2")
    layouts, reports = [], []
    forward = GAT.forward

    def spy(self: GAT, x: torch.Tensor, edge_index: torch.Tensor, edge_attr: None = None) -> torch.Tensor:
        layouts.append(x.layout)
        return forward(self, x, edge_index, edge_attr)

    monkeypatch.setattr(GAT, "forward", spy)
    monkeypatch.setattr(gat_pyg.runs.build, "rank_zero_print", reports.append)
    for sparse, layout in (("auto", torch.sparse_csr), ("true", torch.sparse_csr), ("false", torch.strided)):
        layouts.clear()
        command(*arguments, f"training.sparse={sparse}", f"outputs=sparse-{sparse}")
        assert set(layouts) == {layout}  # in training, validation and test
        (folder,) = runs(f"sparse-{sparse}")
        task = from_file("mine.npz", 5, 10, 10)
        model = load(folder)  # and it takes features of both kinds
        data = task.test[0]
        out = model(data.x.to_sparse_csr(), data.edge_index)
        torch.testing.assert_close(out, model(data.x, data.edge_index))
        (result,) = read(f"sparse-{sparse}/results.jsonl")
        right = (out.argmax(1) == data.y)[data.test_mask].double().mean().item()
        assert result.value == pytest.approx(100 * right)
    share = f"{100 * np.count_nonzero(x) / x.size:.1f} %"
    assert reports == [f"mine: only {share} of the features are nonzero; using a sparse matrix"] * 2


def test_how_it_is_computed_is_no_part_of_what_is_learnt(command: Command, monkeypatch: pytest.MonkeyPatch):
    compiled = []

    def compile(self: torch.nn.Module, *args: object, **kwargs: object) -> None:
        compiled.append(self)
        self._compiled_call_impl = torch.compile(self._call_impl, backend="eager")  # in less time than by Inductor

    monkeypatch.setattr(torch.nn.Module, "compile", compile)
    small = (*SMALL, "model.dropout=0.0", "training.max_epochs=2")  # in compiled code torch draws it
    command(*small)
    assert not compiled
    command(*small, "training.compile=true", "training.cuda_graphs=false")
    assert len(compiled) == 1
    one, other = read("outputs/results.jsonl")
    assert (one.value, one.config_hash) == (other.value, other.config_hash)
    assert all(load(folder)(digits().test[0].x[:1]).shape == (1, 10) for folder in runs())


@pytest.mark.kernels
def test_compilation_of_kernels_is_reported_once(command: Command, monkeypatch: pytest.MonkeyPatch):
    output: list[str] = []
    build_task = gat_pyg.runs.build.build_task
    log = cache.log
    monkeypatch.setattr(gat_pyg.runs.process, "rank_zero_print", output.append)
    monkeypatch.setattr(
        gat_pyg.sweeps.job, "read_task", lambda config: (log.info("1"), log.info("2"), build_task(config))[2]
    )
    command(*SMALL, "training.max_epochs=1")
    assert output == ["Compiling the kernels for their first use"]
    assert not log.filters and log.level == logging.NOTSET


def test_config_dir_adds_settings(command: Command, place: Path):
    (place / "own" / "experiment").mkdir(parents=True)
    (place / "own" / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /model: mlp\ntraining:\n  max_epochs: 3\n"
    )
    command("--config-dir", "own", "experiment=mine")
    (result,) = read("outputs/results.jsonl")
    assert (result.method, result.epochs) == ("MLP", 3)
    (place / "own" / "experiment" / "table.yaml").write_text("# @package _global_\nmethods: [mlp]\ntraining: {lr: 1}\n")
    error = command("--config-dir", "own", "experiment=table", "datasets=[digits]", fails=True)
    assert "experiment=table has training, which would apply to no cell. Add" in error
    (place / "own" / "experiment" / "table3.yaml").touch()
    error = command("--config-dir", "own", "experiment=mine", fails=True)
    assert "own/experiment/table3.yaml has the name of a choice of gat_pyg, experiment=table3. Rename the file" in error


def test_tensorboard_writes_beside_the_metrics(command: Command):
    pytest.importorskip("tensorboard")
    command(*SMALL, "training.max_epochs=3", "logger=tensorboard")
    (folder,) = runs()
    assert list(folder.glob("events.out.tfevents*"))
    assert (folder / "metrics.csv").is_file()


# Names, folders and numbers follow what runs ------------------------------------------------------------------------

SETS = "torch_geometric.datasets"


SPLIT = ("split.per_class=5", "split.val=10", "split.test=20", "data_root=data")


def names_of_runs() -> list[str]:
    """The names of the run folders without their time, in the order of the runs."""
    return [path.name.split("_", 3)[3] for path in runs()]


def test_two_sets_of_one_class_have_names_and_folders_of_their_own_and_one_learning_rate(command: Command):
    for name in ("Photo", "Computers"):
        amazon_files(Path("data"), name)
        for model in ("gat", "mlp"):
            arguments = (f"dataset._target_={SETS}.Amazon", f"+dataset.name={name}", f"model={model}", *SPLIT)
            command(*arguments, "training.max_epochs=2")
    assert [one.dataset for one in read("outputs/results.jsonl")] == ["photo"] * 2 + ["computers"] * 2
    assert names_of_runs() == [f"{model}_{name}" for name in ("photo", "computers") for model in ("gat", "mlp")]
    assert {OmegaConf.load(folder / "config.yaml").training.lr for folder in runs()} == {0.003}


@pytest.mark.parametrize(
    ("arguments", "lr", "heads"),
    [
        ("", 0.02, [8, 1]),
        ("dataset=pubmed", 0.01, [8, 8]),
        (f"dataset._target_={SETS}.KarateClub", 0.005, [8, 1]),
        (f"dataset=pubmed ++dataset._target_={SETS}.KarateClub", 0.005, [8, 1]),
        ("dataset=pubmed dataset.name=cora", 0.005, [8, 1]),
        ("dataset=pubmed model._target_=mine.GAT", 0.005, [8, 1]),
        ("recipe/on=papers-gat-pubmed dataset._target_=mine.Set", 0.01, [8, 8]),
    ],
)
def test_the_numbers_of_two_names_are_for_what_they_name(command: Command, arguments: str, lr: float, heads: list[int]):
    for order in (("--cfg", "job", *arguments.split()), (*arguments.split(), "--cfg", "job")):
        shown = OmegaConf.create(command(*order))
        assert (shown.training.lr, shown.model.heads) == (lr, heads)


def test_the_jobs_of_a_multirun_and_the_cells_of_a_table_have_the_numbers_of_what_they_train(command: Command):
    other = "model._target_=gat_pyg.models.GAT"
    command("-m", f"dataset._target_={SETS}.KarateClub,gat_pyg.data.digits", *KARATE, "training.max_epochs=1")
    command(f"methods=[gat,'gat {other}']", "datasets=digits", "training.max_epochs=1")
    every = [OmegaConf.load(folder / "config.yaml").training.lr for folder in runs()]
    assert every == [0.003, 0.003, 0.02, 0.005]


KARATE = ("split.val=5", "split.test=10")  # of its 34 nodes; those for training are given


NAMES = {
    "": "gat_digits",
    "model=mlp +dataset.k=3": "mlp_digits",
    f"dataset._target_={SETS}.KarateClub": "gat_karateclub",
    "model=mlp model._target_=torch_geometric.nn.GCN": "pyg-gcn_digits",
    "model=mlp model._target_=gat_pyg.baselines.gcn.GCN": "gcn_digits",
    "loader=neighbor": "gat_digits_neighbor",
    "model.mechanism=dot": "gat_digits_dot",
    "~model.mechanism +model.mechanism._target_=gat_pyg.conv.DotProduct": "gat_digits_dotproduct",
    "model.reproduction=true loader=cluster": "gat_digits_cluster_reproduction",
    "model.reproduction=false": "gat_digits",
}


def test_folder_is_named_after_method_and_dataset(command: Command):
    command("training.max_epochs=1")
    assert names_of_runs() == [NAMES[""]]
    with initialize_config_dir(str(config_folder()), **VERSION_BASE):
        for arguments, name in NAMES.items():
            assert run_name(compose("config", arguments.split(), return_hydra_config=True)) == name


def test_a_replaced_model_does_not_keep_the_methods_name(command: Command):
    for own in ([], ["model.method=Mine"]):
        command("model=gcn64", "model._target_=gat_pyg.baselines.gcn.GCN", *own, "training.max_epochs=1")
    assert [one.method for one in read("outputs/results.jsonl")] == ["GCN", "Mine"]


# Errors are reported, and nothing is lost ---------------------------------------------------------------------------


def test_an_unknown_data_set_names_the_known_ones(command: Command):
    output = command("dataset=coral", fails=True)
    assert re.search(r"dataset=coral is unknown\. Did you mean dataset=cora\?", output)
    assert "Did you mean dataset=cora?" in command("dataset=Cora", fails=True)
    output = command("dataset=karate", fails=True)
    assert re.search(r"dataset=karate is unknown\. Known are: actor, .*cora, .*pubmed, .*pubmed_links, ", output)


@pytest.mark.parametrize(
    "error",
    [
        URLError(socket.gaierror(-2, "Name or service not known")),
        HTTPError("https://nowhere", 503, "Name or service not known", Message(), None),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_class_of_pyg_without_a_network_says_where_its_files_go(
    command: Command, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    def fail(self: Amazon) -> None:
        raise error

    monkeypatch.setattr(Amazon, "download", fail)
    mine = Path("data/Amazon/mine")
    mine.mkdir(parents=True)
    os.utime(mine, (0, 0))
    output = command("dataset=photo", "data_root=data", fails=True)
    reason = r"photo was not downloaded: (HTTP Error 503: )?Name or service not known\."
    assert re.search(rf"{reason} Put the raw files in data/Amazon/Photo/raw, or point .* or use dataset=digits", output)
    assert not Path("outputs").exists() and [*Path("data/Amazon").iterdir()] == [mine]


QUANTITIES = (  # of which training takes what the others leave
    *("dataset._target_=torch_geometric.datasets.KarateClub", "task=node_regression"),
    *("split.val=5", "split.test=5"),
)
HALO = ("trainer=ddp_cpu", "trainer.strategy=halo")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["+candidates=[a]"], r"candidates is set by the command\. Leave it out\."),
        (["model=gat", "model.nrom=batch"], r"GAT has no argument model\.nrom\. Did you mean model\.norm\?"),
        (["model=gin", "model.dropuot=0"], r"GIN has no argument model\.dropuot\. Did you mean model\.dropout\?"),
        (
            ["model.readout=sum"],
            r"model\.readout has no effect: digits predicts 10 node classes, and a readout is for",
        ),
        (
            ["model.decoder=mlp"],
            r"model\.decoder has no effect: digits predicts 10 node classes, and a decoder is for",
        ),
        (["+model.decoder.decoder=mlp"], r"model\.decoder has no effect: .* is for pairs of nodes\. Leave it out\."),
        (["+loader.batch_size=4"], r"loader\.batch_size has no effect: loader=full takes whole graphs\. Choose"),
        (
            ["dataset=planted", "+loader.batch_size=4"],
            r"loader\.batch_size has no effect: planted has many graphs, and a step takes training\.batch_size of them",
        ),
        (
            ["training.batch_size=4"],
            r"training\.batch_size has no effect: digits is one graph, .* or choose loader=neig",
        ),
        (["split.val=10"], r"split\.val has no effect: digits has a split of its own\. Leave it out\."),
        (["scheduler.patience=5"], r"scheduler\.patience has no effect: there is no scheduler\. Choose one of"),
        (["encoding.k=5"], r"encoding\.k has no effect: there is no encoding\. Choose one of conf/encoding"),
        (["split.folds=10"], r"split\.folds has no effect: digits has a split of its own\. Leave it out\."),
        (["split.fold=1"], r"split\.fold has no effect: digits has a split of its own\. Leave it out\."),
        (
            [*QUANTITIES, "split.per_class=3", "split.seed=1"],
            r"split\.per_class has no effect: .* by split\.val, split\.test, ",
        ),
        (["~training.lr"], r"training\.lr is None, expected a finite number, at least 0\."),
        (["training=abc"], r"training has no settings\."),
        (
            ["logger=null"],
            r"logger=null is no choice, expected logger=NAME with one of csv, mlflow, tensorboard, wandb",
        ),
        (["trainer=null"], r"trainer=null is no choice, expected trainer=NAME with one of cpu, "),
        (["loader=1.5"], r"loader=1\.5 is no choice, expected loader=NAME"),
        (["loader=[]"], r"loader=\[\] is no choice|loader has no settings"),
        (["~dataset"], r"~dataset is no choice, expected dataset=NAME with one of actor, amazon-ratings"),
        (["+=3"], r"\+=3 cannot be read as a setting, expected name=value"),
        (["+model.out_channels=3"], r"model\.out_channels follows from the data set, which has 10\. Leave it out\."),
        (["+model.in_channels=3"], r"model\.in_channels follows from the data set, which has 64\. Leave it out\."),
        (["+trainer.max_steps=0"], r"1 of 1 runs diverged|no epoch ended with"),
        (["+trainer.max_time=abc"], r"trainer\._target_=.*: .*'abc'.* Its settings: .*max_time=abc"),
        (["dataset=file"], r"gat-pyg: dataset\.path has no value\. Pass dataset\.path=graph\.npz"),
        (["dataset=file", "dataset.path=none.npz"], r"gat-pyg: none\.npz does not exist\. Give the path"),
        (
            ["trainer.accelerator=abc"],
            r"trainer\._target_=.*: .*invalid accelerator name: `accelerator='abc'`\. .* Its set",
        ),
        (
            ["model=gat", "model.hidden_channels=[8.5]"],
            r"hidden_channels is \[8\.5\], expected a list in which each element is a who",
        ),
        (
            ["model=gat", "model.hidden_channels=8"],
            r"hidden_channels is 8, expected a list with one entry per hidden layer, \[8\], or",
        ),
        (["model=gat", "model.residual=abc"], r"residual is 'abc', expected True, False, 'identity' or 'linear'"),
        (["model=monet", "model.kernel_size=0"], r"model\.kernel_size is 0, expected a whole number, at least 1\."),
        (["model=planetoid", "model.dropout=-1"], r"model\.dropout is -1, expected a number from 0 to 1\."),
        (
            ["model=planetoid", "+model.weight_decay=[0.1]"],
            r"weight_decay is \[0\.1\], expected a list in which each element is",
        ),
        (["loader=neighbor", "+loader.num_links=5"], r"num_neighbors is \[10, 10\] and num_links is 5, expected only"),
        (["outputs=null"], r"outputs is None, expected the path of a folder"),
        (["hydra.run.dir="], r"hydra\.run\.dir is empty, expected the path of a folder\."),
        (["hydra.run.dir=null"], r"hydra\.run\.dir: field 'hydra\.run\.dir' is not Optional"),
        (
            ["vectorize=on", "runs=2", "dataset=planted", "training.cuda_graphs=true"],
            r"vectorize is on, but training\.cuda_graphs is true, and planted has many graphs\. Use vector",
        ),
        (
            ["dataset=planted", "runs=2", "vectorize=off", "processes=2", "trainer.devices=2"],
            r"processes is 2, which train one seed each, but the trainer has 2 devices, which train a seed together\.",
        ),
        (
            ["vectorize=on", "runs=2", "logger=tensorboard"],
            r"vectorize is on, but .*TensorBoardLogger logs one run at a time",
        ),
        (
            ["vectorize=on", "runs=2", *NORM],
            r"vectorize is on, but MLP cannot be stacked: it calls \.item\(\) on a tensor, which torch\.func\.vmap",
        ),
        (
            ["methods=[[gat,training.lr=0.01]]"],
            r"methods=\[\[gat,training\.lr=0\.01\]\] cannot be read as a setting: .*\. Quote .*'training\.lr=0\.01'",
        ),
        (["cora"], r"cora cannot be read as a setting, expected name=value"),
        (["seed=f(1"], r"seed=f\(1 cannot be read as a setting: .*\. Quote"),
        pytest.param(
            ["trainer=gpu"],
            r"trainer\.devices is 1, but torch .* finds no GPU on this machine.* Use trainer=cpu\.",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
        (
            ["training.sparse=true", "model._target_=torch_geometric.nn.MLP"],
            r"training\.sparse is true, which digits with MLP does not support: .*sparse=auto\.",
        ),
        (["training.cuda_graphs=true"], r"cuda_graphs is true, but the device is a cpu\."),
        (["training.cuda_graphs=true", "dataset=planted"], r"cuda_graphs is true, but planted has many graphs\."),
        (["ckpt_path=x.ckpt"], r"There is no checkpoint x\.ckpt\."),
        (["ckpt_path=last"], r"There is no run with these settings in outputs\."),
        (
            ["dataset._target_=torch_geometric.datasets.KarateClub", "+dataset.transform=OneHotDegree"],
            r"dataset\.transform is 'OneHotDegree', .*: \+dataset\.transform\._target_=torch_geometric\.transforms\.",
        ),
        (["trainer=ddp_cpu"], "digits is one graph, which 2 processes do not divide by default"),
        ([*HALO, "dataset=planted"], r"trainer\.strategy is halo, which divides a single graph"),
        (HALO, "MLP cannot be trained on a graph in parts"),
        (
            [*HALO, "training.sparse=true", "model=gat"],
            r"training\.sparse is true, but trainer\.strategy=halo fetches dense rows",
        ),
    ],
)
def test_wrong_settings_are_refused_without_a_file(command: Command, arguments: list[str], message: str):
    before = Path.cwd()
    output = command("model=mlp", *arguments, fails=True)
    assert re.search(message, output)
    assert len(output.splitlines()) == 1, output
    assert before.is_dir() and not [*before.rglob("*")]


@pytest.mark.skipif(sys.platform == "win32", reason="files of POSIX")
@pytest.mark.parametrize(
    ("results", "message"),
    [
        ("/proc/x", r"/proc/x: No such file or directory\."),
        ("a_folder", r"results is a_folder, which is not a regular file\."),
        ("/dev/full", r"results is /dev/full, which is not a regular file\."),
        ("a_fifo", r"results is a_fifo, which is not a regular file\."),
        ("a_file/results.jsonl", r"results is a_file/results\.jsonl, but .*a_file is not a folder\."),
    ],
)
def test_results_that_cannot_be_written_are_refused_before_the_training(
    command: Command, place: Path, results: str, message: str
):
    (place / "a_folder").mkdir()
    (place / "a_file").touch()
    os.mkfifo(place / "a_fifo")
    before = sorted(place.rglob("*"))
    output = command(*SMALL, f"results={results}", fails=True)
    assert re.search(message, output) and "epoch" not in output
    assert sorted(place.rglob("*")) == before


def test_a_refused_setting_removes_no_folder_that_was_there(command: Command, place: Path):
    command("runs=0", "hydra.run.dir=.", fails=True)
    (place / "own").mkdir()
    command("-m", "runs=0", "seed=1,2", "outputs=own/new/outputs", fails=True)
    assert [*place.iterdir()] == [place / "own"] and not [*(place / "own").iterdir()]


def test_the_version_is_that_of_the_package(command: Command):
    assert command("--version") == f"gat_pyg {gat_pyg.__version__}\n"


@pytest.mark.parametrize(
    ("gpus", "devices", "message"),
    [
        (0, "2", r"trainer\.devices is 2, but torch .* finds no GPU on this machine\. Use trainer=ddp_cpu for"),
        (0, "auto", r"trainer\.devices is auto, but torch .* finds no GPU on this machine\. Use trainer=ddp_cpu for"),
        (1, "2", r"trainer\.devices is 2, but torch .* finds 1 GPU on this machine\. Use trainer\.devices=1, or trai"),
        (
            2,
            "[0,2]",
            r"trainer\.devices is \[0, 2\], but torch .* finds 2 GPUs on this machine\. Use trainer\.devices=2",
        ),
        (2, "'0,2'", r"trainer\.devices is 0,2, but torch .* finds 2 GPUs"),
        (1, "'2' trainer.strategy=halo", r"trainer\.devices is 2, but torch .* finds 1 GPU on"),
    ],
)
def test_missing_gpus_are_named_before_anything_is_written(
    gpus: int, devices: str, message: str, command: Command, monkeypatch: pytest.MonkeyPatch
):
    before = Path.cwd()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(gat_pyg.sweeps.job, "read_task", lambda config: pytest.fail("the data would be downloaded"))
    output = command("trainer=ddp", *f"trainer.devices={devices}".split(), fails=True)
    assert re.search(message, output) and len(output.splitlines()) == 1, output
    assert not [*before.rglob("*")]


def test_the_memory_of_the_trial_is_freed_before_each_device_trains_its_share(
    command: Command, monkeypatch: pytest.MonkeyPatch
):
    done: list[str] = []

    def spawn(*arguments: object, nprocs: int) -> None:
        assert pickle.loads(pickle.dumps(arguments))  # as it has to go to processes that are started again
        done.append(f"{nprocs} processes")

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("freed"))
    monkeypatch.setattr(gat_pyg.runs.stacked, "spawn", spawn)
    command(*SMALL, "trainer=ddp_cpu", "runs=2", "vectorize=on", fails=True)  # nobody trains
    assert done == ["freed", "2 processes"]


def test_a_share_trains_on_its_own_gpu(place: Path, monkeypatch: pytest.MonkeyPatch):
    together = gat_pyg.runs.stacked
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(together, "read_task", lambda settings: "task")
    monkeypatch.setattr(together, "one_share", lambda own, *_: calls.append(own))
    places = [together.Place(rank, 2, torch.device("cuda", rank)) for rank in range(2)]
    together._share(1, places, [together.Job(SimpleNamespace(), place)], None, os.getppid())
    assert calls == [torch.device("cuda", 1), places[1]]


def test_results_name_the_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU of {device}")
    strategy = SimpleNamespace(root_device=torch.device("cuda", 0))
    trainer = SimpleNamespace(strategy=strategy, world_size=2, precision="bf16-mixed")
    assert gat_pyg.runs.process.device_name(trainer) == "2 x GPU of cuda:0, bf16-mixed"


def test_hidden_gpus_are_named(command: Command, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    output = command("trainer=ddp", "trainer.devices=2", fails=True)
    assert "finds 1 GPU on this machine among CUDA_VISIBLE_DEVICES=3. Use trainer.devices=1" in output


def test_several_processes_and_multirun_do_not_go_together(command: Command):
    other = f"dataset._target_={SETS}.KarateClub"  # which removes recipes
    assert "--multirun runs in a single process" in command("-m", other, "trainer=ddp_cpu", "seed=1,2", fails=True)


def test_without_ray_or_a_number_of_processes_ray_is_refused(command: Command, monkeypatch: pytest.MonkeyPatch):
    assert "trainer.devices is auto, expected the number of processes" in command(
        "trainer=ray", "trainer.devices=auto", fails=True
    )
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray.train", None)
    assert 'python -m pip install "ray[default,train]"' in command("trainer=ray", fails=True)


def test_a_folder_that_cannot_be_written_is_named(command: Command, place: Path):
    (place / "file").touch()
    output = command("model=mlp", "hydra.run.dir=file/run", fails=True)
    assert re.search(r"file/run: Not a directory\. Choose a folder that can be written: hydra\.run\.dir=", output)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_named(command: Command, place: Path):
    (place / "sealed").mkdir(mode=0o500)
    assert re.search(r"sealed/run: Permission denied", command("model=mlp", "hydra.run.dir=sealed/run", fails=True))


LEFT = ("last.ckpt", "model.safetensors", "result.json", "results.jsonl", "metrics.csv")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads a file's name from /proc")
def test_full_disk_is_reported_and_loses_nothing(command: Command, monkeypatch: pytest.MonkeyPatch):
    def is_the_file(descriptor: int) -> bool:
        return name in Path(os.readlink(f"/proc/self/fd/{descriptor}")).name

    def full_after(descriptor: int, data: bytes | None = None) -> int | None:
        if not is_the_file(descriptor) or (name == "last.ckpt" and not list(outputs.rglob(name))):
            return fsync(descriptor) if data is None else write(descriptor, data)
        if data is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[:7])

    fsync, write = os.fsync, os.write
    settings = (*SMALL, "training.max_epochs=4", "checkpoint_every=0")
    command(*settings, "outputs=whole")
    (whole,), (expected,) = runs("whole"), read("whole/results.jsonl")
    for name in LEFT:
        outputs = Path(f"full-{LEFT.index(name)}")
        with monkeypatch.context() as disk:
            disk.setattr(os, "fsync" if name != "metrics.csv" else "write", full_after)
            output = command(*settings, f"outputs={outputs}", fails=True)
        assert re.search(
            rf"{name} could not be written: the disk is full\. .*Free some space, .*ckpt_path=last", output
        )
        assert not list(outputs.rglob("*.part")) and not any(path.read_bytes() for path in outputs.glob("*.jsonl"))
        command(*settings, f"outputs={outputs}", *([] if name == "metrics.csv" else ["ckpt_path=last"]))
        (result,) = read(outputs / "results.jsonl")
        assert (result.value, result.val, result.best_epoch) == (expected.value, expected.val, expected.best_epoch)
        for folder in runs(str(outputs)):
            assert (folder / "metrics.csv").read_text() == (whole / "metrics.csv").read_text()
            assert all(torch.equal(value, weights(folder)[key]) for key, value in weights(whole).items())


def test_a_folder_with_a_run_is_not_written_over(command: Command):
    command(*SMALL, "training.max_epochs=2", "hydra.run.dir=mine")
    before = {path: path.read_bytes() for path in Path("mine").iterdir()}
    output = command(*SMALL, "training.max_epochs=2", "hydra.run.dir=mine", fails=True)
    assert re.search(r"mine already holds a run, which would be lost\.", output)
    assert {path: path.read_bytes() for path in Path("mine").iterdir()} == before
    output = command(*SMALL, "training.max_epochs=3", "hydra.run.dir=mine", "ckpt_path=last", fails=True)
    assert re.search(r"started with other settings: .*training\.max_epochs was 2, is 3\.", output)
    assert {path: path.read_bytes() for path in Path("mine").iterdir()} == before


def test_a_folder_in_use_is_left_alone(command: Command, place: Path):
    (place / "mine").mkdir()
    lock = try_lock(place / "mine" / ".lock")
    assert lock is not None
    assert "mine is in use by another process" in command("model=mlp", "hydra.run.dir=mine", fails=True)
    os.close(lock)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04half a file", b"a text"])
def test_broken_checkpoint_is_refused(command: Command, place: Path, content: bytes):
    (place / "broken.ckpt").write_bytes(content)
    output = command("model=mlp", "ckpt_path=broken.ckpt", fails=True)
    assert re.search(r"broken\.ckpt cannot be read: it is truncated or not a checkpoint", output)


@pytest.mark.filterwarnings("ignore:.*he validation loss or score was not finite:UserWarning")
@pytest.mark.parametrize("vectorize", ["on", pytest.param("off", marks=pytest.mark.weekly)])
def test_a_seed_that_diverges_costs_no_other_its_result(
    command: Command, monkeypatch: pytest.MonkeyPatch, vectorize: str
):
    def poisoned(*arguments: Any) -> Any:
        built = build_model(*arguments)
        if torch.initial_seed() == 1:
            nn.init.constant_(next(built.model.parameters()), torch.nan)
        return built

    build_model = gat_pyg.runs.build.build_model
    monkeypatch.setattr(gat_pyg.runs.build, "build_model", poisoned)
    settings = (*SMALL, "training.max_epochs=3", "runs=4", f"vectorize={vectorize}")
    output = command(*settings, fails=True)
    assert re.search(r"1 of 4 runs diverged \(seed 1\): no epoch ended with a finite .* others are in outputs/", output)
    assert [result.seed for result in read("outputs/results.jsonl")] == [0, 2, 3]
    again = command(*settings, "ckpt_path=last", fails=True)
    assert "1 of 4 runs diverged (seed 1)" in again
    assert [result.seed for result in read("outputs/results.jsonl")] == [0, 2, 3]


@pytest.mark.filterwarnings("ignore:The validation loss or score was not finite:UserWarning")
@pytest.mark.parametrize("dataset", ["digits", "planted"])
def test_a_run_that_diverges_ends_at_once_without_a_result(command: Command, dataset: str):
    output = command(*SMALL, f"dataset={dataset}", "training.lr=1e30", fails=True)
    assert re.search(r"1 of 1 runs diverged \(seed 0\): .* A smaller training\.lr may help\.$", output, re.MULTILINE)
    assert not Path("outputs/results.jsonl").exists()


def test_our_bugs_keep_their_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def bug(*arguments: object) -> None:
        torch.zeros(2) + torch.zeros(3)

    monkeypatch.setattr(gat_pyg.sweeps.job, "read_task", bug)
    monkeypatch.setattr(sys, "argv", ["gat-pyg"])
    with pytest.raises(SystemExit):
        gat_pyg.run.main()
    assert "Traceback" in capsys.readouterr().err


# Killed and resumed -------------------------------------------------------------------------------------------------

LONG = ("training.max_epochs=60", "training.patience=100", "training.lr=0.02", "checkpoint_every=0.1")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same_runs(one: str, other: str) -> None:
    """Two folders hold the same runs: metrics, weights and results are equal to the last bit."""
    for first, second in zip(runs(one), runs(other), strict=True):
        assert (first / "metrics.csv").read_text() == (second / "metrics.csv").read_text()
        assert weights(first).keys() == weights(second).keys()
        assert all(torch.equal(value, weights(second)[key]) for key, value in weights(first).items())
    lines = [
        sorted(
            (line.seed, line.epochs, line.best_epoch, line.val, line.value) for line in read(f"{name}/results.jsonl")
        )
        for name in (one, other)
    ]
    assert lines[0] == lines[1]


def kill_in_training(process: Any, folder: Path, chance: random.Random) -> bool:
    """Kill -9 at a random moment after the process wrote its own first checkpoint; False if it ended before."""

    def written() -> float:
        results = list(folder.rglob("*last.ckpt"))
        return max((path.stat().st_mtime for path in results), default=0.0)

    before = written()
    while process.poll() is None and written() == before:
        time.sleep(0.005)
    time.sleep(chance.random() * 0.3)
    ended = process.poll() is not None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return not ended


@pytest.mark.kernels
@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL is a POSIX signal")
def test_killed_run_equals_an_uninterrupted_one(command: Command):
    command(*LONG, "outputs=whole")
    chance, kills = random.Random(os.getpid()), 0
    for _ in range(2):
        arguments = (*LONG, "outputs=killed", *(["ckpt_path=last"] if kills else []))
        kills += kill_in_training(outside(*arguments), Path("killed"), chance)
    assert kills
    if not runs("killed"):
        command(*LONG, "outputs=killed", "ckpt_path=last")
    assert len(list(Path("killed").iterdir())) == 2  # one folder, one file of results: none was left empty
    assert_same_runs("whole", "killed")


def graphs_of(labels: Callable[[int], list[float]]) -> list[Data]:
    """Forty random graphs of five nodes with these labels each."""
    draw = torch.Generator().manual_seed(0)
    edges = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])
    return [Data(torch.rand(5, 4, generator=draw), edges, y=torch.tensor([labels(i)]).squeeze(1)) for i in range(40)]


OPTIMISED = {
    "links": ("optimizer=adamw", "scheduler=cosine", "training.warmup=3", "training.patience=null"),
    "graphs": (
        *("optimizer=rmsprop", "scheduler=plateau", "scheduler.patience=0", "training.ema=0.8"),
        *("training.gradient_clip_val=0.5", "+trainer.accumulate_grad_batches=2"),
    ),
}


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL is a POSIX signal")
@pytest.mark.parametrize("kind", ["graphs", pytest.param("links", marks=pytest.mark.weekly)])  # more in tests/training
def test_killed_run_on_a_file_equals_an_uninterrupted_one(command: Command, kind: str):
    if kind == "graphs":
        torch.save(graphs_of(lambda i: [float(np.sin(i)), float(np.cos(i))]), "data.pt")
        data = ("dataset=file", "dataset.path=data.pt", "split.val=10", "split.test=10", "training.batch_size=8")
    else:
        np.savez("data.npz", **graph_of(np.arange(60) % 3))
        data = ("dataset._target_=gat_pyg.data.links", "+dataset.dataset._target_=gat_pyg.data.from_file")
        data += ("+dataset.dataset.path=data.npz", "split.val=10", "split.test=10")
        data += tuple(f"+dataset.dataset.{key}=10" for key in ("per_class", "val", "test"))
    data += OPTIMISED[kind]
    arguments = (*data, "training.max_epochs=16", "training.lr=0.02", "checkpoint_every=0")
    command(*arguments, "outputs=whole")
    process = outside(*arguments, "outputs=killed")
    while process.poll() is None and sum(len(file.read_bytes().splitlines()) for file in metrics_in("killed")) <= 5:
        time.sleep(0.002)
    assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not runs("killed") and list(Path("killed").rglob("last.ckpt"))
    command(*arguments, "outputs=killed", "ckpt_path=last")
    assert_same_runs("whole", "killed")


WORKERS = ("training.max_epochs=9", "loader=neighbor", "loader.num_workers=2")


def metrics_in(folder: str) -> list[Path]:
    return [*Path(folder).rglob("metrics.csv")]


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_signal_before_the_training_ends_it_with_one_line(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: signal.Signals
):
    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        patch.setattr(gat_pyg.sweeps.job, "read_task", lambda config: signal.raise_signal(number))
        with pytest.raises(SystemExit, match=str(128 + number)):
            command(*SMALL, "training.max_epochs=2")
    again = r"The same command with ckpt_path=last starts it again, since no epoch was finished\."
    assert re.fullmatch(rf"Stopped in outputs/\S+\. {again}\n", capsys.readouterr().err)
    assert signal.getsignal(number) is before
    command(*SMALL, "training.max_epochs=2", "ckpt_path=last")
    assert [result.epochs for result in read("outputs/results.jsonl")] == [2]


@pytest.mark.kernels
@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize(
    ("number", "settings"),
    [
        pytest.param(signal.SIGTERM, ("training.max_epochs=60", "runs=3"), id="SIGTERM"),
        pytest.param(signal.SIGTERM, WORKERS, id="SIGTERM, workers"),
        pytest.param(signal.SIGINT, WORKERS, id="SIGINT, workers", marks=pytest.mark.weekly),
    ],
)
def test_a_signal_to_all_processes_writes_a_checkpoint(
    command: Command, number: signal.Signals, settings: tuple[str, ...]
):
    many = ("training.lr=0.02", *settings)  # over in less than checkpoint_every
    command(*many, "outputs=whole")
    process = outside(*many, "outputs=ended")
    while process.poll() is None and not list(Path("ended").rglob("metrics.csv")):
        time.sleep(0.005)
    os.killpg(process.pid, number)
    _, output = process.communicate(timeout=60)
    assert process.returncode == 128 + number, output
    assert re.search(r"Stopped in ended/\S+\. The same command with ckpt_path=last finishes it\.\n$", output)
    assert "Traceback" not in output and not runs("ended") and len(list(Path("ended").rglob("*last.ckpt"))) == 1
    with pytest.raises(ProcessLookupError):  # no worker is left
        os.killpg(process.pid, 0)
    command(*many, "outputs=ended", "ckpt_path=last")
    assert_same_runs("whole", "ended")


@contextmanager
def interrupted_before(last: int) -> Iterator[None]:
    """Context manager: the command is interrupted when it comes to this seed."""
    one_run = gat_pyg.sweeps.job.one_run

    def dies(settings: Any, task: Any, seed: int, folder: Path) -> Result | None:
        if seed == last:
            raise KeyboardInterrupt
        return one_run(settings, task, seed, folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gat_pyg.sweeps.job, "one_run", dies)
        with pytest.raises(SystemExit, match="130"):
            yield


SWEEP = ("-m", *SMALL[:1], "model.hidden_channels=8,4", "training.lr=0.05,0.02")  # two jobs of each of two shapes
QUICK = ("model.dropout=0.0", "training.max_epochs=4", "checkpoint_every=0")
STACKED = "hydra/launcher=stacked"


def jobs_in(place: str) -> dict[tuple[Any, ...], Path]:
    """The folders of the jobs of sweeps, by what differs."""
    jobs = {}
    for path in Path(place).glob("*_sweep/*/config.yaml"):
        config = OmegaConf.load(path)
        jobs[config.model.hidden_channels, config.training.lr] = path.parent
    return dict(sorted(jobs.items()))


def test_a_stacked_sweep_leaves_what_its_jobs_leave_alone_also_if_it_is_killed_and_extended(
    command: Command, passes: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    command(*SWEEP, *QUICK, "outputs=alone")
    output = command(*SWEEP, *QUICK, "outputs=one", STACKED)
    assert passes == [[0, 0]] * 2
    assert "model.hidden_channels=4 training.lr=0.02, seed 0: 4 epochs, best" in output
    alone, one = jobs_in("alone"), jobs_in("one")
    assert alone.keys() == one.keys() and len(one) == 4
    for first, second in zip(alone.values(), one.values(), strict=True):
        assert {path.name for path in second.iterdir()} == {path.name for path in first.iterdir()} == LEFT_BY_A_SEED
        assert_close(first, second)

    epochs, end = [], gat_pyg.seeds.EachStopping.on_train_epoch_end

    def dies(*arguments: Any) -> None:
        end(*arguments)
        epochs.append(None)
        if len(epochs) == 4 + 3:  # in the second stack
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(gat_pyg.seeds.EachStopping, "on_train_epoch_end", dies)
        with suppress(Killed):
            command(*SWEEP, *QUICK, "outputs=killed", STACKED)
    del passes[:]
    more = (*SWEEP, *QUICK, "training.lr=0.01,0.02,0.05", "outputs=killed", "ckpt_path=last", STACKED)
    written: list[None] = []
    write = gat_pyg.runs.stacked.write_outputs

    def dies_between(*arguments: Any) -> None:
        written.append(None)
        if len(written) == 3:  # after the result of the first shape's new job and one of the resumed stack
            raise Killed
        write(*arguments)

    with monkeypatch.context() as patch, suppress(Killed):
        patch.setattr(gat_pyg.runs.stacked, "write_outputs", dies_between)
        command(*more)
    output = command(*more)
    assert passes == [[0], [0, 0], [0, 0], [0]]  # the interrupted stack is first, in its own order
    assert output.count("seed 0: 4 epochs") == 2 + 3 + 6  # the first two commands printed those of the first shape
    killed = jobs_in("killed")
    for key, folder in one.items():
        assert (folder / "metrics.csv").read_text() == (killed[key] / "metrics.csv").read_text()
        assert all(torch.equal(value, weights(killed[key])[name]) for name, value in weights(folder).items())
    lines = read("killed/results.jsonl")
    assert len(lines) == len({line.run_dir for line in lines}) == len(killed) == 6


@pytest.mark.parametrize("vectorize", ["on", "off"])
def test_a_pruned_job_ends_without_a_result_and_the_others_go_on(command: Command, vectorize: str):
    judged: list[tuple[int, int, float]] = []

    def judge(number: int, epoch: int, quality: float) -> bool:
        judged.append((number, epoch, quality))
        return (number, epoch) == (1, 2)

    with pruned_by(judge):
        sweep = ("-m", STACKED, *SMALL, "seed=3,4,5", "training.max_epochs=3", f"vectorize={vectorize}")
        assert "gat-pyg: The sweeper ended the training after epoch 2" in command(*sweep, fails=True)
    assert sorted(one[:2] for one in judged) == [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (2, 1), (2, 2), (2, 3)]
    assert [result.seed for result in read("outputs/results.jsonl")] == [3, 5]
    for number, (job, epochs) in enumerate(zip(sorted(Path("outputs").glob("*_sweep/[0-9]")), (3, 2, 3), strict=True)):
        rows = [*csv.DictReader((job / "metrics.csv").read_text().splitlines())]
        assert len(rows) == epochs
        best = max(float(row["val_accuracy"]) for row in rows)
        assert (number, epochs) == max(one[:2] for one in judged if one[0] == number)
        assert max(one for one in judged if one[0] == number)[2] == pytest.approx(best)


def test_a_job_of_several_seeds_goes_on_with_the_first_unfinished(command: Command):
    arguments = (*SMALL, "training.max_epochs=4", "runs=3", "vectorize=off")
    with interrupted_before(1):
        command(*arguments)
    first = read("outputs/results.jsonl")
    output = command(*arguments, "ckpt_path=last")
    results = read("outputs/results.jsonl")
    assert [result.seed for result in results] == [0, 1, 2]
    assert results[:1] == first
    assert "3 runs: test" in output
    assert output.splitlines()[-1] == command(*arguments, "ckpt_path=last").splitlines()[-1]  # nothing is done again
    assert read("outputs/results.jsonl") == results
    assert "no run with these settings" in command(*arguments, "training.lr=0.3", "ckpt_path=last", fails=True)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The seeds of each pass, in the order of the passes."""
    every: list[list[int]] = []
    one_pass = gat_pyg.runs.stacked.one_pass

    def noted(runs: list[Run], *others: Any) -> None:
        every.append([run.seed for run in runs])
        one_pass(runs, *others)

    monkeypatch.setattr(gat_pyg.runs.stacked, "one_pass", noted)
    return every


def test_a_pass_that_was_done_is_not_done_again(command: Command, monkeypatch: pytest.MonkeyPatch):
    passes: list[list[int]] = []
    one_pass = gat_pyg.runs.stacked.one_pass

    def dies(runs: list[Run], *others: Any) -> None:
        passes.append([run.seed for run in runs])
        if len(passes) == 2:
            raise KeyboardInterrupt
        one_pass(runs, *others)

    monkeypatch.setattr(gat_pyg.runs.stacked, "one_pass", dies)
    many = (*SMALL, "runs=4", "seeds_per_pass=2", "training.max_epochs=2", "checkpoint_every=0")
    with pytest.raises(SystemExit, match="130"):
        command(*many)
    command(*many, "ckpt_path=last")
    assert passes == [[0, 1], [2, 3], [2, 3]]
    assert not list(Path("outputs").glob("*/*last.ckpt"))


def test_a_pass_that_left_some_of_its_results_is_done_whole(
    command: Command, passes: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    write = gat_pyg.runs.stacked.write_outputs

    def dies(config: object, task: object, outcome: Outcome, *others: object) -> Result:
        if outcome.seed == 4:
            raise Killed
        return write(config, task, outcome, *others)  # type: ignore[arg-type]

    many = (*SMALL, "runs=6", "seeds_per_pass=3", "training.max_epochs=2")
    with monkeypatch.context() as patch:
        patch.setattr(gat_pyg.runs.stacked, "write_outputs", dies)
        with suppress(Killed):
            command(*many)
    assert [line.seed for line in read("outputs/results.jsonl")] == [0, 1, 2, 3]
    command(*many, "ckpt_path=last")
    assert passes == [[0, 1, 2], [3, 4, 5], [3, 4, 5]]
    assert [line.seed for line in read("outputs/results.jsonl")] == list(range(6))


def test_a_pass_that_was_too_large_is_done_in_smaller_ones(
    command: Command, passes: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    many = (*SMALL, "model.dropout=0.0", "runs=3", "training.max_epochs=4", "checkpoint_every=0")
    command(*many, "outputs=whole")
    keep = gat_pyg.seeds.EachStopping.on_train_epoch_end

    def dies(self: gat_pyg.seeds.EachStopping, trainer: Trainer, module: LightningModule) -> None:
        keep(self, trainer, module)
        if trainer.current_epoch == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gat_pyg.seeds.EachStopping, "on_train_epoch_end", dies)
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            command(*many, "outputs=killed")
    assert list(Path("killed").glob("*/0.last.ckpt"))
    command(*many, "outputs=killed", "ckpt_path=last", "seeds_per_pass=2")
    assert [len(seeds) for seeds in passes] == [3, 3, 2, 1]
    values_ = [
        {one.seed: (one.value, one.epochs) for one in read(f"{place}/results.jsonl")} for place in ("whole", "killed")
    ]
    assert values_[0] == values_[1] and len(values_[0]) == 3


def test_memory_that_does_not_suffice_is_shared_by_fewer_seeds(command: Command, monkeypatch: pytest.MonkeyPatch):
    output: list[str] = []
    passes: list[list[int]] = []
    one_pass = gat_pyg.runs.stacked.one_pass

    def small(runs: list[Run], *others: Any) -> None:
        passes.append([run.seed for run in runs])
        if len(runs) > 2:
            raise RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 byte"
            )
        one_pass(runs, *others)

    monkeypatch.setattr(gat_pyg.runs.stacked, "one_pass", small)
    monkeypatch.setattr(gat_pyg.seeds.planning, "rank_zero_print", output.append)
    command(*SMALL, "runs=5", "training.max_epochs=2")
    assert passes == [[0, 1, 2, 3, 4], [0, 1, 2], [0, 1], [2, 3], [4]]
    assert output == [f"Memory does not suffice for {n} runs at once: going on with {m}" for n, m in ((5, 3), (3, 2))]
    assert len(read("outputs/results.jsonl")) == 5


def test_a_run_from_a_checkpoint_that_dies_at_once_starts_from_it_again(
    command: Command, monkeypatch: pytest.MonkeyPatch
):
    def dies(*arguments: object) -> None:
        raise Killed

    start = (*SMALL, "training.max_epochs=4", "checkpoint_every=0")
    with monkeypatch.context() as patch:
        patch.setattr(gat_pyg.training.stopping.PaperStopping, "on_fit_end", dies)
        with suppress(Killed):
            command(*start, "training.lr=0.5")
    (checkpoint,) = Path("outputs").glob("*/last.ckpt")
    checkpoint.rename("first.ckpt")
    more = (*SMALL, "training.max_epochs=8", "ckpt_path=first.ckpt")
    command(*more, "outputs=whole")
    with monkeypatch.context() as patch:
        patch.setattr(gat_pyg.training.stopping.PaperStopping, "on_validation_end", dies)
        for begin in ("ckpt_path=first.ckpt", "ckpt_path=last"):
            with suppress(Killed):
                command(*more[:-1], begin, "outputs=killed")
    command(*more[:-1], "outputs=killed", "ckpt_path=last")
    assert left_behind("killed")["models"] == left_behind("whole")["models"]
    assert left_behind("killed")["lines"] == left_behind("whole")["lines"]


def test_lost_loader_worker_is_reported(command: Command, monkeypatch: pytest.MonkeyPatch):
    def dies(*arguments: object) -> None:
        raise RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")

    run = (*SMALL, "training.max_epochs=2", "checkpoint_every=0")
    with monkeypatch.context() as patch:
        patch.setattr(gat_pyg.training.stopping.PaperStopping, "on_fit_end", dies)
        output = command(*run, fails=True)
    assert "A worker process (loader.num_workers) ended or was killed, perhaps for lack of memory." in output
    command(*run, "ckpt_path=last")
    assert len(read("outputs/results.jsonl")) == 1


BROKEN = [b"\xff{", b"a: !!python/object/apply:os.system ['true']", b"7", b"[" * 5000]


def test_settings_that_cannot_be_read_stop_no_other_run(command: Command):
    one = (*SMALL, "training.max_epochs=2")
    command(*one)
    for number, content in enumerate(BROKEN):
        for folder in (Path(f"outputs/other-{number}"), Path(f"outputs/table/cell-{number}")):
            folder.mkdir(parents=True)
            (folder / "config.yaml").write_bytes(content)
    assert "digits" in command(*one, "ckpt_path=last")
    assert len(read("outputs/results.jsonl")) == 1
    for number, content in enumerate(BROKEN):
        folder = Path(f"outputs/other-{number}")
        output = command(*one, f"hydra.run.dir={folder}", "ckpt_path=last", fails=True)
        assert re.search(r"config\.yaml cannot be read, expected the settings|started with other settings", output)
        assert (folder / "config.yaml").read_bytes() == content


def test_what_a_dead_process_left_half_written_is_removed(command: Command):
    command(*SMALL, "training.max_epochs=2", "runs=2")
    (folder,) = {path.parent for path in runs()}
    before = set(Path("outputs").rglob("*"))
    halves = [folder / ".last.ckpt.7.part", folder / ".lock", folder / "seed-1/.model.safetensors.12345.part"]
    halves += [folder / "last.ckpt", folder / "1.last.ckpt", folder / "seed-0/last.ckpt"]
    unbegun = Path("outputs/unbegun")
    unbegun.mkdir()
    for path in (*halves, unbegun / ".lock", unbegun / ".config.yaml.9.part"):
        path.touch()
    used = Path("outputs/in-use")
    used.mkdir()
    lock = try_lock(used / ".lock")
    assert lock is not None
    command(*SMALL, "training.max_epochs=2", "runs=2", "ckpt_path=last")
    assert set(Path("outputs").rglob("*")) == before | {used, used / ".lock"}
    os.close(lock)


class Killed(BaseException):
    """Stands for a SIGKILL, after which a process changes no file."""


class Dying:
    """Kills the process before its n-th change of a file, counted from the write of the first trained model.

    With ``ends=True`` it is a SIGTERM, after which the process still tidies up.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, changes: int, ends: bool) -> None:
        self.left, self.ends, self.begun, self.dead = changes, ends, False, False
        self.locks: list[tuple[int, str]] = []
        accessor = getattr(pathlib, "_normal_accessor", None)  # Python 3.10's, with the functions as imported
        for name in ("replace", "write", "unlink", "rmdir"):
            changes_file = self.counted(name, getattr(os, name))
            monkeypatch.setattr(os, name, changes_file)
            if hasattr(accessor, name):
                monkeypatch.setattr(accessor, name, changes_file)
        real = os.open

        def opens(path: Any, *arguments: Any) -> int:
            descriptor = real(path, *arguments)
            self.locks.append((descriptor, path))
            return descriptor

        monkeypatch.setattr(os, "open", opens)

    def counted(self, name: str, change: Callable[..., object]) -> Callable[..., object]:
        def changes(*values: Any) -> object:
            self.begun |= name == "replace" and Path(values[1]).name == "model.safetensors"
            if name in ("unlink", "rmdir") and not os.path.lexists(values[0]):
                return change(*values)
            self.left -= self.begun
            if self.left < 0 and not (self.dead and self.ends):
                self.dead = True
                raise SystemExit(143) if self.ends else Killed
            return change(*values)

        return changes

    def release(self) -> None:
        """Do what the system does for a process that died."""
        for descriptor, path in self.locks:
            with suppress(OSError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    os.close(descriptor)


def left_behind(place: str) -> dict[str, Any]:
    """All that a job leaves, but for times and the names of folders."""
    lines = sorted(
        (line.dataset, line.method, line.seed, line.value, line.val) for line in read(f"{place}/results.jsonl")
    )
    names = sorted(path.name for path in Path(place).rglob("*") if path.is_file())
    metrics = sorted(path.read_text() for path in Path(place).rglob("metrics.csv"))
    models = sorted(path.read_bytes() for path in Path(place).rglob("model.safetensors"))
    return {"lines": lines, "files": names, "metrics": metrics, "models": models}


@pytest.mark.parametrize(
    ("job", "ends"),
    [
        pytest.param((), False, marks=pytest.mark.weekly),
        pytest.param((), True, marks=pytest.mark.weekly),
        pytest.param(("runs=2",), False, marks=pytest.mark.weekly),
        (("methods=mlp", "datasets=digits", "runs=1"), False),
    ],
    ids=["a run, SIGKILL", "a run, SIGTERM", "seeds together, SIGKILL", "a table, SIGKILL"],
)
def test_job_killed_between_any_two_writes_is_finished(
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    job: tuple[str, ...],
    ends: bool,
):
    settings = ("training.max_epochs=2", "checkpoint_every=0", *(SMALL[1:] if "methods=mlp" in job else SMALL), *job)
    whole = command(*settings, "outputs=whole").splitlines()[-1]
    for changes in range(30):
        outputs = f"outputs=killed-{changes}"
        with monkeypatch.context() as patch:
            dying = Dying(patch, changes, ends)
            with suppress(Killed, SystemExit):
                command(*settings, outputs)
        dying.release()
        capsys.readouterr()
        if not dying.dead:
            break
        output = command(*settings, outputs, "ckpt_path=last").splitlines()[-1]
        assert (
            re.sub(r"killed-\d+", "whole", re.split(r", [\d.]+ seconds", output)[0])
            == re.split(r", [\d.]+ seconds", whole)[0]
        )
        assert left_behind(f"killed-{changes}") == left_behind("whole"), f"killed before change {changes}"
    assert changes > 4  # a model, a result, a line, a checkpoint, a lock


# Two processes ------------------------------------------------------------------------------------------------------


def test_two_processes_train_one_model_and_leave_one_run(place: Path):
    small = ("dataset=planted", "dataset.graphs=6", "model=mlp", "runs=2", "training.max_epochs=3")
    command = [sys.executable, "-m", "gat_pyg.run", *small, "trainer=ddp_cpu", "trainer.devices=2"]  # new interpreters
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    output, stderr = ended.stdout, ended.stderr
    assert ended.returncode == 0, stderr
    assert "planted: 2 runs one by one, since 2 processes divide the graphs of each step" in stderr
    assert "2 runs: test micro-F1" in output
    assert output.count("data set    planted") == 2
    assert "Warning" not in stderr, stderr
    first, second = read("outputs/results.jsonl")
    assert (first.seed, second.seed, first.epochs) == (0, 1, 3)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = 1 if cores == 1 else cores // 2  # they share the cores
    assert re.fullmatch(rf"2 x cpu \S+, {threads} threads?", first.device)
    assert len(list(Path("outputs").iterdir())) == 2
    (job,) = (path for path in Path("outputs").iterdir() if path.is_dir())
    assert sorted(path.name for path in job.iterdir()) == ["calibration.json", "config.yaml", "seed-0", "seed-1"]


@pytest.mark.kernels
@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL is a POSIX signal")
def test_two_processes_share_the_seeds_of_one_graph(command: Command):
    seeds = (*SMALL, "model.dropout=0.0", "runs=5", "training.max_epochs=50", "checkpoint_every=0")
    command(*seeds, "outputs=one")
    two = (*seeds, "trainer=ddp_cpu", "trainer.devices=2", "outputs=two")
    process = outside(*two)
    while process.poll() is None and not list(Path("two").rglob("*last.ckpt")):
        time.sleep(0.005)
    kill(process)
    for folder in Path("two").glob("*/seed-0"):
        assert not (folder / "result.json").is_file()  # it was killed in the middle
    process = outside(*two, "ckpt_path=last")
    output, stderr = process.communicate(timeout=200)
    assert process.returncode == 0, stderr
    assert "Warning" not in stderr, stderr
    assert output.startswith("seed 0: 50 epochs") and "5 runs: test accuracy" in output
    values_ = [{result.seed: result.value for result in read(f"{place}/results.jsonl")} for place in ("one", "two")]
    assert values_[0] == values_[1] and len(values_[0]) == 5
    (folder,) = {path.parent for path in runs("two")}
    expected = {"config.yaml", "calibration.json", *(f"seed-{seed}" for seed in range(5))}
    assert {path.name for path in folder.iterdir()} == expected


def test_processes_from_outside_do_not_share_seeds(command: Command, monkeypatch: pytest.MonkeyPatch):
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (
        launched | {"TORCHELASTIC_RUN_ID": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    ).items():
        monkeypatch.setenv(name, value)
    two = ("trainer=ddp_cpu", "trainer.devices=2", "runs=2", "vectorize=on")
    assert "vectorize is on, but its processes were started from outside" in command(*SMALL, *two, fails=True)


def kill(process: Any) -> None:
    """The process and those that it started."""
    assert process.poll() is None
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_command_prints_only_the_summary(place: Path):
    output, stderr = outside(*SMALL, "training.max_epochs=3").communicate(timeout=100)
    stderr = stderr.removeprefix("Compiling the kernels for their first use\n")  # where no run was before
    assert re.fullmatch(r"digits  epoch 1  loss [\d.]+  val .*  ends at 3\n", stderr)
    assert [line.split("  ")[0] for line in output.splitlines() if line] == [
        "data set",
        "model",
        "epochs",
        "validation",
        "test",
        "seconds",
        "files",
        "results",
    ]
    assert json.loads((Path("outputs") / "results.jsonl").read_text())["epochs"] == 3


# A table ------------------------------------------------------------------------------------------------------------

TABLE = ("methods=[mlp,'gat model.heads=[2,1]']", "datasets=[digits,planted]", "runs=2", "training.max_epochs=2")


def lines_of(path: str = "outputs/results.jsonl") -> list[tuple[str, str, int, float]]:
    return sorted((one.method, one.dataset, one.seed, one.value) for one in read(path))


def test_a_table_is_every_method_on_every_data_set_and_nothing_is_done_twice(command: Command):
    output = command(*TABLE)
    assert "All 4 cells are done, in outputs/table" in output
    cells = {path.name for path in Path("outputs/table").iterdir()}
    assert cells == {"digits_mlp", "digits_gat_2-1", "planted_mlp", "planted_gat_2-1"}
    lines = lines_of()
    assert [line[:3] for line in lines] == [
        (method, data, seed) for method in ("GAT", "MLP") for data in ("digits", "planted") for seed in (0, 1)
    ]
    selected = OmegaConf.load("outputs/table/planted_gat_2-1/config.yaml")
    assert (selected.model.heads, selected.training.batch_size) == ([2, 1], 2)  # the table's, and planted's own
    command(*TABLE)
    assert lines_of() == lines
    command(*TABLE, "runs=3")  # a third seed for each
    assert len(lines_of()) == 12 and set(lines) < set(lines_of())


def test_a_setting_may_be_for_one_of_the_data_sets_of_a_table(command: Command):
    quick = ("methods=mlp", "training.max_epochs=1", "training.batch_size=2")
    command(*quick, "datasets=[digits,planted]")
    assert len(read("outputs/results.jsonl")) == 2
    assert "training.batch_size has no effect: digits is one graph" in command(
        *quick, "datasets=digits", "outputs=one", fails=True
    )
    command(*quick[:2], "datasets=digits", "outputs=one")  # the failed cell is not in the way
    assert len(read("one/results.jsonl")) == 1


def test_a_cell_of_a_file_is_named_after_it(command: Command):
    np.savez("mine.npz", **graph_of(np.arange(60) % 3))
    split = ("split.per_class=5", "split.val=10", "split.test=10")
    command("methods=mlp", "datasets=file", "dataset.path=mine.npz", *split, "training.max_epochs=1")
    assert "from_file has no argument dataset.pth" in command(
        "methods=mlp", "datasets=file", "dataset.pth=mine.npz", "dataset.path=mine.npz", fails=True
    )
    assert [path.name for path in Path("outputs/table").iterdir()] == ["mine_mlp"]


def test_methods_of_a_table_keep_its_settings(command: Command):
    quick = ("datasets=digits", "runs=1", "training.max_epochs=1")
    command("experiment=table2", "methods=[chebyshev,gat]", *quick)
    assert {line[0] for line in lines_of()} == {"Chebyshev (K = 2)", "Chebyshev (K = 3)", "GAT"}
    (gat,) = (OmegaConf.load(path) for path in Path("outputs/table2").glob("digits_gat_*/config.yaml"))
    assert (gat.model.reproduction, gat.training.criterion) == (True, "loss")
    datasets = "datasets=['digits runs=2','digits training.lr=0.1']"
    command("experiment=table2", "methods=[const_gat,'gat model.heads=[2,1]']", datasets, *quick[1:], "outputs=others")
    cells = {"digits_const_gat", "digits_gat_2-1", "digits_const_gat_0.1", "digits_gat_0.1_2-1"}
    assert {path.name for path in Path("others/table2").iterdir()} == cells
    rates = [OmegaConf.load(path).training.lr for path in Path("others/table2").glob("*_0.1*/config.yaml")]
    assert rates == [0.1, 0.1]


def test_a_cell_that_fails_leaves_the_others(command: Command):
    output = command("methods=[mlp,'gat model.heads=[2]']", *TABLE[1:], fails=True)
    assert "heads has 1 entry, expected 2" in output and "2 of 4 cells failed: digits_gat_2, planted_gat_2" in output
    assert f"[{'.' * 20}] 0 of 8 runs, 0 of 4 cells, 0 min; digits_mlp begins" in output
    assert f"[{'#' * 5}{'.' * 15}] 2 of 8 runs, 1 of 4 cells, 0 min, about 0 min left; digits_gat_2 begins" in output
    assert f"[{'#' * 10}{'.' * 10}] 4 of 8 runs, 2 of 4 cells" in output
    assert [line[:2] for line in lines_of()] == [("MLP", "digits")] * 2 + [("MLP", "planted")] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("datasets=digits",), r"methods is None, expected a list such as methods=\[gat,gcn\]"),
        (("methods=gat", "datasets=[]"), r"datasets is \[\], expected null or a list such as \[cora,citeseer\]"),
        (("methods=gat", "datasets=digits", "model=mlp"), "model=mlp is for a single run. In a table, use methods="),
        (("methods=gat", "datasets=digits", "runs=0"), "runs is 0, expected a whole number, at least 1"),
        (("methods=cat", "datasets=digits"), "model=cat is unknown. Known are: .*gat"),
        (("methods=[gat,'gat runs=2']", "datasets=digits"), r"Two methods have the same cell digits_gat\."),
        (("methods=gat", "datasets=digits", "trainer=ddp_cpu"), "The runs of a table use one process each."),
        (("split.split=1",), r"split\.split is 1, but digits has one split\. Leave out split\.split"),
        (("split.split=all",), r"digits has one split, expected several for split\.split=all"),
        (("split.fold=all",), r"digits has one split, .* or split\.folds=\.\.\. for graphs"),
        (("split.split=every",), "split.split is 'every', expected all or a whole number, at least 0"),
        (("split.folds=2",), "split.folds is 2, expected null or a whole number, at least 3, or the path of a file"),
        (("protocol=errica",), r"protocol=errica is for tables\. Add methods="),
        (("protocol=errica", "methods=mlp", "datasets=digits"), "digits has one split, expected several"),
        (("split.split=all", "trainer=ddp_cpu"), "The runs of a table use one process each"),
    ],
)
def test_impossible_tables_and_splits_are_refused(command: Command, arguments: tuple[str, ...], message: str):
    assert re.search(message, command(*arguments, fails=True))
    assert not Path("outputs").exists()


def test_a_cell_is_not_finished_with_other_settings(command: Command):
    cell = ("methods=mlp", "datasets=digits", "training.max_epochs=1")
    command(*cell)
    output = command(*cell, "training.lr=0.7", fails=True)
    assert "digits_mlp was started with other settings: training.lr was" in output and "is 0.7" in output


# Every split, every fold --------------------------------------------------------------------------------------------


def masked(splits: int = 3) -> tuple[str, ...]:
    """A graph with several given splits, and the settings that train on it quickly."""
    draw = np.random.default_rng(0)
    part = np.stack([draw.permutation(60) % 3 for _ in range(splits)], 1)
    masks = {f"{name}_mask": part == number for number, name in enumerate(("train", "val", "test"))}
    edges = draw.integers(0, 60, (2, 200))
    np.savez("mine.npz", x=draw.random((60, 4)), y=draw.integers(0, 2, 60), edge_index=edges, **masks)
    return "dataset=file", "dataset.path=mine.npz", "training.max_epochs=3", "model=mlp"


def many_graphs() -> tuple[str, ...]:
    draw = torch.Generator().manual_seed(0)
    edges = torch.tensor([[0, 1, 2], [1, 2, 0]])
    torch.save([Data(torch.rand(3, 4, generator=draw), edges, y=torch.tensor([i % 2])) for i in range(30)], "many.pt")
    return "dataset.path=many.pt", "split.folds=3", "training.max_epochs=3", "training.batch_size=8"


def test_all_splits_are_the_single_splits_and_nothing_is_trained_twice(command: Command, passes: list[list[int]]):
    settings = masked()
    output = command(*settings, "split.split=all", "runs=2")
    assert passes == [[0, 1]] * 3  # one training for each split
    for split in range(3):
        command(*settings, f"split.split={split}", "runs=2", "outputs=single")
    lines, single = read("outputs/results.jsonl"), read("single/results.jsonl")
    assert [(one.split, one.seed, one.value) for one in lines] == [(one.split, one.seed, one.value) for one in single]
    assert len({one.config_hash for one in (*lines, *single)}) == 1 and len({one.value for one in lines}) > 1
    values = [one.value for one in single]
    assert f"test accuracy {np.mean(values):.1f} ± {np.std(values, ddof=1):.1f} % over 3 splits and 2 seeds" in output
    before = Path("outputs/results.jsonl").read_bytes()
    output = command(*settings, "split.split=all", "runs=2")
    assert "epochs" not in output and Path("outputs/results.jsonl").read_bytes() == before
    del passes[:]
    output = command("-m", *settings, "split.split=all", "runs=2", "training.lr=0.02,0.003,0.05", STACKED)
    assert passes == [[0, 1, 0, 1]] * 3 and "3 settings of mine, the best first by validation accuracy" in output
    assert len(list(Path("outputs").glob("mine_mlp_*"))) == 3  # beside the first
    (runs,) = gathered(report_lines("single/results.jsonl")).values()
    assert runs[0].mean == pytest.approx(np.mean(values)) and len(runs[0].values) == 6
    rows = rows_of(gathered(report_lines("outputs/results.jsonl")))
    assert set(rows) == {"MLP (lr 0.003)", "MLP (lr 0.02)", "MLP (lr 0.05)"}


def test_all_folds_in_a_table_have_a_row_for_each_method(command: Command):
    settings = [f"++{setting}" for setting in many_graphs()]
    output = command("methods=[mlp,gin]", "datasets=file", "split.fold=all", *settings)
    assert "All 6 cells are done" in output and "many, GIN: test" in output and "over 3 splits and 1 seed\n" in output
    assert {path.name for path in Path("outputs/table").iterdir()} == {
        f"many_{model}_fold-{fold}" for model in ("mlp", "gin") for fold in range(3)
    }
    rows = rows_of(gathered(report_lines("outputs/results.jsonl")))
    assert {label: [len(one.values) for one in its.values()] for label, its in rows.items()} == {"MLP": [3], "GIN": [3]}


def test_erricas_protocol_reports_the_candidate_with_the_best_validation_score_on_each_fold(
    command: Command, passes: list[list[int]]
):
    methods = "methods=['mlp model.hidden_channels=2','mlp model.hidden_channels=2 training.lr=0.05',gin]"
    table = ("protocol=errica", methods, "datasets=file", "runs=2", *(f"++{setting}" for setting in many_graphs()))
    output = command(*table)
    candidates, lines = read("outputs/errica/candidates.jsonl"), read("outputs/results.jsonl")
    assert [one.seed for one in candidates] == [0] * 9
    assert passes == [[0, 0]] * 3 + [[1, 2]] * 6  # the candidates of one shape, then the seeds of the chosen ones
    assert len(lines) == 12 and {one.seed for one in lines} == {1, 2}
    for one in lines:
        its = [other for other in candidates if (other.row, other.split) == (one.row, one.split)]
        best = max(other.val for other in its)
        first = next(other for other in its if other.val == best)
        chosen, expected = (OmegaConf.load(Path(path) / "config.yaml") for path in (one.run_dir, first.run_dir))
        assert {**chosen.model, "study": None} == {**expected.model, "study": None}
        assert chosen.training == expected.training
    for name in ("MLP", "GIN"):
        scores = np.array([one.value for one in lines if one.row == name]).reshape(3, 2).mean(1)
        spread = f"{scores.mean():.1f} ± {scores.std(ddof=1):.1f}"
        assert f"many, {name}, Errica's protocol: test accuracy {spread} % over 3 splits, the mean of 2 seeds" in output
        ((one,),) = (its for key, its in gathered(report_lines("outputs/results.jsonl")).items() if key.row == name)
        assert one.values == pytest.approx(scores) and one.std == pytest.approx(scores.std(ddof=1))
    before = Path("outputs/results.jsonl").read_bytes()
    assert "epochs" not in command(*table) and Path("outputs/results.jsonl").read_bytes() == before
    shutil.rmtree("outputs/errica/many_mlp_fold-1/seed-2")
    assert command(*table).count("\nseed ") + 1 == 2  # the lines of this cell's two seeds


@pytest.mark.kernels
def test_a_table_killed_twice_and_filled_by_two_is_the_table(command: Command):
    table = ("methods=[mlp,'mlp model.hidden_channels=9']", "datasets=digits", "runs=6", "vectorize=off")
    table += ("training.max_epochs=10", "checkpoint_every=0", "trainer.accelerator=cpu")
    command(*table, "outputs=whole")

    for done in (2, 5):  # killed when so many lines are there
        writers = [outside(*table), outside(*table)]
        while not Path("outputs/results.jsonl").is_file() or len(lines_of()) < done:
            assert all(writer.poll() in (None, 0) for writer in writers)
            time.sleep(0.005)
        for writer in writers:
            os.killpg(writer.pid, signal.SIGKILL)
            writer.communicate()
    writers = [outside(*table), outside(*table)]
    for writer in writers:
        _, error = writer.communicate(timeout=120)
        assert writer.returncode == 0, error
    assert lines_of() == lines_of("whole/results.jsonl") and len(lines_of()) == 12
