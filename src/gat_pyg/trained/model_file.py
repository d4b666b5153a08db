"""The trained model as one safetensors file, and loading."""

from __future__ import annotations

import copy
import importlib.metadata
import inspect
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch_geometric.data import Data

from ..files import write_whole
from ..models.encoders import Encoded, Encoder
from ..models.link_scores import LinkScores
from ..runs.result import CHECKPOINT, CONFIG, MODEL, RESULT
from ..seeds.stack import Stack
from ..tasks.model import Inputs, members
from ..tasks.objective import Objective
from ..tasks.objectives import objective_from
from ..tasks.preparation import Preparation, attach
from ..training.checkpoint import SafeCheckpoints
from ..training.differing import differing

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


def load(
    run_dir: str | Path,
    model: nn.Module | None = None,
    seed: int | Literal["all"] | None = None,
    predictions: bool = False,
    trust: bool = False,
) -> nn.Module:
    """Return the trained model of a run with its best weights, in eval mode, on the CPU.

    It returns what it was trained to return: logits, or **standardised** targets. With `predictions=True` the
    result is a `Predictor` around it, to call or to export, whose output is probabilities, or targets in the unit of
    the training data. Neither prepares the data.

    For a folder with runs of several seeds, `seed=3` returns one model and `seed="all"` a stack of all, whose output
    has the logits [S, N, K] in the order of the seeds: `load(folder, seed="all")(x, edge_index)`. With
    `predictions=True`, the output is the mean over the seeds.

    `model.objective` is the objective of the run: `model.objective.predictions(out)` is the output of a `Predictor`,
    which has no objective. It is None if it is a class of another package.

    `model.preparation` is the data preparation of the run: `model.preparation(data)` applies it to other data. The
    first call of the model raises ValueError for a wrong number of features, and warns if the features seem to be
    prepared differently. It is None if the file has none.

    No code in the folder is run: the weights are numbers, and the class is built by its name only if it is an
    `nn.Module` of gat_pyg or one of PyG's models or layers. For other classes, pass a `model` of the same shapes.

    A run of one seed that is not finished has the best weights so far in its checkpoint. The run's data are read then,
    and a warning names the epoch. Its settings may name classes of gat_pyg, PyG and OGB only; `trust=True`
    builds whatever they name, as in one's own runs.

    Raises FileNotFoundError if `run_dir` is not the folder of a finished run, and ValueError if the file is truncated,
    the class is not one of those above, its shapes differ from those saved, or there are to be predictions without an
    objective.

    >>> load("nowhere")
    Traceback (most recent call last):
    FileNotFoundError: nowhere is not a run folder: it does not exist. Give the folder that a run printed at its end.
    """
    folder = Path(run_dir)
    if seed == "all":
        if not (seeds := seeds_of(folder)):
            raise FileNotFoundError(f"{folder} holds no runs of several seeds. Leave out seed, or give their folder.")
        models = [load(folder, copy.deepcopy(model), number, trust=trust) for number in seeds]
        first = members(models[0])
        if predictions:
            return _predictor(folder, models)
        stack = Stack(models).eval()
        attach(stack, first.preparation, first.objective)
        return stack
    if seed is not None and (seeds := seeds_of(folder)) and seed not in seeds:
        raise FileNotFoundError(f"{folder} has no run of seed {seed}, expected one of {', '.join(map(str, seeds))}.")
    folder = folder if seed is None else folder / f"seed-{seed}"
    if (folder / CHECKPOINT).is_file() and not (folder / MODEL).is_file():
        model = _unfinished(folder, model, trust)
    else:
        path = model_file(folder)
        about, tensors = _read(path)
        if model is None:
            model = _rebuild(path, about, tensors)
        _fill(model, tensors, path)
        attach(model, *described(path, about))
    return _predictor(folder, [model]) if predictions else model.eval()


def _unfinished(folder: Path, model: nn.Module | None, trust: bool) -> nn.Module:
    """Return the model of a run that is not finished, with the best weights in its checkpoint."""
    from ..runs.build import initial_model, settings_of, task_of  # imports Lightning

    path = folder / CHECKPOINT
    rule = SafeCheckpoints().load_checkpoint(path)["callbacks"].get("PaperStopping")
    if not rule or not rule["weights"]:
        raise FileNotFoundError(f"{folder} is not a run folder: no epoch is finished. Finish it by ckpt_path=last.")
    settings, task = settings_of(folder, trust), task_of(folder, trust)
    model = initial_model(settings, task, settings.seed).model if model is None else model
    _fill(model, {key.removeprefix("model."): value for key, value in rule["weights"].items()}, path)
    attach(model, task.preparation, task.objective)
    warnings.warn(
        f"{folder} is not finished: the weights are those of epoch {rule['best_epoch']}, the best of {rule['epoch']}. "
        "Finish the run by ckpt_path=last.",
        stacklevel=3,
    )
    return model


class Predictor(nn.Module):
    """Trained models of one objective as one that returns predictions: their mean over the models.

    The output has a row for each node or pair `[N, K]`, graph `[G, K]` or link `[L]`: probabilities, or targets in
    the unit of the training data.

    Args:
        models: of one class and training data, as of several seeds.
        objective: meaning of their output, `task.objective`.

    Example:
        >>> from gat_pyg.tasks.nodes import NodeLabels
        >>> from gat_pyg.tasks.targets import NodeTargets
        >>> Predictor([nn.Identity()], NodeLabels(2))(torch.zeros(3, 2))[0]
        tensor([0.5000, 0.5000])
        >>> Predictor([nn.Identity()], NodeTargets(1, mean=(5.0,), std=(2.0,)))(torch.tensor([[1.0]]))
        tensor([[7.]])
    """

    returns_predictions = True

    def __init__(self, models: Sequence[nn.Module], objective: Objective) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)
        self.run_objective = objective  # not `objective`, which would be applied to the output once more
        self._inputs = Inputs.of(models[0])

    def forward(
        self,
        x: Tensor,
        edge_index: Any = None,
        edge_attr: Tensor | None = None,
        batch: Tensor | None = None,
        batch_size: int | None = None,
        edge_label_index: Tensor | None = None,
        edge_label_attr: Tensor | None = None,
        outputs: bool = False,
    ) -> Tensor:
        """Return the predictions for features `[N, F]` that are prepared as the run's data.

        Args:
            x: `[N, F]`.
            edge_index: as the models take it.
            edge_attr: `[E, D]`.
            batch, batch_size: the graph of each node `[N]`, and the number of graphs.
            edge_label_index: pairs of nodes `[2, L]`, if the models predict those.
            edge_label_attr: their features `[L, D]`, if a decoder reads them.
            outputs: if true, return instead the output of each of the S models, `[S, n, K]`, or `[S, L]` for links.
        """
        options = {
            "edge_attr": edge_attr,
            "batch": batch,
            "batch_size": batch_size,
            "edge_label_index": edge_label_index,
            "edge_label_attr": edge_label_attr,
        }
        pairs = Data(edge_label_index=edge_label_index)
        outs = [self._inputs.select(model, x, edge_index, **options) for model in self.models]
        outs = [self.run_objective.scores(out, pairs) for out in outs]
        if outputs:
            return torch.stack(outs)
        predictions = [self.run_objective.predictions(out) for out in outs]
        return predictions[0] if len(predictions) == 1 else torch.stack(predictions).mean(0)


def _predictor(folder: Path, models: Sequence[nn.Module]) -> Predictor:
    """Return the predictor of loaded models."""
    first = members(models[0])
    if first.objective is None:
        raise ValueError(
            f"{folder} was saved without an objective of gat_pyg. Prepare the data yourself, and call the model: "
            "gat_pyg.load(run_dir)."
        )
    for model in models:
        attach(model, None, first.objective)  # the predictor checks the features
    predictor = Predictor(models, first.objective).eval()
    attach(predictor, first.preparation)
    return predictor


def seeds_of(folder: Path) -> list[int]:
    """Return the seeds of a folder with finished runs of several."""
    return sorted(map(_seed_of, folder.glob(f"seed-*/{MODEL}")))


def _seed_of(path: Path) -> int:
    try:
        return int(path.parent.name.removeprefix("seed-"))
    except ValueError:
        raise ValueError(f"{path.parent} is not a folder of a seed, expected seed-0, seed-1, ... Rename it.") from None


def encoders_of(model: nn.Module) -> dict[str, Encoder]:
    """Return the encoders of a model by the names of the features that they encode."""
    encoders: dict[str, Encoder | None] = {}
    for module in model.modules():
        if isinstance(module, Encoded):
            encoders |= {"x": module.encoder, "edge_attr": module.edge_encoder}
        elif isinstance(module, LinkScores):
            encoders["edge_label_attr"] = module.edge_encoder
    return {key: encoder for key, encoder in encoders.items() if encoder is not None}


def _read(path: Path) -> tuple[Any, dict[str, Tensor]]:
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
    about, _ = _read(path)
    arguments = about.get("arguments") if isinstance(about, dict) else None
    return arguments if isinstance(arguments, dict) else {}


def described(path: Path, about: Any = None) -> tuple[Preparation | None, Objective | None]:
    """Return the preparation and the objective that the file describes, or None."""
    about = _read(path)[0] if about is None else about
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


def _rebuild(path: Path, about: Any, tensors: Mapping[str, Tensor]) -> nn.Module:
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


def _fill(model: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    _check_fits(model, tensors, path)
    model.load_state_dict(tensors, strict=False)


def _check_fits(model: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    if different := differing(_tensors(model), tensors):
        raise ValueError(
            f"{path} does not fit {type(model).__name__}: {different}. Give the model that was trained: "
            "load(run_dir, model=...) with the arguments in the run's config.yaml."
        )
