"""The run that validation prefers, and the command that trains with its settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

import gat_pyg.run
from gat_pyg.runs.folder import Job, command_in
from gat_pyg.runs.result import Result, append, settings_in
from gat_pyg.settings.settings import Settings
from tests.commands import run_command


def write(path: Path, method: str, metric: str, scores: dict[int, tuple[float, float]], **others: str) -> None:
    """Lines with (validation, test) scores by seed."""
    for seed, (val, test) in scores.items():
        times = {"timestamp": f"2026-01-0{1 + seed}T00:00:00+00:00", "run_dir": f"{path.parent}/{method}/seed-{seed}"}
        append(
            Result(method, "lab", metric, test, seed, 9, 8, val, 1.0, 0.1, 9, config_hash=method, **times, **others),
            path,
        )


def test_the_best_is_that_of_validation_in_the_direction_of_the_metric(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    write(path, "GAT", "rmse", {0: (0.50, 0.9), 1: (0.52, 0.9), 2: (0.51, 0.9)})
    write(path, "GCN", "rmse", {0: (0.80, 0.1), 1: (0.85, 0.1), 2: (0.79, 0.1)})
    write(path, "MLP", "rmse", {0: (0.1, 0.1)}, data="another split")
    best = gat_pyg.best("lab", path)
    assert (best.runs.method, best.second and best.second.method, best.num_settings) == ("GAT", "GCN", 2)
    assert best.left_out == 1 and best.difference.name == "paired, 3 seeds" and 0.001 < best.difference.p < 0.01
    assert best.folder == tmp_path / "GAT" and best.command is None
    text = str(best)
    assert "best        GAT, validation RMSE 0.510 ± 0.010 (3 runs), test RMSE 0.900 ± 0.000 (3 runs)" in text
    assert "next        GCN, validation RMSE 0.813 ± 0.032 (3 runs); p = 0.00" in text and "left out    1 runs" in text
    write(path, "GCN", "accuracy", {5: (90.0, 80.0)})
    write(path, "GAT", "accuracy", {5: (91.0, 80.0)})
    newest = gat_pyg.best("lab", path)
    assert newest.runs.method == "GAT" and "needs two runs of both: train both with runs=5" in str(newest)
    assert gat_pyg.best("lab", path, "rmse").runs.method == "GAT"
    for arguments, message in (
        (("lob", path), r"has no run on lob\. Did you mean lab\?"),
        (("lab", path, "f1"), r"no run on lab with metric=f1, expected accuracy or rmse\."),
    ):
        with pytest.raises(ValueError, match=message):
            gat_pyg.best(*arguments)


def test_the_command_of_a_run_is_in_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["dataset=planted", "dataset.graphs=8", "model=gcn", "model.dropout=0.3", "training.max_epochs=1", "runs=2"]
    run_command(*words)
    best = gat_pyg.best("planted")
    assert best.command == " ".join(["gat-pyg", *words])
    Job(Settings.parse(OmegaConf.create(settings_in(best.folder))), tmp_path / "alone").save_settings()
    assert command_in(tmp_path / "alone") is None is command_in(tmp_path / "nowhere")
