"""The trained model as one safetensors file; loading and prediction."""

from __future__ import annotations

import copy
import importlib.metadata
import inspect
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

from ..files import write_whole
from ..seeds.stack import Stack
from ..tasks.preparation import Preparation, attach
from ..training.differing import differing
from .result import CONFIG, MODEL, RESULT

LARGEST = 10_000  # of an argument of a model with fewer parameters
REBUILT = ("gat_pyg.", "torch_geometric.nn.models.", "torch_geometric.nn.conv.")  # what `load` may build by its name

# The trained model --------------------------------------------------------------------------------------------------


def save_model(path: str | Path, model: nn.Module, target: str, arguments: Mapping[str, Any], **facts: Any) -> None:
    """Write the weights of `model` with what rebuilds it: `target`, the class's name, and its `arguments`.

    The file is safetensors: numbers and a JSON text, nothing that could run. `facts` (JSON too) go into that text.
    """
    about = {"target": target, "arguments": dict(arguments), **facts}
    # a state dict may hold one tensor twice, which safetensors refuses
    tensors = {key: value.detach().cpu().clone().contiguous() for key, value in _tensors(model).items()}
    metadata = {"gat_pyg": json.dumps(about, ensure_ascii=False)}
    write_whole(path, lambda beside: beside.write_bytes(safetensors.torch.save(tensors, metadata)))


def load(run_dir: str | Path, model: nn.Module | None = None, seed: int | Literal["all"] | None = None) -> nn.Module:
    """Return the trained model of a run, with its best weights and in eval mode, on the CPU.

    Of a folder with the runs of several seeds, `seed=3` gives one model and `seed="all"` the stack of them, whose
    call gives logits [S, N, K] in the order of the seeds: `load(folder, seed="all")(x, edge_index)`.

    `model.preparation` describes how the data of the run were prepared, and prepares others: `model.preparation(data)`.
    The first call raises ValueError for another number of features, and warns of features prepared differently. It is
    None for a file saved without.

    Nothing in the folder is ever run: the weights are plain numbers, and the class is built by its name only where it
    is an `nn.Module` of gat_pyg or one of PyG's models or layers. For any other, give a `model` of the same shapes.

    Raises FileNotFoundError when `run_dir` is not the folder of a finished run, and ValueError when the file is
    truncated, the class is not one to be built by name, or its shapes differ from those saved.

    >>> load("nowhere")
    Traceback (most recent call last):
    FileNotFoundError: nowhere is not a run folder: it does not exist. Give the folder that a run named at its end.
    """
    folder = Path(run_dir)
    if seed == "all":
        inner = sorted(folder.glob(f"seed-*/{MODEL}"), key=_seed_of)
        if not inner:
            raise FileNotFoundError(f"{folder} holds no runs of several seeds. Leave out seed, or give their folder.")
        models = [load(path, copy.deepcopy(model)) for path in inner]
        stack = Stack(models).eval()
        attach(stack, getattr(models[0], "preparation", None))
        return stack
    path = _model_file(folder if seed is None else folder / f"seed-{seed}")
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get("gat_pyg", "null"))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} cannot be read: {error}. It is truncated or of another kind. Copy it again, or train again."
        ) from error
    if model is None:
        model = _rebuild(path, about, tensors)
    _fill(model, tensors, path)
    attach(model, _preparation(path, about))
    return model.eval()


def _seed_of(path: Path) -> int:
    try:
        return int(path.parent.name.removeprefix("seed-"))
    except ValueError:
        raise ValueError(f"{path.parent} is no folder of a seed, expected seed-0, seed-1, ... Rename it.") from None


@torch.no_grad()
def predict(
    run_dir: str | Path, data: Data, model: nn.Module | None = None, seed: int | Literal["all"] | None = None
) -> Tensor:
    """Return the probabilities [N, K] of each node's classes, or of its labels, by the model of a run.

    Where the run learnt labels of graphs, they are those of each graph, [G, K].

    `data` is a graph, or a batch of them, as it comes from its source: it is prepared as the run's data were
    (`Preparation`), on the device of its features. `seed="all"` gives the mean probabilities over the seeds. The
    other arguments, and what else is raised, are those of `load`.

    Raises ValueError when the dimensions of `data` are not the run's, or the run has no preparation that can be
    applied, and warns of features that differ from the run's.

    >>> predict("nowhere", Data())
    Traceback (most recent call last):
    FileNotFoundError: nowhere is not a run folder: it does not exist. Give the folder that a run named at its end.
    """
    trained = load(run_dir, model, seed)
    preparation: Any = trained.preparation
    if preparation is None:
        raise ValueError(
            f"{run_dir} was saved without its data preparation. Prepare the data yourself, and call the model: "
            "gat_pyg.load(run_dir)."
        )
    data = preparation(data)
    single = trained.models if isinstance(trained, Stack) else trained
    takes = inspect.signature(single.forward).parameters
    edges = [data.edge_index] if "edge_index" in takes else []
    with_edge_attr = preparation.edge_dim is not None and "edge_attr" in takes
    with_edge_attr = with_edge_attr and getattr(single, "supports_edge_attr", True)
    options = {"edge_attr": data.edge_attr} if with_edge_attr else {}
    if preparation.item == "graph" and "batch" in takes and isinstance(data, Batch):
        options |= {"batch": data.batch, "batch_size": data.num_graphs}
    out = trained.to(data.x.device)(data.x, *edges, **options)
    probabilities: Tensor = preparation.probabilities(out)
    return probabilities.mean(0) if isinstance(trained, Stack) else probabilities


def _preparation(path: Path, about: Any) -> Preparation | None:
    """The preparation that the file describes, or None."""
    description = about.get("preparation") if isinstance(about, dict) else None
    try:
        return None if description is None else Preparation.from_dict(description)
    except (AttributeError, TypeError) as error:
        raise ValueError(
            f"{path} describes its data preparation in another form: {error}. Use the version that saved it."
        ) from error


def _model_file(folder: Path) -> Path:
    path = folder if folder.name == MODEL else folder / MODEL
    if path.is_file():
        return path
    if not folder.exists():
        why = "it does not exist. Give the folder that a run named at its end"
    elif inner := sorted(child.parent.name for child in folder.glob(f"*/{MODEL}")):
        seeds = all(name.startswith("seed-") for name in inner)
        beside = f", or seed={inner[0].removeprefix('seed-')} or seed='all' beside it" if seeds else ""
        why = f"it holds the runs {', '.join(inner[:10])}. Give one of these{beside}"
    elif (folder / CONFIG).is_file() and not (folder / RESULT).is_file():
        why = f"it has no {MODEL} since its run is not finished. Finish it by ckpt_path=last"
    else:
        why = f"it has no {MODEL}. Give the folder that a run named at its end"
    raise FileNotFoundError(f"{folder} is not a run folder: {why}.")


def _rebuild(path: Path, about: Any, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A fresh model of the class and arguments that the file names, if the class is one of `REBUILT`."""
    known = isinstance(about, dict) and isinstance(about.get("target"), str)
    if not known or not isinstance(about.get("arguments"), dict):
        raise ValueError(f"{path} does not say of which class its model is. Give it: load(run_dir, model=...).")
    target, arguments = about["target"], about["arguments"]
    most = max(LARGEST, sum(value.numel() for value in tensors.values()))
    if large := [f"{key}={size}" for key, size in _sizes(arguments) if size > most]:
        raise ValueError(f"{path} asks for {target} with {large[0]}, but has {most} numbers at most. Copy it again.")
    try:
        with torch.device("meta"):  # takes no memory, whatever the arguments ask for
            claimed = _built(path, target, arguments)
    except (
        ValueError
    ):  # a constructor that computes with its values; or nothing that can be built, as is reported below
        pass
    else:
        _check_fits(claimed, tensors, path)
    return _built(path, target, arguments)


def _sizes(value: Any, key: str = "") -> Iterator[tuple[str, int]]:
    """Yield the whole numbers in nested arguments, each with the argument's name."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _sizes(inner, key or name)
    elif isinstance(value, list):
        for inner in value:
            yield from _sizes(inner, key)
    elif isinstance(value, int):
        yield key, value


def _built(path: Path, target: str, arguments: Mapping[str, Any]) -> nn.Module:
    home, _, name = target.rpartition(".")
    found: object = None
    if f"{home}.".startswith((*REBUILT, "torch_geometric.nn.")):
        with suppress(ImportError, ValueError):
            found = getattr(importlib.import_module(home), name, None)
    if not inspect.isclass(found) or not issubclass(found, nn.Module) or not found.__module__.startswith(REBUILT):
        raise ValueError(
            f"{path} names the class {target}, expected one of gat_pyg or one of torch_geometric.nn's models and "
            "layers; no other is built by its name alone. Build it yourself: load(run_dir, model=...)."
        )
    arguments = dict(arguments)
    for key, value in arguments.items():
        if isinstance(value, dict) and "_target_" in value:  # a module inside, such as a mechanism
            inner = {name: part for name, part in value.items() if name != "_target_"}
            arguments[key] = _built(path, str(value["_target_"]), inner)
    try:
        return found(**arguments)
    except Exception as error:
        raise ValueError(
            f"{path} asks for {target}(**{arguments}), which this version cannot build: {error}. "
            "Build it yourself: load(run_dir, model=...)."
        ) from error


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {key: value for key, value in model.state_dict().items() if isinstance(value, Tensor)}


def _fill(model: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    _check_fits(model, tensors, path)
    model.load_state_dict(tensors, strict=False)


def _check_fits(model: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    if different := differing(_tensors(model), tensors):
        raise ValueError(
            f"{path} does not fit {type(model).__name__}: {different}. Give the model that was trained: "
            "load(run_dir, model=...) with the arguments in the run's config.yaml."
        )
