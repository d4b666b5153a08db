"""The command line before a run: help, completion and the settings answer without torch."""

from __future__ import annotations

import inspect
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gat_pyg
import gat_pyg.run
from gat_pyg import VERBS
from gat_pyg.command import help as reference
from gat_pyg.command.verbs import REQUIRED, SEVERAL, arguments_of, parser
from gat_pyg.settings.settings import TRAINER

LIGHT = """
import sys
from gat_pyg.run import main
for arguments in (["--version"], ["--help"], ["--cfg", "job", "model=gcn"], ["-sc", "query=bash"],
                  ["predict", "--help"], ["report", "--help"], ["--help", "training.patience", "scheduler", "best"]):
    sys.argv = ["gat-pyg", *arguments]
    try:
        main()
    except SystemExit:
        pass
heavy = {"torch", "lightning", "torch_geometric", "numba", "numpy", "matplotlib"} & {*sys.modules}
sys.exit(f"imported: {sorted(heavy)}" if heavy else 0)
"""


@pytest.fixture(scope="module")
def answers() -> str:
    environment = {**os.environ, "COMP_LINE": "gat-pyg train dataset=c"}
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "text",
    [
        f"gat_pyg {gat_pyg.__version__}\n",
        "  gat-pyg dataset=cora runs=100  ",
        "  training.patience=100         epochs without improvement before the stop\n",
        "training.patience=100\n  epochs without improvement before the stop; null: all max_epochs, and",
        "  scheduler=linear   A line from training.lr to 0 over training.max_epochs\n",
        "_target_: gat_pyg.models.baselines.GCN",
        "dataset=citeseer\tdataset=citeseer_heart\tdataset=citeseer_links",
        "  gat-pyg predict RUN [DATA ...]    Return the predictions of a trained run",
        "usage: gat-pyg predict [-h] [--out OUT] [--seed SEED]",
        "usage: gat-pyg best [-h]",
        "  --against AGAINST     compare the other rows of the general table",
    ],
)
def test_help_version_settings_and_completion_need_no_torch(answers: str, text: str):
    assert text.replace("\t", " ") in answers.replace("\t", " ")


@pytest.mark.parametrize("name", VERBS)
def test_the_arguments_of_a_verb_are_those_of_its_function(name: str):
    parameters = inspect.signature(getattr(gat_pyg, VERBS[name])).parameters
    defaults = {key: each.default for key, each in parameters.items() if key != "model"}
    arguments = arguments_of(VERBS[name])
    assert {*arguments} == {*defaults} and all(each.text for each in arguments.values())
    assert all(each.default in (defaults[key], REQUIRED, SEVERAL) for key, each in arguments.items())
    options = {action.dest: action.default for action in parser(name)._actions if action.option_strings}
    own = {"predict": {"out"}, "explain": {"out"}}.get(name, set())
    assert {key for key, value in options.items() if value != defaults.get(key, value)} <= own


def test_each_setting_is_described():
    plain = reference.plain_settings(reference.composed(reference.DEFAULTS))
    assert [setting.name for setting in plain.values() if not setting.text and setting.name not in TRAINER] == []
    weight_decay, edge_dim = (
        plain["training.weight_decay"],
        reference.arguments("model", reference.composed().model)["edge_dim"],
    )
    assert weight_decay.value == "0.0005" and weight_decay.text.startswith("L2 on all")
    assert edge_dim.value == "" and edge_dim.text.startswith("the number of edge")
    assert "With model=chebyshev: model.order=2\n  K, the highest degree" in reference.explanation("model.order")
    assert reference.explanation("model.aggr", ["model=sage"]).startswith("model.aggr=")
    for name, near in {
        "training.patiense": "training.patience",
        "model.head": "model.heads",
        "reprot": "report",
    }.items():
        with pytest.raises(ValueError, match=rf"^{name} is .* Did you mean {near}\?$"):
            reference.explanation(name)


def test_a_wrong_option_explains_how_settings_are_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["gat-pyg", "--lr", "1"])
    with pytest.raises(SystemExit, match="2"):
        gat_pyg.run.main()
    assert "settings are NAME=VALUE without dashes, as in training.lr=0.01, and stand" in capsys.readouterr().err


def test_a_stdout_without_plus_minus_gets_a_question_mark(monkeypatch: pytest.MonkeyPatch):
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "argv", ["gat-pyg", "--version"])
    gat_pyg.run.main()
    print("83.0 ± 0.7 %")
    stdout.seek(0)
    assert stdout.read().endswith("\n83.0 ? 0.7 %\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_stdout_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(gat_pyg.run.hydra, "main", lambda **_: lambda job: lambda: print("a summary", flush=True))
    monkeypatch.setattr(sys, "argv", ["gat-pyg"])
    with open("/dev/full", "w", encoding="utf-8") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        with pytest.raises(SystemExit, match="1"):
            gat_pyg.run.main()
    assert "gat-pyg: standard output could not be written: No space left on device." in capsys.readouterr().err


def test_every_public_name_is_defined() -> None:
    names = [name for name in dir(gat_pyg) if not name.startswith("_")]
    assert {"GATConv", "TaskData", "attend", "data", "report", "seeds"} <= {*names}
    assert not {"Any", "import_module", "version"} & {*names} and all(hasattr(gat_pyg, name) for name in names)
