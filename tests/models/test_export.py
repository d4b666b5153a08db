"""Exported models: what eager returns, for graphs of any size, where only torch or onnxruntime is installed."""

from __future__ import annotations

import io
import re
from functools import partial
from pathlib import Path
from types import ModuleType

import onnx
import pytest
import torch

from gat_pyg import GATConv, GATv2Conv
from tests.laws import assert_close

ROOT = Path(__file__).parents[2]
CODE = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/export.md").read_text(encoding="utf-8"), re.M | re.S)
LAYERS = {"GATConv": GATConv, "GATv2Conv": GATv2Conv, "cosine": partial(GATConv, mechanism="cosine")}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import export

    return export


@pytest.mark.parametrize("form", [".pt2 without gat_pyg", "ONNX, dynamo=True", "ONNX, dynamo=False"])
@pytest.mark.parametrize("model", ["GAT", "GATv2Conv"])
def test_other_graphs(bench: ModuleType, model: str, form: str) -> None:
    pairs = bench.outputs(model, form, count=4)
    assert len(pairs) == 4
    for n, (found, eager) in enumerate(pairs):
        assert_close(found, eager, f"{model} {form} graph {n}")


def test_the_benchmark_prints_a_row_for_each(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "outputs", lambda *_: [(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]))])
    bench.main(["--graphs", "3"])
    rows = capsys.readouterr().out.splitlines()
    assert "3 graphs" in rows[0] and len(rows) == 2 + len(bench.MODELS) * len(bench.FORMATS)
    assert rows[2] == "| GATConv | .pt2 without gat_pyg | 5.0e-01 | 2.5 |"


@pytest.mark.filterwarnings("ignore")  # the ONNX exporter's, on what it is built of
def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(CODE) == 3
    for block in CODE:
        seen: dict[str, object] = {}
        exec(block, seen)
        assert seen.get("out") is None or seen["out"].shape[1] == 16  # type: ignore[attr-defined]
    assert Path("model.pt2").exists() and Path("model.onnx").exists()


@pytest.mark.kernels
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_the_fused_operator_is_exported_where_it_is_named(name: str, strict: bool) -> None:
    x, index = torch.randn(10, 5), torch.randint(10, (2, 30))
    for backend, operators in (("auto", 0), ("segment", 0), ("reference", 0), ("fused", 1)):
        conv = LAYERS[name](5, 4, heads=2, backend=backend)
        program = torch.export.export(conv, (x, index), strict=strict)
        ours = [node for node in program.graph.nodes if str(node.target).startswith("gat_pyg")]
        assert len(ours) == operators, backend
        assert_close(program.module()(x, index), conv(x, index), backend)


@pytest.mark.filterwarnings("ignore")  # the ONNX exporter's, on what it is built of
@pytest.mark.parametrize("name", LAYERS)
def test_onnx_has_plain_operators_whatever_the_backend(name: str) -> None:
    conv = LAYERS[name](5, 4, backend="fused").eval()
    file = io.BytesIO()
    torch.onnx.export(conv, (torch.randn(10, 5), torch.randint(10, (2, 30))), file, verbose=False)
    model = onnx.load_from_string(file.getvalue())
    onnx.checker.check_model(model)
    assert {node.domain for node in model.graph.node} <= {"", "ai.onnx"}
