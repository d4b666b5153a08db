"""The Python code on every page of the documentation runs, block after block, in a folder with two finished runs."""

import ast
import json
import re
import shutil
import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest
import torch
from sklearn import manifold

import gat_pyg.kernels.device
import gat_pyg.trained.explain
from gat_pyg.run import main

DOCS = Path(__file__).parents[1] / "docs"
CODE = {
    path.name: [textwrap.dedent(code) for _, code in re.findall(r"^( *)```python\n(.*?)^\1```$", text, re.M | re.S)]
    for path in sorted(DOCS.glob("*.md"))
    if "```python" in (text := path.read_text(encoding="utf-8"))
}


# What readers type into the search of the site -> the page that they look for. A search ranks headings first.
SEARCHES = {
    "link prediction": "link-prediction",
    "graph classification": "graph-classification",
    "node regression": "node-regression",
    "your own table": "own-table",
    "CSV": "own-table",
    "edge features": "edges",
    "use a GPU": "gpu",
    "multi-GPU": "scaling",
    "multi-node": "scaling",
    "hyperparameter search": "hyperparameter-search",
    "grid": "hyperparameter-search",
    "early stopping": "stopping",
    "checkpoints": "resume",
    "predict with a trained model": "predict",
    "custom attention mechanism": "new-mechanism",
    "training loop": "modules",
    "out of memory": "troubleshooting",
    "slow": "troubleshooting",
    "glossary": "glossary",
    "cite": "cite",
    "molecules": "molecules",
    "unbalanced classes": "recipes",
}


def test_headings_have_the_words_that_readers_search_for():
    for phrase, page in SEARCHES.items():
        text = re.sub(r"^```.*?^```", "", (DOCS / f"{page}.md").read_text(encoding="utf-8"), flags=re.M | re.S)
        headings = re.findall(r"^#+ (.*)", text, re.M)
        assert any(phrase.lower() in heading.lower() for heading in headings), (phrase, headings)


def test_there_is_code():
    assert len(CODE) >= 15
    assert sum(map(len, CODE.values())) >= 25


def test_each_example_has_a_notebook_with_its_code():
    for path in sorted(DOCS.parent.glob("examples/*.py")):
        cells = json.loads(path.with_suffix(".ipynb").read_text(encoding="utf-8"))["cells"]
        code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
        script = ast.parse(path.read_text(encoding="utf-8"))
        script.body = script.body[1:]  # without the docstring, which is text
        assert ast.dump(ast.parse(code)) == ast.dump(script), f"{path.name}: run python docs/notebooks.py"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder with the runs that the pages train: `outputs/digits`, and `outputs/three` with three seeds."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setitem(gat_pyg.kernels.device.REASONS, "cpu", "the kernels are not the subject")
        for name, settings in {"digits": [], "three": ["runs=3"]}.items():
            patch.setattr(sys, "argv", ["gat-pyg", f"hydra.run.dir=outputs/{name}", "training.max_epochs=2", *settings])
            main()
    return folder


@pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")  # its hints on speed
@pytest.mark.filterwarnings("ignore:::onnxscript", "ignore:::torch", "ignore:::copyreg")  # the ONNX exporter's
@pytest.mark.parametrize("page", CODE)
def test_code_runs(page, runs, tmp_path, monkeypatch):
    shutil.copytree(runs / "outputs", tmp_path / "outputs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(manifold, "TSNE", partial(manifold.TSNE, max_iter=250))  # of 1000, which take seconds
    monkeypatch.setattr(gat_pyg.trained.explain, "EPOCHS", 5)  # of 200
    names = {"__name__": "page"}
    for block in CODE[page]:
        exec(block, names)
    if page == "first-run.md":
        assert names["probabilities"].shape == (1797, 10)
    if page == "export.md":
        expected = gat_pyg.predict("outputs/digits", names["data"])
        (of_onnx,) = names["session"].run(["predictions"], names["inputs"])
        for probabilities in (names["probabilities"], torch.from_numpy(of_onnx)):
            torch.testing.assert_close(probabilities, expected)
        assert names["about"]["output"]["shape"] == ["nodes", 10]
        assert Path("model.pt2").exists() and Path("model.onnx").exists()
    if page == "modules.md":
        assert names["trainer"].current_epoch == 20
