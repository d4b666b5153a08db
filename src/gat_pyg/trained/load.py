"""Loading of a trained run: its models, alone or as one that predicts."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from ..models.encoders import Encoded, Encoder
from ..models.link_scores import LinkScores
from ..runs.model_file import described, fill_with, model_file, read, rebuilt, seeds_of
from ..runs.result import CHECKPOINT
from ..seeds.stack import Stack
from ..settings.hashing import MODEL
from ..tasks.model import Inputs, members
from ..tasks.objective import Objective
from ..tasks.preparation import attach
from ..training.checkpoint import SafeCheckpoints


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
        about, tensors = read(path)
        if model is None:
            model = rebuilt(path, about, tensors)
        fill_with(model, tensors, path)
        attach(model, *described(path, about))
    return _predictor(folder, [model]) if predictions else model.eval()


def _unfinished(folder: Path, model: nn.Module | None, trust: bool) -> nn.Module:
    """Return the model of a run that is not finished, with the best weights in its checkpoint."""
    from ..runs.network import initial_model  # imports Lightning
    from ..runs.task import settings_of, task_of  # imports Lightning

    path = folder / CHECKPOINT
    rule = SafeCheckpoints().load_checkpoint(path)["callbacks"].get("PaperStopping")
    if not rule or not rule["weights"]:
        raise FileNotFoundError(f"{folder} is not a run folder: no epoch is finished. Finish it by ckpt_path=last.")
    settings, task = settings_of(folder, trust), task_of(folder, trust)
    model = initial_model(settings, task, settings.seed).model if model is None else model
    fill_with(model, {key.removeprefix("model."): value for key, value in rule["weights"].items()}, path)
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
        self.inner_inputs = Inputs.of(models[0])

    def forward(
        self,
        x: Tensor,
        edge_index: Any = None,
        edge_attr: Tensor | None = None,
        *,
        edge_label_index: Tensor | None = None,
        outputs: bool = False,
        **options: Any,
    ) -> Tensor:
        """Return the predictions for features `[N, F]` that are prepared as the run's data.

        Args:
            x: `[N, F]`.
            edge_index: as the models take it.
            edge_attr: `[E, D]`.
            edge_label_index: pairs of nodes `[2, L]`, if the models predict those.
            outputs: if true, return instead the output of each of the S models, `[S, n, K]`, or `[S, L]` for links.
            **options: other arguments of the models' forward: `batch` and `batch_size` of several graphs, and the
                features `edge_label_attr` of pairs, if a decoder reads them.
        """
        options |= {"edge_attr": edge_attr, "edge_label_index": edge_label_index}
        pairs = Data(edge_label_index=edge_label_index)
        outs = [self.inner_inputs.select(model, x, edge_index, **options) for model in self.models]
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


def encoders_of(model: nn.Module) -> dict[str, Encoder]:
    """Return the encoders of a model by the names of the features that they encode."""
    encoders: dict[str, Encoder | None] = {}
    for module in model.modules():
        if isinstance(module, Encoded):
            encoders |= {"x": module.encoder, "edge_attr": module.edge_encoder}
        elif isinstance(module, LinkScores):
            encoders["edge_label_attr"] = module.edge_encoder
    return {key: encoder for key, encoder in encoders.items() if encoder is not None}
