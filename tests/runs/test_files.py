"""The files that a run leaves, and what they say."""

from __future__ import annotations

import csv
import hashlib
import logging
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.datasets import KarateClub

import gat_pyg.runs.build
import gat_pyg.runs.process
import gat_pyg.sweeps.job
import gat_pyg.sweeps.messages
from gat_pyg import GAT, load, predict
from gat_pyg.data import digits, from_file
from gat_pyg.distributed.ranks import print_once
from gat_pyg.kernels.cpu import cache
from gat_pyg.report.tables.general import rows_of
from gat_pyg.runs.groups import gathered
from gat_pyg.runs.groups import lines_of as report_lines
from gat_pyg.runs.reference_scores import Baselines
from gat_pyg.runs.result import Result, read
from gat_pyg.runs.task import task_of
from gat_pyg.settings.conf import VERSION_BASE, config_folder
from gat_pyg.settings.hashing import flattened
from gat_pyg.settings.settings import Settings, differences
from tests.commands import (
    LEFT_BY_A_SEED,
    QUANTITIES,
    SMALL,
    Command,
    runs,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated")


def test_a_run_leaves_its_settings_metrics_weights_and_one_line(command: Command):
    output = command(*SMALL, "seed=5", "training.max_epochs=20")
    (folder,) = runs()
    assert {path.name for path in folder.iterdir()} == LEFT_BY_A_SEED
    assert sorted(path.name for path in Path("outputs").iterdir()) == sorted([folder.name, "results.jsonl"])
    (result,) = read("outputs/results.jsonl")
    assert result == Result.from_json((folder / "result.json").read_text())
    fields = (result.method, result.dataset, result.metric, result.seed, result.epochs)
    assert fields == ("MLP", "digits", "accuracy", 5, 20)
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
        "data set    digits: 1,797 nodes, 12,618 edges, 10 node classes; 200 / 500 / 1,000 nodes\n",
    ):
        assert words in output
    assert result.value > result.majority and "warning" not in output


MODELS = {  # the argument -> the method in the Result
    "model=mlp": "MLP",
    "model.mechanism=gatv2 model.reproduction=false": "GAT",
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


@pytest.mark.parametrize("dataset", ["digits", "planted"])
def test_a_constant_prediction_is_warned_of(command: Command, dataset: str, monkeypatch: pytest.MonkeyPatch):
    if dataset == "planted":  # as if it were a long training
        monkeypatch.setattr("gat_pyg.sweeps.job.LARGE", 0)
        calls: list[str] = []
        for place in ("sweeps.job", "runs.sequential"):
            once = partial(lambda place, *_: calls.append(place) or Baselines({"linear model": 0.0}, 0.0), place)
            monkeypatch.setattr(f"gat_pyg.{place}.baselines_of", once)
    settings = (f"dataset={dataset}", "runs=2", "training.max_epochs=2", "baselines=true")
    output = command("model=mlp", f"model._target_={__name__}.Constant", *settings)
    first, _ = read("outputs/results.jsonl")
    if dataset == "digits":
        assert first.baselines is not None and first.baselines.keys() == {
            "neighbours' labels",
            "linear model",
            "random forest",
        }
        score = max(first.baselines.values())
        assert output.count(f"worse than the neighbours' labels ({score:.1f} %, standard error ") == 3
        assert f"\nbaselines   neighbours' labels {score:.1f} %, linear model" in output
        assert "\ntry         training.label_rate=0.8" in output
        data = digits().test[0]
        majority = 100 * data.y[data.test_mask].bincount().max() / 1000
        assert first.majority == pytest.approx(majority.item())
        message = f"no better than predicting the majority class for every node ({majority:.1f} %)"
    else:
        message = f"no better than the best prediction that is the same for every node ({first.majority:.3f})"
        assert calls == ["sweeps.job", "runs.sequential", "runs.sequential"]  # before the training, too
    assert first.value <= first.majority
    assert output.count(message) == 3  # of each seed and of both
    assert f"\nwarning     the averaged prediction is {message}" in output


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


def test_the_score_for_a_sweeper_is_highest_for_the_best(command: Command, monkeypatch: pytest.MonkeyPatch):
    scores = []
    execute = gat_pyg.sweeps.job.execute
    monkeypatch.setattr(gat_pyg.sweeps.job, "execute", lambda config: scores.append(execute(config)))
    command(*QUANTITIES, *SMALL, "metric=rmse", "runs=2", "training.max_epochs=2")
    assert scores == pytest.approx([-np.mean([result.val for result in read("outputs/results.jsonl")])])


@pytest.mark.filterwarnings("ignore:mine. keys that are not read")
def test_hash_includes_the_content_of_files(command: Command):
    def write(seed: int) -> None:
        draw = np.random.default_rng(seed)
        edge_index = np.sort(draw.integers(0, 60, (2, 200)), axis=0)
        arrays = {"x": draw.random((60, 4)), "y": draw.integers(0, 3, 60), "edge_index": edge_index}
        Path("mine").mkdir(exist_ok=True)
        for name, values in (arrays | {"ignored": draw.random(3)}).items():
            np.save(f"mine/{name}.npy", values)

    links = ("dataset._target_=gat_pyg.data.links", "+dataset.dataset._target_=gat_pyg.data.from_file")
    split = [f"+dataset.dataset.{key}={size}" for key, size in (("per_class", 5), ("val", 10), ("test", 10))]
    arguments = [*SMALL, *links, "+dataset.dataset.path=mine", *split]
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


def test_hash_includes_the_source_of_own_classes(place: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [str(place), *(folder for folder in sys.path if folder not in ("", str(place)))])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (place / "mine.py").write_text(
        "from collections.abc import Sized\nimport parts\nclass Net(parts.Base):\n    pass\n"
    )
    every, settings = [], ["model=mlp", "model._target_=mine.Net", "model.num_layers=2"]
    for base in ("MLP", "MLP", "GCN"):
        for name in ("mine", "parts"):
            sys.modules.pop(name, None)
        (place / "parts.py").write_text(f"from torch_geometric.nn import {base} as Base\n")
        with initialize_config_dir(str(config_folder()), **VERSION_BASE):
            every.append(Settings.parse(compose("config", settings)))
    first, again, other = every
    assert first.hash == again.hash != other.hash
    text = differences(*(flattened(each.to_dict()) for each in (first, other)))
    assert re.fullmatch(r"the source of your own classes was \w{12}, is \w{12}", text)
    (place / "parts.py").write_text("from torch_geometric.nn import MLP as Base\n")
    sources = b"".join(
        name.encode() + (place / f"{name}.py").read_bytes() for name in ("mine", "parts")
    )  # and no other
    assert first.code == hashlib.sha256(sources).hexdigest()[:12]


def test_few_non_zeros_are_a_sparse_matrix(command: Command, monkeypatch: pytest.MonkeyPatch):
    draw = np.random.default_rng(0)
    x = draw.random((60, 100)) * (draw.random((60, 100)) < 0.05)
    np.savez("mine.npz", x=x, y=draw.integers(0, 3, 60), edge_index=draw.integers(0, 60, (2, 200)))
    arguments = ("dataset=file", "dataset.path=mine.npz", "split.per_class=5", "split.val=10", "split.test=10")
    arguments += ("model=gat", "training.max_epochs=2")
    layouts, reports = [], []
    forward = GAT.forward

    def spy(self: GAT, x: torch.Tensor, edge_index: torch.Tensor, edge_attr: None = None) -> torch.Tensor:
        layouts.append(x.layout)
        return forward(self, x, edge_index, edge_attr)

    monkeypatch.setattr(GAT, "forward", spy)
    monkeypatch.setattr("gat_pyg.distributed.ranks.print_message", reports.append)
    print_once.cache_clear()
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
    of_sparse = [text for text in reports if "nonzero" in text]  # once for all trainings of a process
    assert of_sparse == [f"mine: only {share} of the features are nonzero; using a sparse matrix"]


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


def test_compilation_of_kernels_is_reported_once(monkeypatch: pytest.MonkeyPatch):
    output: list[str] = []
    monkeypatch.setattr(gat_pyg.runs.process, "rank_zero_print", output.append)
    with gat_pyg.runs.process.compiling_reported():
        for text in ("compiling %s", "compiling %s", "compiled %s", "compiled %s", "compiling %s", "compiled %s"):
            cache.log.info(text, "a kernel")
    first, last = output
    assert first == "Compiling the kernels for their first use" and last.startswith("Compiled the kernels in 0 s of ")
    assert not cache.log.filters and cache.log.level == logging.NOTSET


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
