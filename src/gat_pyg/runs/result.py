"""The result of a run as one JSON line: written, appended and read."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import statistics
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf

from ..files import add, lock, write_whole
from ..tasks.metrics import metric_named

RESULT, CONFIG, CHECKPOINT, METRICS = "result.json", "config.yaml", "last.ckpt", "metrics.csv"
ERRICA = "Errica's protocol"  # a study
_COLUMNS = {"node": "encoding=columns", "edge": "encoding=columns"}  # by `Result.item`
_POPULARITY, _RDKIT = {"link": "model.decoder={decoder:mlp,popularity:true}"}, {"graph": "dataset.descriptors=true"}
_MODELS = {"linear model": "a linear model", "random forest": "a random forest", "boosting": "boosted trees"}
BASELINES = {  # descriptions of `Result.baselines`, and the settings that give the network what they have
    "neighbours' labels": ("the neighbours' labels", {"node": "training.label_rate=0.8"}),
    **{name: (f"{text} of the features", _COLUMNS) for name, text in _MODELS.items()},
    **{f"{name} of descriptors": (f"{text} of RDKit's descriptors", _RDKIT) for name, text in _MODELS.items()},
    "earlier value": ("an earlier value", {"node": "model.change=true"}),
    "popularity": ("popularity, the product of the degrees", _POPULARITY),
    "popularity of dst": ("the degree of the second end", _POPULARITY),
    "recent popularity": ("the number of the second end's latest links", _POPULARITY),
    "Adamic-Adar": ("the Adamic-Adar index", {}),
    "paths of length 3": ("the paths of length 3", {}),
}
SOURCE = "gat_pyg source"  # a key of `Result.versions`
PACKAGES = ("gat_pyg", "torch", "torch_geometric", "lightning", "torch_scatter")

# One run is one line ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """The result of one run: one line of `results.jsonl`.

    `value` and `val` are the test and the validation score of the best weights: accuracy in percent, or micro-F1 as a
    fraction. `seconds` is the training only, without reading data and without the test.

    >>> line = Result("GAT", "cora", "accuracy", 83.1, 0, 812, 711, 82.0, 9.2, 0.011, 92373).to_json()
    >>> Result.from_json(line).value
    83.1
    """

    method: str
    dataset: str
    metric: str  # the name of an objective's metric
    value: float
    seed: int
    epochs: int
    best_epoch: int  # counted from 1, the epoch whose weights were tested
    val: float
    seconds: float
    seconds_per_epoch: float
    parameters: int
    versions: Mapping[str, str | None] | None = None
    device: str = "cpu"
    config_hash: str = ""
    run_dir: str = ""
    timestamp: str = ""  # UTC, ISO 8601
    majority: float | None = None  # the best test score of a constant prediction, such as the majority class
    standard_error: float | None = None  # of `majority`
    baselines: Mapping[str, float] | None = None  # test scores without a network, by the names in `BASELINES`
    baselines_error: float | None = None  # the standard error of the best of them
    item: str = "node"  # what has a label: "node", "graph"
    row: str = ""  # the row of a table: the method without its form and study; "": the method
    form: str = ""  # the variant, if a method has several
    scores: Mapping[str, float] | None = None  # other test scores, by the names of their metrics
    study: str = ""  # the study that the run is part of, if any: "ablation", "trained as GAT"
    split: int = 0  # the number of the split or fold, if the data has several
    order: int | None = None  # the seed whose order of the graphs the run took, if it was not its own
    peak_mib: float | None = None  # of memory in the training: a GPU's, else the process's; of all runs trained as one
    data: str = ""  # hash of the settings of the split and of the user's files: data sets of one name may differ

    @property
    def quality(self) -> float:
        """The validation score, negated if lower is better, so that the best is the highest; -inf for NaN.

        >>> Result("GAT", "molesol", "rmse", 0.9, 0, 9, 8, 0.75, 9.2, 0.011, 923).quality
        -0.75
        """
        return -math.inf if math.isnan(self.val) else metric_named(self.metric).better(self.val)

    @property
    def best_baseline(self) -> str:
        """The name of the best of `baselines`, "" without any."""
        baselines, better = self.baselines or {}, metric_named(self.metric).better
        return max(baselines, key=lambda name: better(baselines[name]), default="")

    @property
    def warning(self) -> str:
        """A warning if the score is hardly better than a constant prediction, or worse than a baseline, else ""."""
        return "; ".join(filter(None, (self.near_constant, self.below_baseline)))

    @property
    def below_baseline(self) -> str:
        """A warning if the score is more than a standard error worse than that of the best baseline, else ""."""
        if not (name := self.best_baseline) or self.baselines is None:
            return ""
        metric, score, error = metric_named(self.metric), self.baselines[name], self.baselines_error or 0.0
        if metric.better(self.value) >= metric.better(score) - error - 2e-5:  # rounded
            return ""
        text, _ = BASELINES.get(name, (name, {}))
        return f"worse than {text} ({metric.value(score)}, standard error {metric.value(error)})"

    @property
    def remedy(self) -> str:
        """The setting that gives the network what the best baseline has, else ""."""
        _, settings = BASELINES.get(self.best_baseline, ("", {}))
        return settings.get(self.item, "")

    def lacks_remedy(self, values: Mapping[str, Any]) -> bool:
        """Return True if the run's settings, by their dotted names, do not have the remedy yet."""
        name = self.remedy.partition("=")[0]
        key = {"encoding": "encoding._target_", "model.decoder": "model.decoder.popularity"}.get(name, name)
        off = (False,) if name == "dataset.descriptors" else (None, False)  # null: on, up to 10,000 molecules
        return bool(name) and values.get(key) in off

    @property
    def near_constant(self) -> str:
        """A warning if the score is not a standard error better than that of a constant prediction, else ""."""
        metric = metric_named(self.metric)
        if self.majority is None:
            return ""
        margin = metric.better(self.value) - metric.better(self.majority)
        constant = f"{metric.constant.format(item=self.item)} ({metric.value(self.majority)}"
        if not margin > 2e-5:  # rounded; NaN
            return f"no better than {constant})"
        error = self.standard_error or 0.0
        if margin > error:
            return ""
        return f"within one standard error of {constant}, standard error {metric.value(error)})"

    def to_json(self) -> str:
        """Return one line of JSON without the line break and without defaults; a NaN score becomes null."""
        defaults = {field.name: field.default for field in fields(self)}
        values = {key: value for key, value in asdict(self).items() if value != defaults[key]}
        values |= {key: None for key in ("value", "val") if math.isnan(values[key])}
        return json.dumps(values, ensure_ascii=False, allow_nan=False)

    def save(self, folder: Path) -> None:
        """Write the result into the folder of its run; `result_in` reads it."""
        write_whole(folder / RESULT, lambda beside: beside.write_text(self.to_json() + "\n", encoding="utf-8"))

    @classmethod
    def from_json(cls, line: str) -> Result:
        """Return the Result of a line that `to_json` wrote; unknown fields are ignored.

        Raises ValueError if the line is not a complete Result.
        """
        types = {field.name: field.type for field in fields(cls)}
        try:
            values = json.loads(line)
            values |= {key: float("nan") for key in ("value", "val") if values.get(key, 0) is None}
            values = {key: value for key, value in values.items() if key in types}
            for key, value in values.items():
                if isinstance(value, bool) or not isinstance(value, _JSON[str(types[key])]):
                    raise TypeError(f"{key} is {value!r}")
            return cls(**values)
        except (AttributeError, TypeError, RecursionError) as error:
            raise ValueError(f"not a Result ({error}), expected a JSON object with the fields of Result.") from error


_JSON: dict[str, type | tuple[type, ...]] = {
    "str": str,
    "int": int,
    "float": (int, float),
    "float | None": (int, float, type(None)),
    "int | None": (int, type(None)),
    "Mapping[str, float] | None": (dict, type(None)),
    "Mapping[str, str | None] | None": (dict, type(None)),
}


def scores_of(results: Iterable[Result], key: Literal["value", "val"] = "value") -> dict[tuple[int, int | None], float]:
    """Return the test scores of one configuration by split and seed, or with "val" those of the validation.

    By the protocol of Errica et al., the score of a split is the mean over its seeds, and the seed is None.

    >>> line = Result("GAT", "mutag", "accuracy", 80.0, 0, 9, 8, 82.0, 9.2, 0.011, 923, split=3)
    >>> scores_of([line])
    {(3, 0): 80.0}
    """
    scores: dict[tuple[int, int | None], list[float]] = {}
    for result in results:
        scores.setdefault((result.split, None if result.study == ERRICA else result.seed), []).append(
            getattr(result, key)
        )
    return {key: statistics.fmean(values) for key, values in scores.items()}


@functools.cache
def versions() -> Mapping[str, str | None]:
    """Return the versions of Python and the packages that a result depends on; None if one is not installed.

    `"gat_pyg source"` is the hash of this package's Python files, which distinguishes commits of one version.
    """
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    source = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
    result: dict[str, str | None] = {"python": platform.python_version(), SOURCE: source}
    for package in PACKAGES:
        try:
            result[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            result[package] = None
    return result


# The files of a run -------------------------------------------------------------------------------------------------


def result_in(folder: Path) -> Result | None:
    """Return the result of the run in a folder, or None if it is not finished.

    Raises:
        ValueError: if it cannot be read.
    """
    if not (path := folder / RESULT).is_file():
        return None
    try:
        return Result.from_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path} cannot be read: {error}. Remove it, and the same command with ckpt_path=last trains this run "
            "again."
        ) from error


def settings_in(folder: Path) -> dict[str, Any]:
    """Return the settings of the run in a folder, without references; another version may have written them.

    Raises:
        ValueError: if they cannot be read.
        FileNotFoundError: if there are none.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist. Give the folder that a run printed at its end.")
    try:
        values: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
        if not isinstance(values["model"], dict):
            raise ValueError("model has no settings")
    except Exception as error:  # of YAML, of the encoding, of references
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path} cannot be read, expected the settings of a run: {reason}.") from error
    return dict(values)


# The file of all results --------------------------------------------------------------------------------------------


def append(result: Result, path: str | Path) -> None:
    """Append `result` to the file at `path` as one line; several processes may do so at the same time.

    The file is locked, and the line is written at once unless the file already has it. An incomplete line of an
    earlier process (after a full disk or a crash) remains, and the new line begins below it.

    Raises OSError if the line cannot be written completely; the file is then unchanged.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    line = (result.to_json() + "\n").encode()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
    try:
        lock(descriptor, path)
        end = os.lseek(descriptor, 0, os.SEEK_END)
        os.lseek(descriptor, 0, os.SEEK_SET)
        *before, last = os.read(descriptor, end).split(b"\n")
        if line.rstrip() not in (*before, last):
            add(descriptor, b"\n" + line if last else line, path, sync=True)
    finally:
        os.close(descriptor)


def read(path: str | Path) -> list[Result]:
    """Return the results in the file at `path`, in the file's order; skip incomplete lines with a warning."""
    results: list[Result] = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            results.append(Result.from_json(line.decode()))
        except ValueError as error:
            start = line[:40].decode(errors="replace")
            message = f"{path}, line {number} is torn or not a Result and was left out: {start!r}... ({error})"
            warnings.warn(message, stacklevel=2)
    return results
