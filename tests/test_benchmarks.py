"""The benchmark runs on a small scale, and prints no row of a way that is wrong."""

from __future__ import annotations

import copy
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    import attention
    import machine

    monkeypatch.setattr(machine, "bandwidth", lambda device: 1.0)  # takes seconds and large memory
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


def one_nan(value: torch.Tensor) -> torch.Tensor:
    value = value.clone()
    value.view(-1)[0] = torch.nan
    return value


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any, Any], Any]:
    """Return a change of one of a way's results."""
    return lambda forward, step: (forward, lambda: {**(results := step()), name: change(results[name])})


def drifting(forward: Any, step: Any) -> Any:
    """Write every result to the same memory, as a CUDA graph does."""
    results = step()
    return forward, lambda: results | {"bias": results["bias"].mul_(1 + 2e-7)}


def with_next_seed(forward: Any, step: Any) -> Any:
    return forward, lambda: (torch.randint(9, ()), step())[1]


def broken(forward: Any, step: Any) -> Any:
    raise RuntimeError("no such kernel")


NOISE = itertools.count()
WRONG = {
    "its output is off by": changed("output", lambda value: value * 1.01),
    "its output is off by nan": changed("output", one_nan),
    "its gradient of att_src is off": changed("att_src", lambda value: value * 1.01),
    "its gradient of lin.weight is off by nan": changed("lin.weight", one_nan),
    "its gradient of x is missing": lambda forward, step: (
        forward,
        lambda: {name: value for name, value in step().items() if name != "x"},
    ),
    "its gradient of bias is of shape": changed("bias", lambda value: value[:-1]),
    "its forward": lambda forward, step: (lambda: forward() + 0.01, step),
    "bias does not have the same bits": changed("bias", lambda value: value * (1 + next(NOISE) * 2e-7)),
    "bias does not have the same bits, in the same memory": drifting,
    "its output is off, by another mask": with_next_seed,
    "RuntimeError: no such kernel": broken,
}


@pytest.mark.parametrize("error", WRONG)
def test_a_way_that_is_wrong_has_no_row(
    error: str,
    bench: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def wrong(problem: Any) -> Any:
        way = bench.WAYS["segment"](problem)
        return bench.Way(*WRONG[error](way.forward, way.step))

    monkeypatch.setitem(bench.WAYS, "auto", wrong)
    case = "cora-alone-8x8-dropout" if "mask" in error else "ppi-2"
    status, record = run(bench, tmp_path, case)
    printed = capsys.readouterr().out
    assert status == 1
    assert "| auto |" not in printed and "| pyg |" in printed and "| segment |" in printed
    assert len(record["wrong"]) == 1 and error.partition(", ")[0].removeprefix("its forward") in record["wrong"][0]
    assert record["wrong"][0].startswith(f"{case}: auto") and f"WRONG {record['wrong'][0]}" in printed
    assert "auto" not in [row["way"] for row in record["rows"]]


def test_a_wrong_way_of_another_library_is_left_out(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    way = bench.WAYS["segment"]
    wrong = lambda problem: bench.Way(lambda: way(problem).forward(), lambda: {"output": problem.grad})  # noqa: E731
    monkeypatch.setitem(bench.WAYS, "pyg", wrong)
    status, record = run(bench, tmp_path, "cora")
    assert status == 0 and record["wrong"][0].startswith("cora: pyg is wrong, its output is off by")
    assert {row["way"] for row in record["rows"]} == {"auto", "segment", "Linear alone"}
    assert "WRONG cora: pyg is wrong" in capsys.readouterr().out


GPU = Path(__file__).parents[1] / "benchmarks" / "gpu.sh"
shell = pytest.mark.skipif(not (shutil.which("bash") and shutil.which("timeout")), reason="needs bash and coreutils")


def python(folder: Path, script: str) -> dict[str, str]:
    """The environment in which `python3` is this shell script."""
    (folder / "python3").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "python3").chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "OUT": str(folder / "out")}


@pytest.mark.weekly
@shell
@pytest.mark.parametrize(
    ("call", "scripts"),
    [
        ("first", ["-m pytest", "--name first ", "--name first-layers", "training.py --captured"]),
        ("tests", ["-m pytest"]),
        ("attention", ["attention.py"]),
        ("layers", ["attention.py"]),
        ("training", ["training.py --captured", "seeds.py", "inductive.py", "training.py --epochs"]),
    ],
)
@pytest.mark.parametrize("status", [0, 3])
def test_a_call_on_a_gpu_runs_all_and_fails_where_one_does(
    call: str, scripts: list[str], status: int, tmp_path: Path
) -> None:
    last = scripts[-1].split()[-1]
    environment = python(tmp_path, f'case "$*" in *machine.py) echo box ;; *{last}*) echo ran; exit {status} ;; esac')
    ran = subprocess.run(["bash", GPU, call], env=environment, capture_output=True, text=True)
    assert ran.returncode == (status and 1), ran.stderr
    log = (tmp_path / "out" / f"box-{call}.log").read_text()
    places = [log.index(one) for one in scripts]
    assert places == sorted(places) and f"ran\n--- exit status {status}" in log


@pytest.mark.weekly
def test_a_rehearsal_takes_the_way_of_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    script = Path(__file__).parents[1] / "benchmarks" / "attention.py"
    ways = ["--ways", "pyg", "auto", "auto, CUDA graph", "--variants", "SPLIT=4,AHEAD=1"]
    small = ["--rounds=1", "--seconds=60", f"--out={tmp_path}/it.json", "--cases", "cora-alone-8x8-dropout"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run([sys.executable, script, *ways, *small], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    record = json.loads((tmp_path / "it.json").read_text())
    assert record["machine"] == "rehearsal" and record["wrong"] == []
    assert [row["way"] for row in record["rows"]] == ["pyg", "auto", "auto, CUDA graph", "auto, SPLIT=4,AHEAD=1"]


# Several processes --------------------------------------------------------------------------------------------------


@pytest.fixture
def scaling(bench: ModuleType) -> ModuleType:
    import scaling

    return scaling


def test_a_prediction_by_hand(scaling: ModuleType) -> None:
    shape, rates = scaling.Shape("it", 100, 400, 10, 4), scaling.Rates(1e-3, 1e-4, 50.0, 8.0)
    link = scaling.Link(latency=1e-3, bandwidth=1e6)
    measured = scaling.full_batch(shape, rates, scaling.Cut(0.5, 0.0), scaling.Net(link, link), 2)
    fetched, parameters = 100 / 2 * 0.5, scaling.size_of(scaling.network(shape))
    sent = 4 * fetched * (10 + 96 + 96 + 96 + 96)
    talk = 5 * 1e-3 + sent / 1e6 + 2 * (1e-3 + parameters / 2 / 1e6)
    assert measured["bytes"] == sent and measured["memory"] == 50 * (50 + fetched) + 8 * 200
    assert measured["seconds"] == pytest.approx(1e-3 * (50 + fetched) + 1e-4 * 200 + talk)
    assert measured["speed_up"] == pytest.approx(0.14 / measured["seconds"])


def test_steps_compares_the_layers_in_a_recipe(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import steps

    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["steps.py", "--steps", "2", "dataset=planted"])
    steps.main()
    (path,) = tmp_path.glob("*-steps-planted.json")
    record = json.loads(path.read_text())
    assert record["error"] < 1e-8
    assert record["epoch_seconds"]["pyg"] == record["steps_per_epoch"] * record["median_seconds"]["pyg"] > 0

    def wrong(model: torch.nn.Module) -> torch.nn.Module:
        model = copy.deepcopy(model)
        torch.nn.init.zeros_(model.convs[0].att_src)
        return model

    monkeypatch.setattr(steps, "with_pyg", wrong)
    with pytest.raises(SystemExit, match=r"the networks differ by .* in float64, allowed 1e-8"):
        steps.main()
