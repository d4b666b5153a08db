"""A training that begins with an earlier run: `from=RUN`."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf

import gat_pyg
import gat_pyg.kernels.device
from gat_pyg.runs.result import read
from gat_pyg.runs.task import READ
from tests.commands import run_command

N = 60


def month(folder: str, target: str, kinds: list[str], classes: list[str], seed: int) -> None:
    """Tables of a month: other ids, scale and categories, and another order of columns."""
    draw = np.random.default_rng(seed)
    labels = draw.choice(classes, N) if classes else draw.normal(100 * seed, seed, N)
    columns = {"id": [f"{folder}-{i}" for i in range(N)], "kind": draw.choice(kinds, N), "age": draw.normal(seed, 1, N)}
    nodes = pd.DataFrame({**columns, target: labels})
    edges = pd.DataFrame(nodes["id"].to_numpy()[draw.integers(N, size=(3 * N, 2))], columns=["src", "dst"])
    Path(folder).mkdir()
    nodes[nodes.columns[::-1] if seed > 1 else nodes.columns].to_csv(f"{folder}/nodes.csv", index=False)
    edges["way"] = draw.choice(["card", "cash"], len(edges))
    edges.to_csv(f"{folder}/edges.csv", index=False)


def train(folder: str, target: str, run: str, *overrides: str) -> None:
    tables = [f"dataset.nodes={folder}/nodes.csv", f"dataset.edges={folder}/edges.csv", f"dataset.target={target}"]
    options = ["training.max_epochs=2", "baselines=false", f"hydra.run.dir=outputs/{run}"]
    run_command("train", "dataset=tables", *tables, *options, *overrides)


pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),  # its hints on speed
    pytest.mark.filterwarnings("ignore:training.lr is 0"),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(gat_pyg.kernels.device.REASONS, "cpu", "the kernels are not the subject")


NETWORK = ["model.hidden_channels=[4]", "model.heads=[2,1]", "model.num_layers=null", "model.norm=null"]
STILL = ["training.lr=0", "training.weight_decay=0"]  # the weights stay those at the start


@pytest.mark.filterwarnings("ignore:nodes.csv. kind has .* not a category of the training")
@pytest.mark.parametrize("classes", [["a", "b", "c"], []], ids=["classes", "quantities"])
def test_weights_columns_classes_and_scales_are_those_of_the_earlier_run(classes: list[str]) -> None:
    month("m1", "y", ["red", "blue", "green"], classes, 1)
    month("m2", "y", ["violet", "blue", "red"], classes[:2], 2)  # without a class and a category, with a new one
    train("m1", "y", "one", *NETWORK, "model.act=relu")
    train("m2", "y", "two", "from=outputs/one", *STILL, "model.dropout=0.3")
    one, two = (gat_pyg.load(f"outputs/{run}") for run in ("one", "two"))
    for key, value in one.state_dict().items():
        assert value.equal(two.state_dict()[key]), key
    assert one.objective.to_dict() == two.objective.to_dict()
    assert one.preparation.class_names == two.preparation.class_names
    sources = [dict(model.preparation.source) for model in (one, two)]
    assert sources[0]["columns"] == sources[1]["columns"] and sources[1]["nodes"] == "m2/nodes.csv"
    tables = [gat_pyg.predict(f"outputs/{run}", ["m2/nodes.csv", "m2/edges.csv"]) for run in ("one", "two")]
    pd.testing.assert_frame_equal(*tables)  # so the activation is the earlier run's
    model = OmegaConf.load("outputs/two/config.yaml").model
    assert (model.act, model.dropout) == ("relu", 0.3)
    shutil.rmtree("outputs/one")
    READ.clear()
    shutil.move("outputs/two", "elsewhere")
    (scores,) = gat_pyg.evaluate("elsewhere").scores.values()
    assert next(iter(scores.values())) == read("outputs/results.jsonl")[-1].value


def test_seeds_start_from_their_own_and_what_does_not_fit_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    month("m1", "y", ["red"], ["a", "b"], 1)
    month("m2", "y", ["red"], ["a", "b"], 2)
    train("m1", "y", "one", *NETWORK, "runs=2")
    train("m2", "y", "two", *STILL, "runs=2", "from=outputs/one")
    for seed in (0, 1):
        one, two = (gat_pyg.load(f"outputs/{run}", seed=seed).state_dict() for run in ("one", "two"))
        assert all(torch.equal(value, two[key]) for key, value in one.items())
    train("m2", "y", "again", *STILL, "runs=2", "from=outputs/one", "ckpt_path=last", "hydra.run.dir=outputs/new")
    assert "The run in outputs/two is finished" in "".join(capsys.readouterr())
    with pytest.warns(UserWarning, match="trained on the same files with another split, so rows of this test may"):
        train("m1", "y", "same", *STILL, "from=outputs/one", "split.seed=1")
    for overrides, text in (
        (["from=outputs/one", "runs=3"], "has the seeds 0, 1, but not 2. Choose seed and runs among them"),
        (["from=outputs/none"], "outputs/none is not a run folder: it does not exist"),
        (["from=outputs/one", *NETWORK, "model.hidden_channels=[5]"], "has shape (1, 2, 5) in the model and (1, 2, 4)"),
        (["from=outputs/one", "methods=[gat]", "datasets=[tables]"], "keeps the network of that run, but methods"),
        (["from=outputs/one", "dataset.target=kind"], "The target is kind, but the earlier run predicts y"),
    ):
        with pytest.raises(SystemExit):
            train("m2", "y", "wrong", *overrides)
        assert text in capsys.readouterr().err
    values = ["model.dropout=0.3,0.4", "-m", "hydra.sweep.dir=outputs/sweep"]
    train("m2", "y", "sweep", *STILL, "from=outputs/one/seed-0", *values)
    models = [OmegaConf.load(f"outputs/sweep/{job}/config.yaml").model for job in (0, 1)]
    assert [(model.dropout, model.heads) for model in models] == [(0.3, [2, 1]), (0.4, [2, 1])]
    assert "2 settings of m2, the best first" in capsys.readouterr().out
    hashes = {result.run_dir: result.config_hash for result in read("outputs/results.jsonl")}
    assert len({*hashes.values()}) == 5  # the content of the earlier run counts
