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
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from lightning import Trainer, seed_everything

from gat_pyg.data import digits, planted
from gat_pyg.models import GAT, PRESETS
from gat_pyg.training import Inductive, PaperStopping
from gat_pyg.training.loading import TaskData
from tests.processes import start_server, without_kernels


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


@pytest.mark.weekly
@pytest.mark.parametrize("case", ["cora-alone-8x8-dropout", "cora-alone-8x8-bf16", "cora-alone-8x8-bf16-dropout"])
def test_attention_alone_in_bfloat16_and_with_dropout(bench: ModuleType, tmp_path: Path, case: str) -> None:
    status, record = run(bench, tmp_path, case)
    assert status == 0 and record["wrong"] == []
    assert {row["way"] for row in record["rows"]} == {"pyg", "auto", "segment"}
    assert record["cases"][0]["dropout"] == (0.6 if case.endswith("dropout") else 0.0)
    assert record["cases"][0]["dtype"] == ("torch.bfloat16" if "bf16" in case else "torch.float32")


@pytest.mark.weekly
def test_the_first_step_of_ours_may_compile(bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = set()

    def seconds(run: Callable[[], object], device: torch.device, times: int = 1) -> float:
        run()
        name = getattr(run, "__qualname__", "")
        return 0.01 if name != "way.<locals>.step" or run in first else first.add(run) or 30.0

    monkeypatch.setattr(bench, "seconds", seconds)
    status, record = run(bench, tmp_path, "cora")  # of 20 s, which PyG's first step takes more than
    assert status == 0 and {row["way"] for row in record["rows"]} == {"auto", "segment"}


@pytest.mark.weekly
def test_a_case_without_a_truth_does_not_end_the_table(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trusted = bench.trusted

    def no_memory(problem: Any) -> dict[str, torch.Tensor]:
        if problem.case.name == "cora":
            raise torch.OutOfMemoryError("2 GiB")
        return trusted(problem)

    monkeypatch.setattr(bench, "trusted", no_memory)
    status, record = run(bench, tmp_path, "cora", "citeseer")
    assert status == 1 and record["wrong"] == ["cora: OutOfMemoryError: 2 GiB"]
    assert {row["case"] for row in record["rows"]} == {"citeseer"} and len(record["rows"]) == 4


@pytest.mark.weekly
def test_an_interrupted_way_has_no_row(bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(problem: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setitem(bench.WAYS, "segment", interrupted)
    monkeypatch.setattr(bench, "on_gpu", lambda device: True)  # then each way by itself
    with pytest.raises(KeyboardInterrupt):
        run(bench, tmp_path, "cora")
    record = json.loads((tmp_path / "it.json").read_text())
    assert [row["way"] for row in record["rows"]] == ["pyg", "auto"]
    assert all(row["times_pyg"] > 0 for row in record["rows"])


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
@shell
def test_data_and_wheels_are_unpacked(tmp_path: Path) -> None:
    data, wheels = tmp_path / "data", tmp_path / "wheels"
    for folder in (data / "Planetoid", wheels, tmp_path / "PPI" / "raw"):
        folder.mkdir(parents=True)
    (data / "Planetoid" / "it").write_text("planetoid")
    (tmp_path / "PPI" / "raw" / "it").write_text("ppi")
    shutil.make_archive(str(data / "PPI"), "xztar", tmp_path, "PPI")
    (wheels / "it.whl").write_text("")
    script = f"""case "$*" in
    *machine.py) echo box ;;
    -c*unpack*) exec {sys.executable} "$@" ;;
    *pip*) echo "installs $*" >&2 ;;
    *attention.py*) cat $GAT_PYG_DATA/Planetoid/it $GAT_PYG_DATA/PPI/raw/it ;;
    esac"""
    call = [
        "bash",
        Path(__file__).parents[1] / "benchmarks" / "gpu.sh",
        "attention",
        "--wheels",
        wheels,
        "--data",
        data,
    ]
    ran = subprocess.run(call, env=python(tmp_path, script), capture_output=True, text=True)
    assert ran.returncode == 0 and "planetoidppi" in ran.stdout and f"{wheels}/it.whl" in ran.stderr


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


@pytest.mark.weekly
def test_a_rehearsal_cuts_the_data_sets_of_the_command() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    benchmarks = str(Path(__file__).parents[1] / "benchmarks")
    begin = f"import sys; sys.path.insert(0, {benchmarks!r}); import machine"
    check = f"{begin}; from gat_pyg import data; data.planetoid.__wrapped__, data.ppi.__wrapped__"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run([sys.executable, "-c", check], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.weekly
def test_generated_graphs_have_the_size_that_is_passed(bench: ModuleType) -> None:
    index = bench.power_law(1000, 20_000, 300, torch.device("cpu"))
    src, dst = index
    degree = dst.bincount(minlength=1000)
    assert index.shape == (2, 20_000) and not (src == dst).any()
    assert torch.equal(degree, src.bincount(minlength=1000))
    assert 200 < degree.max() < 400 and degree.median() < 20
    back = (dst * 1000 + src).sort().values
    assert torch.equal(back, src * 1000 + dst)


@pytest.mark.weekly
def test_networks_of_ppi_differ_in_their_attention_alone(bench: ModuleType) -> None:
    import inductive

    x, index = torch.randn(9, 50), torch.randint(9, (2, 30))
    pyg, ours, none = (inductive.network(way)(x, index) for way in inductive.WAYS)
    torch.testing.assert_close(ours, pyg, rtol=1e-4, atol=1e-4)
    assert none.shape == ours.shape == (9, 121)
    alone = torch.empty(2, 0, dtype=torch.long)  # each node attends to itself alone
    torch.testing.assert_close(inductive.network("no attention")(x, alone), inductive.network("ours")(x, alone))


# Many seeds ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    import seeds

    monkeypatch.setattr(seeds.citation, "planetoid", lambda name: replace(digits(), name=name))
    return seeds


def outcome(seeds: int, accuracy: float) -> dict[str, Any]:
    return {"seeds": seeds, "seconds": 2.0 * seeds, "epochs": 9.0, "accuracies": [accuracy] * seeds, "peak_mib": 7.0}


@pytest.mark.parametrize(("single", "status"), [(83.5, 0), (79.0, 1)])
def test_a_way_with_another_accuracy_has_no_row(
    many: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, single: float, status: int
) -> None:
    def command(name: str, n: int, *how: str, device: torch.device) -> dict[str, Any]:
        return outcome(n, 83.0 if "vectorize=on" in how else single)

    monkeypatch.setattr(many, "command", command)
    monkeypatch.setattr(many, "bare", lambda task, n, *limits: outcome(n, 84.0))
    assert many.main([f"--out={tmp_path}/it.json"]) == status
    record = json.loads((tmp_path / "it.json").read_text())
    ways = {way: measured["seeds"] for way, measured in record["ways"].items() if "times" in measured}
    expected = {"trained as one": 100, "one by one": 10, "bare loop, PyG's layer": 3}
    assert ways == {way: n for way, n in expected.items() if way != "one by one" or status == 0}
    assert record["wrong"] == ([] if status == 0 else ["one by one: 79.0 %"])


@pytest.mark.weekly
def test_pygs_loop_stops_by_the_rule(many: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    task = many.citation.planetoid("cora")
    monkeypatch.setitem(PRESETS, "cora", {"hidden_channels": (4,), "heads": (2, 1), "dropout": 0.0})
    measured = many.bare(task, seeds=2, max_epochs=12, patience=100, device=torch.device("cpu"))
    assert measured["epochs"] == 12 and len(measured["accuracies"]) == 2 and min(measured["accuracies"]) > 20


# Which rule to stop by ----------------------------------------------------------------------------------------------


@pytest.mark.weekly
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


@pytest.mark.weekly
@pytest.mark.parametrize("rule", ["both", "accuracy", "loss"])
def test_one_training_serves_every_rule(many: ModuleType, monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    import stopping

    task = planted(graphs=8, nodes=30, labels=3)
    model = GAT(task.num_features, [4], 3, [2, 1])
    monkeypatch.setattr(stopping.GAT, "preset", lambda name, **_: copy.deepcopy(model))
    monkeypatch.setattr(stopping, "PaperStopping", partial(PaperStopping, patience=4))
    measured = stopping.on_graphs(task, seed=3, max_epochs=40, precision="32-true").runs(rule)
    for by, run in enumerate(measured):
        half = replace(task, val=[task.val[by]], test=[task.val[1 - by]])
        selected = PaperStopping(4, rule)
        seed_everything(3, verbose=False)
        trainer = Trainer(
            accelerator="cpu", max_epochs=40, callbacks=[selected], logger=False, enable_checkpointing=False
        )
        module, batches = Inductive(copy.deepcopy(model), half.objective), TaskData(half, batch_size=2)
        trainer.fit(module, datamodule=batches)
        (tested,) = trainer.test(module, datamodule=batches, verbose=False)
        assert run.epochs == selected.epoch
        assert (run.val, run.value) == pytest.approx((100 * selected.kept_score, 100 * tested["test_micro_f1"]))


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


@pytest.mark.weekly
def test_predictions_obey_the_laws_of_scaling(scaling: ModuleType) -> None:
    shape, rates = scaling.PRODUCTS, scaling.Rates(1e-5, 1e-7, 8000.0, 80.0)
    free, cut = scaling.Net(*[scaling.Link(0.0, float("inf"))] * 2), scaling.Cut(0.3, 0.5, 1.2)
    alone = scaling.full_batch(shape, rates, cut, scaling.ASSUMED, 1)
    assert alone["seconds"] == 1e-5 * shape.nodes + 1e-7 * shape.edges and alone["bytes"] == 0
    for W in scaling.RANKS:
        assert scaling.full_batch(shape, rates, scaling.Cut(0.0, 0.0), free, W)["speed_up"] == pytest.approx(W)
        assert scaling.ddp(0.1, 1e6, free, W)["speed_up"] == W
        rows = [scaling.full_batch(shape, rates, replace(cut, factor=f), scaling.ASSUMED, W) for f in (0.1, 0.2, 0.3)]
        assert rows == sorted(rows, key=lambda row: row["bytes"]) == sorted(rows, key=lambda row: row["seconds"])
        assert rows[-1]["seconds"] > scaling.full_batch(shape, rates, cut, free, W)["seconds"]
    assert scaling.Cut(9.0, 1.0).halo(shape, 2) == 1 and scaling.Cut(9.0, 1.0).halo(shape, 1024) < 51


@pytest.mark.weekly
def test_rates_and_cuts_of_a_table(scaling: ModuleType) -> None:
    few, many = (scaling.Measured(E, 10 * 0.5 + E * 0.25, 10 * 64.0 + E * 16) for E in (20, 80))
    rates = scaling.Rates.through(10, few, many)
    assert (rates.row, rates.edge, rates.row_bytes, rates.edge_bytes) == pytest.approx((0.5, 0.25, 64, 16))
    path = torch.tensor([[0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2]])
    assert scaling.cut(path, torch.tensor([0, 0, 1, 1]), 2) == {"parts": 2, "halo": 0.5, "skew": 1.0}
    assert scaling.cut(path, torch.tensor([0, 1, 1, 1]), 2) == {"parts": 2, "halo": 0.5, "skew": 5 / 3}
    rows = [{"parts": W, "halo": 0.5 * W**0.25, "skew": W / 8} for W in (2, 8, 16, 32)]
    fit = scaling.Cut.through(rows)
    assert (fit.factor, fit.power, fit.skew) == pytest.approx((0.5, 0.25, 2.0))


def quick_process(*arguments: Any) -> None:
    """A process of the benchmark, which compiles nothing."""
    import scaling

    without_kernels("the kernels are not the subject")
    scaling.process(*arguments)


@pytest.mark.weekly
@pytest.mark.skipif(sys.platform != "linux", reason="gloo's rendezvous by a file, memory as Linux tells it")
def test_two_processes_are_checked_measured_and_predicted(
    scaling: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scaling, "WORLDS", (2,))
    monkeypatch.setattr(scaling, "process", quick_process)
    start_server()
    out = tmp_path / "it.json"
    assert scaling.main(["--scale=0.003", "--rounds=1", "--cut-edges", "8000", f"--out={out}"]) == 0
    record = json.loads(out.read_text())
    assert [(row["graph"], row["output"] < 1e-10) for row in record["checks"]] == [("cora", True), ("arxiv", True)]
    assert (
        record["measured"]["one_graph"]["bytes"] > 0
        and len(record["at_two"]) == 3
        and len(record["measured"]["cuts"]) == 6
    )
    assert [len(rows) for rows in record["predicted"]["assumed"].values()] == [24, 8]
    assert "Full batch by two: " in capsys.readouterr().out


@pytest.mark.weekly
def test_processes_that_differ_have_no_times(
    scaling: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(scaling, "check", lambda scale: [{"output": 0.0, "loss": 0.0, "gradient": 1e-9}])
    assert scaling.main([f"--out={tmp_path}/it.json"]) == 1
    assert "measured" not in json.loads((tmp_path / "it.json").read_text())


@pytest.mark.weekly
def test_losses_are_compared_where_few_labels_are_positive(bench: ModuleType, tmp_path: Path) -> None:
    import unbalanced

    data, p = unbalanced.generated(3000, 0)
    assert p.mean().item() == pytest.approx(0.02) and data.y.float().mean().item() == pytest.approx(0.02, abs=0.01)
    arguments = ["--graphs=1", "--seeds=2", "--nodes=3000", "--max-epochs=2"]
    assert unbalanced.main([*arguments, f"--out={tmp_path}/it.json"]) == 0
    rows = json.loads((tmp_path / "it.json").read_text())["rows"]
    best = rows["the generating probability"][0]["average_precision"]
    assert len(rows) == 1 + len(unbalanced.REGRESSIONS) + len(unbalanced.LOSSES)
    assert all(row["average_precision"] <= best for (row,) in rows.values())


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


@pytest.mark.weekly
@pytest.mark.usefixtures("bench")
def test_explanations_of_pygs_layers_are_ours(tmp_path: Path) -> None:
    import explanations

    arguments = ["--cases", "house", "--items=2", "--epochs=40", "--learnt=2", f"--out={tmp_path}/it.json"]
    assert explanations.main(arguments) == 0
    rows = {row["kind"]: row for row in json.loads((tmp_path / "it.json").read_text())["rows"]}
    assert [*rows] == [*explanations.KINDS]
    for kind, row in rows.items():
        assert kind == "random" or (row["difference"] < 1e-5 and 0 <= row["auroc"] <= 1)
        assert row["before"] > row["removed"] or kind != "occlusion"
