"""Uncertainty: calibrated probabilities, prediction sets and intervals, from the errors on the validation rows."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..files import write_whole
from ..settings.settings import Settings
from ..tasks.labels import OneLabel
from ..tasks.objective import Objective, Split
from ..tasks.objectives import OBJECTIVES, objective_from
from ..tasks.targets import Targets
from ..tasks.task import Task
from ..training.modules import Inductive, Transductive
from .trained import Seed, Trained

CALIBRATION = "calibration.json"
PERCENT = range(1, 100)  # the levels
SMALLEST = 1e-15  # a probability, so that logarithms are finite
DEVIATIONS = 4  # standard errors by which two shares differ


@dataclass(frozen=True)
class Calibration:
    r"""Calibrated probabilities, and prediction sets and intervals at a chosen level, of a trained run.

    Of a run with several seeds, p(x) are the probabilities and y(x) the regression outputs averaged over the seeds.

    **Temperature** (Guo et al., 2017). Calibrated probabilities are

    .. math::
        p^T(x) = \operatorname{softmax}\bigl(\log p(x) / T\bigr), \qquad
        T = \arg\min_T - \sum_{i \in \text{val}} \log p^T_{y_i}(x_i)

    and of many labels likewise by the sigmoid, with one T. T > 1 means that the model is overconfident. The most
    probable class stays the same.

    **Split conformal prediction** (Vovk et al., 2005; Lei et al., 2018). With a score of how unusual a label is,

    .. math::
        s(x, y) = \begin{cases} 1 - p^T_y(x) & \text{classes (Sadinle et al., 2019)} \\
        |y - y(x)| & \text{regression} \end{cases}

    the n validation rows have the scores s_i. q is the ⌈(n + 1) level⌉-th smallest of them, and ∞ if there are fewer.
    The set of a row is {y : s(x, y) ≤ q}: the classes with a probability of at least 1 - q, or the interval y(x) ± q.
    A set may be empty. If a new row and the validation rows are exchangeable,

    .. math:: \text{level} \le P\bigl(y \in C(x)\bigr)

    on average over rows and splits: not for each class, nor for each row. `caveat` is the reason why they may not be.
    Since the best epoch was chosen on the same rows, coverage is a little lower than the level; the guide has numbers.

    Example:
        >>> import torch
        >>> from gat_pyg.tasks.nodes import NodeLabels
        >>> p, y = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.3, 0.7]]).double().repeat(9, 1), torch.tensor([0, 1, 1] * 9)
        >>> run = calibrated(NodeLabels(2), Rows(p, y), Rows(p, y))
        >>> run.sets(torch.tensor([[0.95, 0.05], [0.5, 0.5]]), level=0.9)
        tensor([[ True, False],
                [ True,  True]])
    """

    objective: Objective
    rows: int  # n, of the validation
    temperature: float | None = None  # T; None of a regression
    errors: tuple[float, float] | None = None  # expected calibration error on the test in percent, before and after
    quantiles: Sequence[Sequence[float]] = ()  # q for each level of `PERCENT`; of a regression, one for each target
    coverage: Sequence[Sequence[float]] = ()  # on the test in percent, for each level, likewise
    sizes: Sequence[float] = ()  # the mean number of classes in a set on the test, for each level
    caveat: str = ""

    def probabilities(self, predictions: Tensor) -> Tensor:
        """Return calibrated probabilities `[n, K]` for those that `predict` returns."""
        if self.temperature is None:
            return predictions
        outputs = self.objective.outputs(predictions.clamp(SMALLEST, 1 - SMALLEST))
        return self.objective.predictions(outputs / self.temperature)

    def sets(self, predictions: Tensor, level: float = 0.9) -> Tensor:
        """Return the classes in the set of each row, `[n, K]` bool.

        Args:
            predictions: the probabilities `[n, K]` that `predict` returns.
            level: 0.01, 0.02, ... or 0.99.

        Raises:
            ValueError: for another level, or if the run predicts no classes.
        """
        quantile = self._quantile(level)
        if not isinstance(self.objective, OneLabel):
            raise ValueError(f"The run predicts {self.objective.predicts}. Sets are of classes: call interval.")
        return 1 - self.probabilities(predictions) <= quantile.to(predictions)

    def interval(self, predictions: Tensor, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Return the lower and the upper ends `[n, K]` of the intervals; arguments and errors as of `sets`."""
        quantile = self._quantile(level).to(predictions)
        if not isinstance(self.objective, Targets):
            raise ValueError(f"The run predicts {self.objective.predicts}. Intervals are for regression: call sets.")
        return predictions - quantile, predictions + quantile

    def _quantile(self, level: float) -> Tensor:
        """Return q `[1]`, or `[K]` of a regression."""
        return torch.tensor(self.at(level, self.quantiles), dtype=torch.float64)

    def at(self, level: float, values: Sequence[Any]) -> Any:
        """Return the entry of a level in `quantiles`, `coverage` or `sizes`.

        Raises:
            ValueError: as `sets`.
        """
        index = round(100 * level) - 1
        if index not in range(len(PERCENT)) or abs(100 * level - PERCENT[index]) > 1e-6:
            raise ValueError(f"level is {level}, expected 0.01, 0.02, ... or 0.99, such as 0.9.")
        if not self.quantiles:
            raise ValueError(f"level fits classes and regression, but the run predicts {self.objective.predicts}.")
        return values[index]

    def measured_on(self, rows: Rows) -> Calibration:
        """Return the same calibration with the errors, the coverage and the sizes of the sets on these rows."""
        result, after, objective = self, rows, self.objective
        if self.temperature is not None:
            after = rows._replace(predictions=self.probabilities(rows.predictions))
            result = replace(result, errors=(_error(objective, rows), _error(objective, after)))
        if not self.quantiles:
            return result
        limits = torch.tensor(self.quantiles, dtype=torch.float64)
        result = replace(result, coverage=(100 * _shares(_unusual(after), limits)).tolist())
        if self.temperature is None:
            return result
        every = 1 - after.predictions[objective.known(rows.labels)].view(-1, 1)
        return replace(result, sizes=(objective.out_channels * _shares(every, limits)).flatten().tolist())

    def text(self, level: float = 0.9, labels: str = "test labels") -> str:
        """Return the calibration error, the coverage and the size of the sets, on the test or `labels`, in words."""
        parts = []
        if self.errors is not None:
            before, after = self.errors
            parts = [f"calibration error {before:.1f} % ({after:.1f} % with temperature {self.temperature:.2f})"]
        if self.quantiles:
            quantile, coverage = self.at(level, self.quantiles), self.at(level, self.coverage)
            kind, low, high = "sets" if self.sizes else "intervals", min(coverage), max(coverage)
            held = f"{low:.1f}" if len(coverage) == 1 else f"{low:.1f} to {high:.1f}"
            size = f", {self.at(level, self.sizes):.2f} classes on average" if self.sizes else ""
            size = f", ± {quantile[0]:.3g}" if len(quantile) == 1 and not self.sizes else size
            parts.append(f"{100 * level:.0f} % {kind} hold {held} % of the {labels}{size}")
            if not math.isfinite(max(quantile)):
                needed = math.ceil(level / (1 - level) - 1e-9)
                parts[-1] = f"{100 * level:.0f} % {kind} need {needed} labels in the validation"
            parts += [self.caveat] if self.caveat else []
        return "; ".join(parts)

    def save(self, folder: Path) -> None:
        """Write `CALIBRATION` into a folder."""
        values = {**asdict(self), "objective": self.objective.to_dict()}
        values["quantiles"] = [[q if math.isfinite(q) else None for q in its] for its in self.quantiles]
        text = json.dumps(values, ensure_ascii=False, allow_nan=False)
        write_whole(folder / CALIBRATION, lambda beside: beside.write_text(text + "\n", encoding="utf-8"))

    @classmethod
    def read(cls, folder: Path) -> Calibration | None:
        """Return what `save` wrote into a folder; None if it wrote nothing.

        Raises:
            ValueError: if the file has another form.
        """
        path = folder / CALIBRATION
        if not path.is_file():
            return None
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            values["objective"] = objective_from(values["objective"])
            values["quantiles"] = [[math.inf if q is None else q for q in its] for its in values["quantiles"]]
            return cls(**values)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} cannot be read ({error}). Delete it: it is computed again from the data."
            ) from error


class Rows(NamedTuple):
    """The predictions of some rows, averaged over models, and their labels."""

    predictions: Tensor  # [n, K] or, of links, [n]
    labels: Tensor


def calibration(
    run_dir: str | Path, seed: Seed = None, model: nn.Module | None = None, trust: bool = False
) -> Calibration:
    """Return the calibration of a trained run; of several seeds, that of their averaged prediction.

    A run of several seeds has it in its folder. That of a run of one seed, or of one of several, is computed from the
    run's own data, which are read again.

    Args:
        run_dir: the folder of a run, or of the runs of several seeds.
        seed: seed of the model, if the run has several; by default the mean over all.
        model, trust: as in `gat_pyg.load`.

    Raises:
        FileNotFoundError, ValueError: as `gat_pyg.load`; if the run's data cannot be read; if it predicts links, whose
            probabilities depend on the pairs that were drawn as no links.

    >>> calibration("nowhere")
    Traceback (most recent call last):
    FileNotFoundError: nowhere is not a run folder: it does not exist. Give the folder that a run printed at its end.
    """
    return calibration_of(Trained.open(run_dir, seed, model, trust))


def calibration_of(trained: Trained) -> Calibration:
    """Return the calibration of an opened run, as `calibration`."""
    if (saved := Calibration.read(trained.whole)) is not None:
        return saved
    if not can_calibrate(trained.objective):
        raise ValueError(
            f"{trained.folder} predicts {trained.objective.predicts}, whose probabilities are not calibrated."
        )
    settings = trained.settings
    return of_task(averaged(trained.models, trained.task, settings.training.batch_size), trained.task, settings)


def of_task(rows: Mapping[Split, Rows], task: Task, settings: Settings) -> Calibration:
    """Return the calibration of averaged predictions of a task with an objective that `can_calibrate`."""
    return calibrated(task.objective, rows["val"], rows["test"], caveat(task, settings))


def can_calibrate(objective: Objective) -> bool:
    """Return True for classes, labels and regression targets; False for links and the objectives of other packages."""
    return objective.calibrates and type(objective) in OBJECTIVES


@torch.no_grad()
def averaged(models: Iterable[nn.Module], task: Task, batch_size: int) -> dict[Split, Rows]:
    """Return predictions averaged over models, and labels, of the test, and of the validation if it can calibrate."""
    objective, shared = task.objective, task.shared_graph
    setup = Inductive if shared is None else Transductive
    splits: tuple[Split, ...] = ("val", "test") if can_calibrate(objective) else ("test",)
    sums: dict[Split, Tensor] = {}
    labels: dict[Split, Tensor] = {}
    count = 0
    for model in models:
        count += 1
        module: Inductive | Transductive = setup(model, objective).eval()
        graph = shared if objective.item == "node" else None
        whole = None if graph is None else module(objective.example(graph, "test"))  # of both splits
        for split in splits:
            parts = []
            for data in task.loader(split, batch_size):
                example = objective.example(data, split)
                parts.append(module.labelled(module(example) if whole is None else whole, example, split))
            out, labels[split] = (torch.cat(values) for values in zip(*parts, strict=True))
            predictions = objective.predictions(out.double())
            sums[split] = sums[split] + predictions if split in sums else predictions
    return {split: Rows(sums[split] / count, labels[split]) for split in splits}


def calibrated(objective: Objective, val: Rows, test: Rows, caveat: str = "") -> Calibration:
    """Return the calibration by the rows of the validation, with its errors on those of the test."""
    known = objective.known(val.labels)
    result = Calibration(objective, int((known if known.dim() == 1 else known.any(1)).sum()), caveat=caveat)
    if isinstance(objective, Targets):
        result = replace(result, quantiles=_quantiles(_unusual(val)).tolist())
    else:
        plain = type(objective)(objective.out_channels)  # whose loss is the negative log-likelihood
        result = replace(result, objective=plain, temperature=_temperature(plain, val))
        if isinstance(plain, OneLabel):
            after = val._replace(predictions=result.probabilities(val.predictions))
            result = replace(result, quantiles=_quantiles(_unusual(after)).tolist())
    return result.measured_on(test)


def _temperature(objective: Objective, rows: Rows) -> float:
    """Return the temperature with the smallest negative log-likelihood, between 0.01 and 100.

    Without an error among the rows, the likelihood only grows with the confidence, and says nothing of how far it may
    go: the temperature is then at least 1.
    """
    from scipy.optimize import minimize_scalar

    outputs, known = objective.outputs(rows.predictions.clamp(SMALLEST, 1 - SMALLEST)), objective.known(rows.labels)
    p, y = rows.predictions, rows.labels
    right = p.argmax(1) == y if isinstance(objective, OneLabel) else (p > 0.5) == (y > 0.5)
    limits = math.log(0.01), math.log(100.0)  # of log T, with one minimum
    found = minimize_scalar(lambda log: float(objective.loss(outputs / math.exp(log), y)), bounds=limits)
    return max(math.exp(found.x), 1.0 if bool(right[known].all()) else 0.01)


def _error(objective: Objective, rows: Rows) -> float:
    """Return the expected calibration error over 15 bins of equal width, in percent; of many labels that of all."""
    from torchmetrics.functional.classification import binary_calibration_error, multiclass_calibration_error

    known = objective.known(rows.labels)
    p, y = rows.predictions[known], rows.labels[known].long()
    if isinstance(objective, OneLabel):
        return 100 * float(multiclass_calibration_error(p, y, objective.out_channels, n_bins=15, validate_args=False))
    return 100 * float(binary_calibration_error(p, y, n_bins=15, validate_args=False))


def _unusual(rows: Rows) -> Tensor:
    """Return the scores s of labels: 1 - p of classes `[n, 1]`, |y - y(x)| `[n, K]`; NaN of unknown ones."""
    if rows.labels.is_floating_point():
        return (rows.labels.double() - rows.predictions).abs()
    p = rows.predictions.gather(1, rows.labels.clamp(min=0)[:, None])
    return (1 - p).masked_fill(rows.labels[:, None] < 0, math.nan)


def _quantiles(scores: Tensor) -> Tensor:
    """Return the conformal quantiles `[99, K]` of the scores `[n, K]` that are not NaN, one for each of `PERCENT`."""
    count = (~scores.isnan()).sum(0)
    rank = -(-(count + 1) * torch.tensor(PERCENT)[:, None] // 100)  # rounded up, from 1
    ordered = torch.cat([scores, torch.full_like(scores[:1], math.nan)]).nan_to_num(nan=math.inf).sort(0).values
    return ordered.gather(0, rank - 1)


def _shares(scores: Tensor, quantiles: Tensor) -> Tensor:
    """Return the shares of the scores `[n, K]` that are at most each quantile `[99, K]`; NaN are left out."""
    columns = zip(scores.unbind(1), quantiles.unbind(1), strict=True)
    return torch.stack([_share(column[~column.isnan()], limits) for column, limits in columns], 1)


def _share(scores: Tensor, limits: Tensor) -> Tensor:
    ordered = scores.sort().values
    return torch.searchsorted(ordered, limits.contiguous(), right=True).double() / max(len(ordered), 1)


def caveat(task: Task, settings: Settings) -> str:
    """Return the reason why coverage may differ from the level; "" if both splits were drawn at random."""
    split, drawn = settings.split, task.split_arguments or ()
    if split.scaffold:
        return "the test has other scaffolds than the validation, so coverage may differ"
    if split.time is not None or ({"val", "test"} <= {*drawn} and "seed" not in drawn):
        return "the test is later than the validation, so coverage may differ"
    if split.column is None and "seed" in drawn and ("folds" in drawn or {"val", "test"} <= {*drawn}):
        return ""
    if (near := _near_training(task)) is not None:
        val, test = (f"{100 * share:.0f} %" for share in near)
        nodes = f"{val} of the validation nodes and {test} of the test nodes have a training node as neighbour"
        return f"{nodes}, so coverage may differ"
    return "the split is the data's own, and coverage holds if validation and test have the same distribution"


def _near_training(task: Task) -> tuple[float, float] | None:
    """Return the shares of validation and test nodes with a training neighbour, if they differ by more than chance."""
    data = task.shared_graph
    if data is None or task.objective.item != "node":
        return None
    src, dst = data.edge_index
    near = torch.zeros_like(data.train_mask)
    near[dst[data.train_mask[src]]] = True
    near[src[data.train_mask[dst]]] = True
    val, test = near[data.val_mask].double(), near[data.test_mask].double()
    p = torch.cat([val, test]).mean()
    error = (p * (1 - p) * (1 / len(val) + 1 / len(test))).sqrt()
    shares = float(val.mean()), float(test.mean())
    return shares if abs(shares[0] - shares[1]) > DEVIATIONS * float(error) else None
