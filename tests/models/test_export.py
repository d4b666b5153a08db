"""Exported models: what eager returns, for graphs of any size, where only torch or onnxruntime is installed."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.laws import assert_close

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import export

    return export


@pytest.mark.parametrize(
    "form", [".pt2 without gat_pyg", "ONNX, dynamo=True", pytest.param("ONNX, dynamo=False", marks=pytest.mark.weekly)]
)
@pytest.mark.parametrize("model", ["GAT", pytest.param("GATv2Conv", marks=pytest.mark.weekly)])
def test_an_exported_model_computes_other_graphs(bench: ModuleType, model: str, form: str) -> None:
    pairs = bench.outputs(model, form, count=4)
    assert len(pairs) == 4
    for n, (result, eager) in enumerate(pairs):
        assert_close(result, eager, f"{model} {form} graph {n}")


def test_the_benchmark_prints_a_row_for_each(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "outputs", lambda *_: [(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]))])
    bench.main(["--graphs", "3"])
    rows = capsys.readouterr().out.splitlines()
    assert "3 graphs" in rows[0] and len(rows) == 2 + len(bench.MODELS) * len(bench.FORMATS)
    assert rows[2] == "| GATConv | .pt2 without gat_pyg | 5.0e-01 | 2.5 |"
