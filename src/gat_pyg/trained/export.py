"""A trained run as one file for ONNX Runtime or for torch alone, checked against the run's model."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from ..files import needs, write_whole
from ..tasks.model import Inputs, members
from ..tasks.preparation import NORMALIZE, UNDIRECTED, Preparation, Standardize, attach, build_transform
from .load import Predictor, encoders_of
from .trained import Trained

TOLERANCE = 1e-4  # the largest allowed difference from the run's predictions, relative to the largest of them or 1
SIZES = ((1, 0, 1, 1), (5, 3, 2, 3), (60, 400, 7, 20), (1000, 5000, 32, 500))  # nodes, edges, graphs, pairs of a check
TRACED = (10, 30, 3, 7)  # those of the inputs that torch traces
ROWS = {"node": "nodes", "edge": "pairs", "graph": "graphs", "link": "pairs"}
SIZE_OF = {"x": "nodes", "edge_index": "edges", "edge_attr": "edges", "batch": "nodes", "graph_attr": "graphs"}

Inference = Callable[[Mapping[str, Tensor]], Tensor]


class Exported(NamedTuple):
    """An exported run: its file, the description beside it, and how it compares with the run's model."""

    path: Path
    description: Path
    difference: float  # the largest from the predictions of the run's model, over random graphs of several sizes
    largest: float  # prediction for these

    def __str__(self) -> str:
        return (
            f"{self.path}, described in {self.description}\n"
            f"largest difference from the run's model {self.difference:.1e}, for graphs of 1 to {SIZES[-1][0]:,} nodes "
            f"with predictions up to {self.largest:.3g}"
        )


def export(
    run_dir: str | Path,
    path: str | Path,
    *,
    seed: int | Literal["all"] | None = None,
    model: nn.Module | None = None,
    trust: bool = False,
) -> Exported:
    """Write a trained run as one file of plain operators, for ONNX Runtime (`.onnx`) or torch alone (`.pt2`).

    The output `predictions` is that of `predict`: probabilities, or targets in the unit of the training data, with a
    row for each node, pair or graph. Graphs may have any size. Inputs are passed by name: `x` `[N, F]`, `edge_index`
    `[2, E]`, and where the run has them `edge_attr` `[E, D]`, `batch` `[N]` (the graph of each node),
    `edge_label_index` `[2, L]`, `edge_label_attr` `[L, D]` and `graph_attr` `[G, D]`, such as descriptors of molecules.

    The file standardises and normalises features as the run did. It does not compute encodings or change edges. The
    JSON file beside it, `PATH.json`, lists what has to be done before (`before`), and describes the inputs and the
    output: the classes or targets, and the columns if the run was trained on tables.

    Cost: five to ten seconds for each seed of the run, whose models are traced one after the other.

    Before the file replaces one at `path`, it is compared with the run's model on random graphs of other sizes.

    Args:
        run_dir: as in `predict`.
        path: the file to write: model.onnx or model.pt2.
        seed: seed of the model, if the run has several; by default the file returns the mean over all.
        model: as in `load`.
        trust: as in `predict`.

    Raises:
        FileNotFoundError, ValueError: as `predict`; also if `path` has another ending, the model cannot be exported, or
            a prediction differs by more than 1e-4 times the largest one or 1.
        ImportError: if a package for ONNX is missing.

    >>> export("nowhere", "model.onnx")
    Traceback (most recent call last):
    FileNotFoundError: nowhere is not a run folder: it does not exist. Give the folder that a run printed at its end.
    """
    path = Path(path)
    if path.suffix not in FORMATS:
        raise ValueError(f"{path} ends in {path.suffix!r}, expected a name such as model.onnx or model.pt2.")
    predictor = Trained.open(run_dir, seed, model, trust).predictor
    if predictor.run_objective.label_rate:
        raise ValueError(
            f"{run_dir} reads the known labels of other nodes (training.label_rate), which a file cannot do. Use "
            "gat_pyg.predict, or train with training.label_rate=null."
        )
    network = Prepared(predictor).eval()
    draw = torch.Generator().manual_seed(0)
    traced, *examples = (network.example(*sizes, draw) for sizes in (TRACED, *SIZES))
    checked: list[Exported] = []

    def write(beside: Path) -> None:
        with torch.no_grad():
            try:
                with _quiet():
                    inference = FORMATS[path.suffix](network, traced, beside)
            except ImportError:
                raise
            except Exception as error:
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                others = " or ".join(suffix for suffix in FORMATS if suffix != path.suffix)
                raise ValueError(f"{run_dir} cannot be exported to {path.suffix}: {reason}. Try {others}.") from error
            checked.append(_checked(network, inference, examples, path))

    write_whole(path, write)
    text = json.dumps(network.describe(), indent=2, ensure_ascii=False) + "\n"
    write_whole(checked[0].description, lambda beside: beside.write_text(text, encoding="utf-8"))
    return checked[0]


class Prepared(nn.Module):
    """A predictor with the arithmetic of its run's preparation before it: the network of an exported file."""

    def __init__(self, predictor: Predictor) -> None:
        super().__init__()
        self.predictor, self.objective = predictor, predictor.run_objective
        self.preparation = preparation = cast(Preparation, members(predictor).preparation)
        attach(predictor, None)  # no check of the features in the first call
        model: Any = predictor.models[0]
        objective, reads_edges = self.objective, "edge_attr" in Inputs.of(model).names
        widths = {  # the number of columns of each input, None for ids, 0 for none
            "x": preparation.in_channels,
            "edge_index": None,
            "edge_attr": preparation.edge_dim if reads_edges and preparation.edge_dim is not None else 0,
            "batch": None if objective.item == "graph" else 0,
            "edge_label_index": None if objective.has_pairs else 0,
            "edge_label_attr": getattr(model, "pair_dim", None) or 0,
            "graph_attr": getattr(getattr(model, "columns", None), "graph_dim", 0),
        }
        self.widths = {key: width for key, width in widths.items() if width != 0}
        self.categories: dict[str, Sequence[Any]] = {
            key: encoder.categories for key, encoder in encoders_of(model).items()
        }
        self.before, self.inside = _divided(preparation.transforms, "batch" in self.widths)
        self.transforms = [build_transform(transform) for transform in self.inside]

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        edge_attr: Tensor | None = None,
        batch: Tensor | None = None,
        edge_label_index: Tensor | None = None,
        edge_label_attr: Tensor | None = None,
        graph_attr: Tensor | None = None,
    ) -> Tensor:
        """Return the predictions for features that are not transformed yet; encodings are the last columns of x."""
        num_features, num_graphs = self.preparation.num_features, None
        data = Data(x[:, :num_features])
        for transform in self.transforms:
            data = transform(data)
        x = torch.cat([data.x, x[:, num_features:]], 1) if self.preparation.num_encodings else data.x
        if batch is not None:
            num_graphs = batch.max().item() + 1
            torch._check(num_graphs >= 1)
        others = {"edge_label_index": edge_label_index, "edge_label_attr": edge_label_attr, "graph_attr": graph_attr}
        out: Tensor = self.predictor(x, edge_index, edge_attr, batch=batch, batch_size=num_graphs, **others)
        return out

    def example(self, N: int, E: int, G: int, L: int, draw: torch.Generator) -> dict[str, Tensor]:
        """Return random inputs of N nodes, E edges, G graphs and L pairs."""

        def columns(key: str, rows: int) -> Tensor:
            values = torch.randn(rows, self.widths.get(key) or 0, generator=draw)
            for column, size in enumerate(self.categories.get(key, ())):
                if isinstance(size, int) and size:
                    values[:, column] = torch.randint(size, (rows,), generator=draw).float()
                elif not isinstance(size, int):  # a mean and a standard deviation
                    values[:, column] = values[:, column] * size[1] + size[0]
            return values

        def pairs(count: int) -> Tensor:
            return torch.randint(N, (2, count), generator=draw)

        x = columns("x", N)
        features = x[:, : self.preparation.num_features]
        if self.preparation.num_nodes is not None:
            features[:] = torch.randint(self.preparation.num_nodes, (N, 1), generator=draw)
        for transform in reversed(self.transforms):
            is_scale = isinstance(transform, Standardize)
            features.copy_(features * transform.std + transform.mean if is_scale else features.abs())
        graphs = torch.cat([torch.arange(G), torch.randint(G, (N - G,), generator=draw)]).sort().values
        inputs = {
            **{"x": x, "edge_index": pairs(E), "edge_attr": columns("edge_attr", E), "batch": graphs},
            **{"edge_label_index": pairs(L), "edge_label_attr": columns("edge_label_attr", L)},
            "graph_attr": columns("graph_attr", G),
        }
        return {key: inputs[key] for key in self.widths}

    def describe(self) -> dict[str, Any]:
        """Return the inputs, the output and the preparation as plain data."""
        preparation, objective, inputs = self.preparation, self.objective, {}
        for key, width in self.widths.items():
            size = SIZE_OF.get(key, "pairs")
            shape = [2, size] if key.endswith("_index") else [size] if width is None else [size, width]
            inputs[key] = {"dtype": "int64" if width is None else "float32", "shape": shape}
        shape = [ROWS[objective.item]] + [objective.out_channels] * objective.has_columns
        return {
            "predicts": objective.predicts,
            "inputs": inputs,
            "output": {
                "name": "predictions",
                "shape": shape,
                "holds": "targets in the unit of the data" if objective.goal == "regression" else "probabilities",
                "columns": preparation.class_names,
            },
            "before": [*self.before, *([] if preparation.encoding is None else [preparation.encoding])],
            "inside": list(self.inside),
            "source": preparation.source,
        }


def _divided(transforms: Sequence[Mapping[str, Any]], has_batch: bool) -> tuple[list[Any], list[Any]]:
    """Return the transforms that the file leaves to its caller, and those that it applies after them.

    It applies the last ones if they are arithmetic on the features. Other directions of edges do not change features.
    The minimum in `NormalizeFeatures` is of a graph, so it is not applied to a batch.
    """
    before: list[Any] = []
    inside: list[Any] = []
    for transform in reversed(transforms):
        is_scale = transform["_target_"] == Standardize([], []).describe()["_target_"]
        is_arithmetic = is_scale or (transform == NORMALIZE and not has_batch)
        is_next = all(other["_target_"] == UNDIRECTED["_target_"] for other in before)
        (inside if is_arithmetic and is_next else before).insert(0, transform)
    return before, inside


def _checked(network: Prepared, inference: Inference, examples: Sequence[dict[str, Tensor]], path: Path) -> Exported:
    """Compare an exported network with itself.

    Raises:
        ValueError: if a prediction differs too much, or the exported network raises an error.
    """
    difference = largest = 0.0
    for inputs in examples:
        expected, N = network(**inputs), inputs["x"].size(0)
        try:
            out = inference(inputs)
        except Exception as error:
            raise ValueError(f"{path} was not written: it fails for a graph of {N} nodes: {error}") from error
        this = float((out - expected).abs().max()) if out.shape == expected.shape else float("inf")
        limit = TOLERANCE * max(1.0, float(expected.abs().max()))
        if not this <= limit:
            raise ValueError(
                f"{path} was not written: its predictions for a graph of {N} nodes differ from the run's model by "
                f"{this:.1e}, expected at most {limit:.1e}. Export to another format, or call gat_pyg.predict."
            )
        difference, largest = max(difference, this), max(largest, float(expected.abs().max()))
    return Exported(path, path.with_name(f"{path.name}.json"), difference, largest)


@contextmanager
def _quiet() -> Iterator[None]:
    """Context manager: without the exporters' notes on what they are built of."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


# Formats: each writes a file and returns a function that runs it ----------------------------------------------------


def _dynamic(inputs: Mapping[str, Tensor]) -> dict[str, dict[int, Any]]:
    return {key: {1 if key.endswith("_index") else 0: torch.export.Dim.DYNAMIC} for key in inputs}


def _pt2(network: Prepared, inputs: dict[str, Tensor], file: Path) -> Inference:
    program = torch.export.export(network, (), inputs, dynamic_shapes=_dynamic(inputs))
    with file.open("wb") as opened:
        torch.export.save(program, opened)
    loaded = torch.export.load(io.BytesIO(file.read_bytes())).module()
    return lambda inputs: loaded(**inputs)


def _onnx(network: Prepared, inputs: dict[str, Tensor], file: Path) -> Inference:
    runtime, *_ = (needs(name, "export") for name in ("onnxruntime", "onnx", "onnxscript"))
    names = {"input_names": list(inputs), "output_names": ["predictions"]}
    options: Any = {"kwargs": inputs, "dynamic_shapes": _dynamic(inputs), "dynamo": True, "verbose": False, **names}
    program: Any = torch.onnx.export(network, (), **options)
    program.save(file, external_data=False)
    threads = runtime.SessionOptions()
    threads.intra_op_num_threads, threads.log_severity_level = torch.get_num_threads(), 3
    session = runtime.InferenceSession(file, threads, providers=["CPUExecutionProvider"])

    def inference(inputs: Mapping[str, Tensor]) -> Tensor:
        (out,) = session.run(None, {key: value.numpy() for key, value in inputs.items()})
        return torch.from_numpy(out)

    return inference


FORMATS: dict[str, Callable[[Prepared, dict[str, Tensor], Path], Inference]] = {".onnx": _onnx, ".pt2": _pt2}
