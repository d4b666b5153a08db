"""The benchmark runs on a small scale, and prints no row of a way that is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from gat_pyg.data import digits
from gat_pyg.models import GAT, PRESETS


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    import attention

    monkeypatch.setattr(attention, "bandwidth", lambda device: 1.0)  # takes seconds and large memory
    return attention


def run(bench: ModuleType, folder: Path, *cases: str) -> tuple[int, dict[str, Any]]:
    ways = ["pyg", "auto", "segment", "Linear alone"]
    status = bench.main(
        ["--cases", *cases, "--ways", *ways, "--device", "cpu", "--scale=0.01", "--rounds=1", f"--out={folder}/it.json"]
    )
    return status, json.loads((folder / "it.json").read_text())


def test_every_kind_of_case_gives_a_row_for_every_way(
    bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = ["citeseer", "cora-sparse", "ppi-2", "ppi-1-gatv2", "cora-alone-8x8"]
    status, record = run(bench, tmp_path, *cases)
    printed = capsys.readouterr().out
    assert status == 0 and record["wrong"] == []
    rows = {(row["case"], row["way"]): row for row in record["rows"]}
    assert {case for case, way in rows if way == "pyg"} == set(cases)
    assert ("ppi-2", "Linear alone") in rows and ("cora-alone-8x8", "Linear alone") not in rows
    row = rows["ppi-2", "auto"]
    assert row["times_pyg"] > 0 and row["gather_gb_s"] > 0 and row["structure_seconds"] > 0 and row["error"] < 1e-5
    assert len(row["forward"]) == len(row["step"]) == 1
    assert printed.count("\n| ") == len(rows) and "| ppi-sized, 1024 → 4×256 | auto |" in printed
    assert record["graphs"]["ppi-sized"]["nodes"] == 46


def of(results: dict[str, torch.Tensor], name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    return {**results, name: change(results[name])}


def one_nan(value: torch.Tensor) -> torch.Tensor:
    value = value.clone()
    value.view(-1)[0] = torch.nan
    return value


SPOILT = {
    "output is off": lambda results: of(results, "output", lambda value: value * 1.001),
    "output is off by nan": lambda results: of(results, "output", one_nan),
    "gradient of att_src is off": lambda results: of(results, "att_src", lambda value: value * 1.001),
    "gradient of lin.weight is off by nan": lambda results: of(results, "lin.weight", one_nan),
    "gradient of x is missing": lambda results: {name: value for name, value in results.items() if name != "x"},
    "gradient of bias is of shape": lambda results: of(results, "bias", lambda value: value[:-1]),
}


@pytest.mark.parametrize("message", SPOILT)
def test_no_row_of_a_way_that_is_wrong(
    message: str,
    bench: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def spoilt(problem: Any) -> Any:
        made = bench.WAYS["segment"](problem)
        return bench.Way(made.forward, lambda: SPOILT[message](made.step()))

    monkeypatch.setitem(bench.WAYS, "auto", spoilt)
    status, record = run(bench, tmp_path, "ppi-2")
    printed = capsys.readouterr().out
    assert status == 1
    assert "| auto |" not in printed and "| pyg |" in printed and "| segment |" in printed
    assert f"WRONG ppi-2: auto is wrong, its {message}" in printed
    assert [row["way"] for row in record["rows"]] == ["pyg", "segment", "Linear alone"] and len(record["wrong"]) == 1


def test_no_row_where_the_forward_without_autograd_is_wrong(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def spoilt(problem: Any) -> Any:
        made = bench.WAYS["segment"](problem)
        return bench.Way(lambda: made.forward() + 0.01, made.step)

    monkeypatch.setitem(bench.WAYS, "auto", spoilt)
    assert run(bench, tmp_path, "cora")[0] == 1
    assert "| auto |" not in capsys.readouterr().out


def test_no_row_where_ours_gives_other_bits_or_does_not_run(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    noise = iter(range(1000))

    def trembling(problem: Any) -> Any:
        made = bench.WAYS["segment"](problem)
        return bench.Way(made.forward, lambda: of(made.step(), "bias", lambda value: value * (1 + next(noise) * 2e-7)))

    def broken(problem: Any) -> Any:
        raise RuntimeError("no such kernel")

    for way, message in ((trembling, "bias does not have the same bits"), (broken, "RuntimeError: no such kernel")):
        monkeypatch.setitem(bench.WAYS, "auto", way)
        assert run(bench, tmp_path, "cora")[0] == 1
        printed = capsys.readouterr().out
        assert "| auto |" not in printed and message in printed


def test_generated_graphs_have_the_size_asked_for(bench: ModuleType) -> None:
    index = bench.power_law(1000, 20_000, 300, torch.device("cpu"))
    src, dst = index
    degree = dst.bincount(minlength=1000)
    assert index.shape == (2, 20_000) and not (src == dst).any()
    assert torch.equal(degree, src.bincount(minlength=1000))
    assert 200 < degree.max() < 400 and degree.median() < 20
    back = (dst * 1000 + src).sort().values
    assert torch.equal(back, src * 1000 + dst)


# Many seeds ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    import seeds

    monkeypatch.setattr(seeds.data, "planetoid", lambda name: replace(digits(), name=name))
    return seeds


def told(seeds: int, accuracy: float) -> dict[str, Any]:
    return {"seeds": seeds, "seconds": 2.0 * seeds, "epochs": 9.0, "accuracies": [accuracy] * seeds, "peak_mib": 7.0}


@pytest.mark.parametrize(("single", "status"), [(83.5, 0), (79.0, 1)])
def test_no_row_of_a_way_with_another_accuracy(
    many: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, single: float, status: int
) -> None:
    monkeypatch.setattr(many, "command", lambda name, n, *how: told(n, 83.0 if "vectorize=on" in how else single))
    monkeypatch.setattr(many, "bare", lambda task, n, *limits: told(n, 84.0))
    assert many.main([f"--out={tmp_path}/it.json"]) == status
    record = json.loads((tmp_path / "it.json").read_text())
    ways = {way: found["seeds"] for way, found in record["ways"].items() if "times" in found}
    expected = {"trained as one": 100, "one by one": 10, "bare loop, PyG's layer": 3}
    assert ways == {way: n for way, n in expected.items() if way != "one by one" or status == 0}
    assert record["wrong"] == ([] if status == 0 else ["one by one: 79.0 %"])


def test_an_epoch_of_stacks(many: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(many, "GAT", SimpleNamespace(preset=lambda name: GAT(64, [4], 10, [2, 1])))
    assert many.main(["--stacks", "1", "3", "--epochs", "1", f"--out={tmp_path}/it.json"]) == 0
    rows = json.loads((tmp_path / "it.json").read_text())["stacks"]
    assert [row["stack"] for row in rows] == [1, 3] and all(row["ms"] > 0 for row in rows)


def test_pygs_loop_stops_by_the_rule(many: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    task = many.data.planetoid("cora")
    monkeypatch.setitem(PRESETS, "cora", {"hidden_channels": (4,), "heads": (2, 1), "dropout": 0.0})
    found = many.bare(task, seeds=2, max_epochs=12, patience=100)
    assert found["epochs"] == 12 and len(found["accuracies"]) == 2 and min(found["accuracies"]) > 20


# Which rule to stop by ----------------------------------------------------------------------------------------------


def test_a_rule_is_scored_on_validation_nodes_that_it_does_not_see(
    many: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import stopping

    task = digits()
    one, other = stopping.halves(task)
    assert torch.equal(one.val[0].val_mask, other.test[0].test_mask)
    assert not (one.val[0].val_mask & one.test[0].test_mask).any()
    assert torch.equal(one.val[0].val_mask | one.test[0].test_mask, task.val[0].val_mask)
    assert torch.equal(one.train[0].train_mask, task.train[0].train_mask)
    monkeypatch.setattr(stopping.GAT, "preset", lambda name, **_: GAT(64, [4], 10, [2, 1]))
    assert stopping.main(["--datasets=cora", "--seeds=2", "--max-epochs=2", f"--out={tmp_path}/it.json"]) == 0
    rows = json.loads((tmp_path / "it.json").read_text())["rows"]
    assert [row["rule"] for row in rows] == ["both", "accuracy", "loss"] and len(rows[0]["scores"]) == 4
