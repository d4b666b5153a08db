"""Exported runs and layers give what eager does, for graphs of any size, where only torch or onnxruntime is."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

import gat_pyg
from gat_pyg.tasks.preparation import NORMALIZE, UNDIRECTED, Standardize
from gat_pyg.trained import export
from tests.laws import assert_close

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module


WEEKLY = [  # tests/test_docs.py has nodes in both formats
    ("node", "gat", ".onnx"),
    ("graph", "gatv2", ".onnx"),
    ("edge", "transformer", ".pt2"),
    ("link", "gat", ".onnx"),
]


@pytest.mark.parametrize(
    ("task", "conv", "suffix"),
    [("graph", "gatv2", ".pt2"), *(pytest.param(*case, marks=pytest.mark.weekly) for case in WEEKLY)],
)
def test_an_exported_run_predicts_other_graphs(bench: Any, task: str, conv: str, suffix: str, tmp_path: Path) -> None:
    pairs, exported = bench("exports").compared(tmp_path, task, conv, suffix, count=4)
    assert len(pairs) == 4 and exported.difference < 1e-5 and f"{exported.difference:.1e}" in str(exported)
    for n, (result, predicted) in enumerate(pairs):
        assert_close(result, predicted, f"{task} {conv} {suffix} graph {n}")
    about = json.loads(exported.description.read_text())
    shape = {"node": ["nodes", 4], "graph": ["graphs", 4], "edge": ["pairs", 3], "link": ["pairs"]}[task]
    assert about["output"]["shape"] == shape and about["inputs"]["edge_index"]["shape"] == [2, "edges"]


@pytest.mark.weekly
@pytest.mark.parametrize("form", [".pt2 without gat_pyg", "ONNX, dynamo=True", "ONNX, dynamo=False"])
@pytest.mark.parametrize("model", ["GAT", "GATv2Conv"])
def test_an_exported_layer_computes_other_graphs(bench: Any, model: str, form: str) -> None:
    pairs = bench("export").outputs(model, form, count=4)
    assert len(pairs) == 4
    for n, (result, eager) in enumerate(pairs):
        assert_close(result, eager, f"{model} {form} graph {n}")


def test_a_file_that_differs_is_not_kept(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = bench("exports").save(tmp_path, "node", "gat")
    path = tmp_path / "model.pt2"
    path.write_text("the file of last month")
    monkeypatch.setattr(export, "SIZES", export.SIZES[:2])
    monkeypatch.setitem(export.FORMATS, ".pt2", lambda network, *_: lambda inputs: network(**inputs) + 1e-3)
    with pytest.raises(ValueError, match=r"model\.pt2 was not written: .* of 1 nodes differ .* 1\.0e-03, expected"):
        gat_pyg.export(run, path)
    assert path.read_text() == "the file of last month" and {*tmp_path.iterdir()} == {run / "model.safetensors", path}
    monkeypatch.setitem(export.FORMATS, ".pt2", lambda *_: 1 / 0)
    with pytest.raises(ValueError, match=r"cannot be exported to \.pt2: division by zero\. Try \.onnx"):
        gat_pyg.export(run, path)
    with pytest.raises(ValueError, match=r"model\.pb ends in '\.pb', expected a name such as model\.onnx"):
        gat_pyg.export(run, path.with_suffix(".pb"))


def test_the_file_applies_the_last_transforms_that_are_arithmetic() -> None:
    scale, degree = Standardize([0.0], [1.0]).describe(), {"_target_": "torch_geometric.transforms.LocalDegreeProfile"}
    for transforms, has_batch, inside in (
        ([scale], True, [scale]),
        ([NORMALIZE, scale, UNDIRECTED], False, [NORMALIZE, scale]),
        ([NORMALIZE, scale], True, [scale]),
        ([scale, degree], False, []),
        ([degree, scale], False, [scale]),
    ):
        before = [transform for transform in transforms if transform not in inside]
        assert export._divided(transforms, has_batch) == (before, inside), (transforms, has_batch)
