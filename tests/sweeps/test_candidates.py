"""Settings that are chosen by validation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_dir

from gat_pyg.runs.defaults_by_data import suited
from gat_pyg.runs.result import Result
from gat_pyg.runs.task import read_task
from gat_pyg.settings.conf import VERSION_BASE, config_folder
from gat_pyg.settings.overrides import translated
from gat_pyg.settings.settings import Settings
from gat_pyg.sweeps import candidates
from gat_pyg.sweeps.candidates import chosen
from gat_pyg.sweeps.messages import advice


def command(*overrides: str) -> Settings:
    arguments = translated(["dataset=file", "dataset.path=graph.npz", "model.hidden_channels=4", *overrides])
    with initialize_config_dir(str(config_folder()), **VERSION_BASE):
        settings = suited(Settings.parse(compose("config", arguments)), arguments)
        return chosen(settings, arguments)


def test_a_candidate_stays_if_its_validation_score_is_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GAT_PYG_DATA", str(tmp_path))
    monkeypatch.setattr(candidates, "NODES", 1000)
    monkeypatch.setattr(candidates, "EPOCHS", 15)
    monkeypatch.setattr(candidates, "MOST", 1)
    monkeypatch.setattr(candidates, "CANDIDATES", {"encoding=columns": candidates.CANDIDATES["encoding=columns"]})
    draw = np.random.default_rng(0)
    edges, x = draw.integers(400, size=(2, 1200)), draw.normal(size=(400, 2))
    largest = np.full(400, -9.0)
    np.maximum.at(largest, edges.ravel(), x[edges[::-1].ravel(), 0])  # which a mean of neighbours hides
    np.savez("graph.npz", x=x, edge_index=edges, y=largest > np.median(largest))
    few = command("split.val=80")  # labels
    assert few.encoding.target is None and few.runs == 3
    assert not Path("outputs").exists()
    sizes = ("split.val=120", "split.test=100")
    settings = command(*sizes)
    assert str(settings.encoding.target).endswith("GraphColumns") and "encoding=columns" in settings.suited
    assert "chosen by validation: encoding=columns (" in capsys.readouterr().err
    assert read_task(settings).num_encodings == 9
    assert settings.runs == 3 and command(*sizes, "runs=1").runs == 1
    with monkeypatch.context() as patch:  # the same difference is within its standard error
        patch.setattr(candidates, "EPOCHS", 1)
        patch.setattr(candidates, "standard_error", lambda *_: 100.0)
        other = command(*sizes, "seed=1")
        assert other.encoding.target is None
    assert "not chosen by validation: encoding=columns (" in capsys.readouterr().err
    baselines, fields = {"boosting": 99.0}, ("accuracy", 50.0, 0, 9, 8, 50.0, 1.0, 0.1, 9)
    below, advised = Result("GAT", "own", *fields, baselines=baselines), "encoding=columns, "
    assert advised in advice(below, read_task(few), few) and advised not in advice(below, read_task(other), other)
    with pytest.raises(ValueError, match="patience"):
        command(*sizes, "training.patience=0")
    assert "trying" not in capsys.readouterr().err
    monkeypatch.setattr(candidates, "one_run", None)  # the same command again trains nothing
    assert command(*sizes).hash == settings.hash and command(*sizes, "ckpt_path=last").hash == settings.hash
    for override in ("encoding=none", "recipe=none", "split.split=all"):  # chosen by the user, or of several splits
        assert command(*sizes, override).encoding.target is None


@pytest.mark.parametrize(
    ("F", "names"), [(100, ["encoding", "training.label_rate", "model.encoder"]), (101, ["training.label_rate"])]
)
def test_of_many_columns_no_statistics_and_no_quantiles_are_tried(
    F: int, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    edges, x = draw.integers(300, size=(2, 900)), draw.normal(size=(300, F))
    np.savez("graph.npz", x=x, edge_index=edges, y=draw.integers(2, size=300))
    monkeypatch.setattr(candidates, "LABELS", 1000)  # so that nothing is trained
    settings = command()
    fitting = [
        name for name, candidate in candidates.CANDIDATES.items() if candidate.fits(read_task(settings), settings)
    ]
    assert [name.partition("=")[0] for name in fitting] == names
