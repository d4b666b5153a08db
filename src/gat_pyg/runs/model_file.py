"""The trained model as one safetensors file: written, read and built again."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..files import write_whole
from ..runs.result import CONFIG, RESULT
from ..settings.hashing import MODEL
from ..tasks.objective import Objective
from ..tasks.objectives import objective_from
from ..tasks.preparation import Preparation
from ..training.checkpoint import differing

LARGEST = 10_000  # the largest argument of a model with fewer parameters than this
REBUILT = ("gat_pyg.", "torch_geometric.nn.models.", "torch_geometric.nn.conv.")  # packages whose classes `load` builds

# The trained model --------------------------------------------------------------------------------------------------


def save_model(path: str | Path, model: nn.Module, target: str, arguments: Mapping[str, Any], **metadata: Any) -> None:
    """Write the weights of `model` with `target`, the name of its class, and the class's `arguments`.

    The file is in safetensors format: numbers and a JSON text, nothing that could run. The text also holds `metadata`.
    """
    about = {"target": target, "arguments": dict(arguments), **metadata}
    # a state dict may hold one tensor twice, which safetensors rejects
    tensors = {key: value.detach().cpu().clone().contiguous() for key, value in _tensors(model).items()}
    text = {"gat_pyg": json.dumps(about, ensure_ascii=False)}
    write_whole(path, lambda beside: beside.write_bytes(safetensors.torch.save(tensors, text)))


def check_dtypes(model: nn.Module) -> None:
    """Raise ValueError if a weight has a dtype that `save_model` cannot write, as complex128."""
    for dtype, key in {value.dtype: key for key, value in _tensors(model).items()}.items():
        try:
            safetensors.torch.save({key: torch.empty(0, dtype=dtype)})
        except (KeyError, ValueError, SafetensorError) as error:
            raise ValueError(
                f"{key} of {type(model).__name__} has dtype {dtype}, which a safetensors file cannot hold, so that the "
                "trained model could not be saved. Use a real dtype or torch.complex64."
            ) from error


def seeds_of(folder: Path) -> list[int]:
    """Return the seeds of a folder with finished runs of several."""
    return sorted(map(_seed_of, folder.glob(f"seed-*/{MODEL}")))


def _seed_of(path: Path) -> int:
    try:
        return int(path.parent.name.removeprefix("seed-"))
    except ValueError:
        raise ValueError(f"{path.parent} is not a folder of a seed, expected seed-0, seed-1, ... Rename it.") from None


def read(path: Path) -> tuple[Any, dict[str, Tensor]]:
    """Return the metadata and the tensors of the file of a model.

    Raises:
        ValueError: if it cannot be read.
    """
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get("gat_pyg", "null"))
            return about, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} cannot be read: {error}. It is truncated or of another kind. Copy it again, or train again."
        ) from error


def arguments_of(path: Path) -> dict[str, Any]:
    """Return the arguments of the class of a model, from its file."""
    about, _ = read(path)
    arguments = about.get("arguments") if isinstance(about, dict) else None
    return arguments if isinstance(arguments, dict) else {}


def described(path: Path, about: Any = None) -> tuple[Preparation | None, Objective | None]:
    """Return the preparation and the objective that the file describes, or None."""
    about = read(path)[0] if about is None else about
    about = about if isinstance(about, dict) else {}
    preparation, objective = about.get("preparation"), about.get("objective")
    try:
        return (
            None if preparation is None else Preparation.from_dict(preparation),
            None if objective is None else objective_from(objective),
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} describes its data preparation or objective in another form: {error}. Use the version that saved "
            "it."
        ) from error


def model_file(folder: Path) -> Path:
    """Return the file of the model in a run's folder, or the file itself.

    Raises:
        FileNotFoundError: if there is none.
    """
    path = folder if folder.name == MODEL else folder / MODEL
    if path.is_file():
        return path
    if not folder.exists():
        reason = "it does not exist. Give the folder that a run printed at its end"
    elif names := sorted(child.parent.name for child in folder.glob(f"*/{MODEL}")):
        seeds = all(name.startswith("seed-") for name in names)
        hint = f", or seed={names[0].removeprefix('seed-')} or seed='all'" if seeds else ""
        reason = f"it holds the runs {', '.join(names[:10])}. Give one of these{hint}"
    elif (folder / CONFIG).is_file() and not (folder / RESULT).is_file():
        reason = f"it has no {MODEL} since its run is not finished. Finish it by ckpt_path=last"
    else:
        reason = f"it has no {MODEL}. Give the folder that a run printed at its end"
    raise FileNotFoundError(f"{folder} is not a run folder: {reason}.")


def rebuilt(path: Path, about: Any, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Build a fresh model of the class and arguments in the file, if the class is one of `REBUILT`."""
    has_target = isinstance(about, dict) and isinstance(about.get("target"), str)
    if not has_target or not isinstance(about.get("arguments"), dict):
        raise ValueError(f"{path} does not name the class of its model. Pass the model: load(run_dir, model=...).")
    target, arguments = about["target"], about["arguments"]
    limit = max(LARGEST, sum(value.numel() for value in tensors.values()))
    if large := [f"{key}={size}" for key, size in _sizes(arguments) if size > limit]:
        raise ValueError(f"{path} has {target} with {large[0]}, but at most {limit} numbers. Copy it again.")
    try:
        with torch.device("meta"):  # takes no memory, whatever the sizes in the arguments
            model = _built(path, target, arguments)
    except ValueError:  # a constructor that reads tensor values, or an error that is raised again below
        pass
    else:
        _check_fits(model, tensors, path)
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


def _class(path: Path, target: str) -> type[nn.Module]:
    """Return the class of this name if it is one of `REBUILT`."""
    home, _, name = target.rpartition(".")
    kind: object = None
    if f"{home}.".startswith((*REBUILT, "torch_geometric.nn.")):
        with suppress(ImportError, ValueError):
            kind = getattr(importlib.import_module(home), name, None)
    if not inspect.isclass(kind) or not issubclass(kind, nn.Module) or not kind.__module__.startswith(REBUILT):
        raise ValueError(
            f"{path} names the class {target}, expected one of gat_pyg or one of torch_geometric.nn's models and "
            "layers; other classes are not built by name. Build the model yourself: load(run_dir, model=...)."
        )
    return kind


def _built(path: Path, target: str, arguments: Mapping[str, Any]) -> nn.Module:
    kind, arguments = _class(path, target), dict(arguments)
    for key, value in arguments.items():
        if isinstance(value, dict) and "_target_" in value:  # an inner module, such as a mechanism
            inner = {name: argument for name, argument in value.items() if name not in ("_target_", "_partial_")}
            name = str(value["_target_"])
            arguments[key] = (
                partial(_class(path, name), **inner) if value.get("_partial_") else _built(path, name, inner)
            )
    try:
        return kind(**arguments)
    except Exception as error:
        raise ValueError(
            f"{path} has {target}(**{arguments}), which this version cannot build: {error}. "
            "Build the model yourself: load(run_dir, model=...)."
        ) from error


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {key: value for key, value in model.state_dict().items() if isinstance(value, Tensor)}


def fill_with(model: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Set the weights of a model to those of a file.

    Raises:
        ValueError: if they do not fit.
    """
    _check_fits(model, tensors, path)
    model.load_state_dict(tensors, strict=False)


def _check_fits(model: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    if different := differing(_tensors(model), tensors):
        raise ValueError(
            f"{path} does not fit {type(model).__name__}: {different}. Give the model that was trained: "
            "load(run_dir, model=...) with the arguments in the run's config.yaml."
        )
