"""The best settings by validation, how sure their order is, and the commands that train and compare them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback

from ..runs.defaults_by_data import suited
from ..runs.folder import command_in, relative_path
from ..runs.groups import Line, Runs, gathered, lines_of, ranked
from ..runs.result import Result, read
from ..runs.significance import Significance, t_test
from ..runs.warm_start import with_earlier_model
from ..settings.overrides import names_of, quoted, typed
from ..settings.rules import similar
from ..settings.settings import Settings
from ..tasks.metrics import metric_named

SHOWN = 5  # settings in the message
COMPARED = 3  # at least, by the command with other seeds
SEEDS = 10  # of that command
LEVEL = 0.05  # p-values below it distinguish two settings
REPEATED = frozenset({"seed", "runs", "ckpt_path"})  # settings of a command that do not distinguish two settings


class Best(NamedTuple):
    """The settings with the best mean validation score on a data set, and the second best."""

    runs: Runs
    second: Runs | None
    difference: Significance  # of the two validation scores
    num_settings: int
    left_out: int  # lines with another metric, split or content of the data
    command: str | None  # that trained them; None if it was not by the command, or their folder is not on disk any more
    folder: Path

    def __str__(self) -> str:
        first = self.runs.lines[0].result
        title, n = metric_named(first.metric).title, self.num_settings
        which = "the only settings" if n == 1 else f"{n} settings, the best by validation {title}"
        lines = {"data set": f"{first.dataset}: {which}"}
        lines["best"] = f"{self.runs.method}, validation {_score(self.runs, 'val')}, test {_score(self.runs, 'value')}"
        if self.second is not None:
            lines["next"] = f"{self.second.method}, validation {_score(self.second, 'val')}; {self._sure()}"
        if self.left_out:
            lines["left out"] = f"{self.left_out} runs with another metric, split or content of the data"
        lines["command"] = self.command or f"unknown: the settings were in {relative_path(self.folder)}/config.yaml"
        lines["folder"] = relative_path(self.folder)
        return "\n".join(f"{key:<12}{value}" for key, value in lines.items())

    def _sure(self) -> str:
        p, name = self.difference
        if math.isnan(p):
            return f"{name}: train both with runs=5 to see whether they differ"
        text = "p < 0.0001" if p < 1e-4 else f"p = {p:.2g}"
        return f"{text} ({name})" + ("" if p < LEVEL else ": they may well be equal")


def best(dataset: str, results: str | Path = "outputs/results.jsonl", metric: str | None = None) -> Best:
    """Return the settings that validation prefers among the runs on a data set, never by their test scores.

    The best is the highest mean validation score over seeds and splits, or the lowest where lower is better. Compared
    are the runs with the metric, split and content of the data of the newest one. How sure the order of the two best is
    follows from a t-test of their validation scores (`gat_pyg.runs.significance.t_test`); it does not correct for the
    number of settings that were tried.

    Args:
        dataset: its name in the results.
        results: the file of results.
        metric: metric of the runs to compare; by default the newest run's.

    Raises:
        FileNotFoundError, ValueError: if there is no such file, or no run on the data set or with the metric.

    >>> best("cora", "nowhere.jsonl")
    Traceback (most recent call last):
    FileNotFoundError: nowhere.jsonl does not exist. Give the results.jsonl that a run appended to, ...
    """
    lines = lines_of(results)
    its = [line for line in lines if line.result.dataset == dataset]
    if not its:
        names = sorted({line.result.dataset for line in lines})
        raise ValueError(f"{results} has no run on {dataset}.{similar(dataset, names)}")
    of_metric = [line for line in its if metric in (None, line.result.metric)]
    if not of_metric:
        names = sorted({line.result.metric for line in its})
        raise ValueError(f"{results} has no run on {dataset} with metric={metric}, expected {' or '.join(names)}.")
    newest = max(of_metric, key=lambda line: line.result.timestamp).result
    same = [line for line in of_metric if (line.result.metric, line.result.data) == (newest.metric, newest.data)]
    groups = [runs for groups in gathered(same).values() for runs in groups]
    first, *others = ranked(groups)
    second = others[0] if others else None
    difference = Significance(math.nan, "") if second is None else t_test(first.vals, second.vals)
    folders = [Path(line.result.run_dir) for line in first.lines]
    folder = Path(os.path.commonpath([path.absolute() for path in folders]))
    return Best(first, second, difference, len(groups), len(its) - len(same), command_in(folders[0]), folder)


def _score(runs: Runs, key: Literal["value", "val"]) -> str:
    """Return the mean ± std of a score."""
    scores = runs.values if key == "value" else [*runs.vals.values()]
    text = metric_named(runs.lines[0].result.metric).text(*scores)
    return text if len(scores) == 1 else f"{text} ({len(scores)} runs)"


# The end of a sweep ---------------------------------------------------------------------------------------------------


class Setting(NamedTuple):
    """The settings of a job of a sweep: its overrides, and what finds its lines in `results`."""

    overrides: Sequence[str]
    model: str  # the choices of model and dataset
    dataset: str
    config_hash: str
    data: str
    results: str

    @classmethod
    def of(cls, job: JobReturn) -> Setting | None:
        """Return the settings of a job; None for a table, or if the job failed."""
        if job.status == JobStatus.FAILED:
            return None
        config, hydra_config = cast(Any, job.cfg), cast(Any, job.hydra_cfg)
        settings, hydra = Settings.parse(config), hydra_config.hydra
        if settings.is_table:
            return None
        settings = with_earlier_model(suited(settings, hydra.overrides.task), names_of(hydra.overrides.task))
        choices, overrides = hydra.runtime.choices, typed(hydra.overrides.task, hydra.runtime.choices.recipe)
        return cls(
            overrides, choices.model, choices.dataset, settings.hash, settings.data_hash, str(Path(settings.results))
        )


class BestSettings(Callback):
    """Callback of Hydra that prints the best settings at the end of a multirun, for every sweeper and launcher."""

    def __init__(self) -> None:
        self.settings: list[Setting] = []

    def on_job_end(self, config: Any, job_return: JobReturn, **kwargs: Any) -> None:
        """Keep the settings of a job."""
        self.settings += filter(None, [Setting.of(job_return)])

    def on_multirun_end(self, config: Any, **kwargs: Any) -> None:
        """Print the best settings."""
        print(best_settings(self.settings), end="", flush=True)


class Candidate(NamedTuple):
    """Settings with their runs."""

    setting: Setting
    runs: Runs


def best_settings(settings: Iterable[Setting]) -> str:
    """Return the best settings of each data set, "" for those with a single one."""
    by_data: dict[tuple[str, ...], dict[str, Setting]] = {}
    for setting in settings:
        by_data.setdefault((setting.results, setting.dataset, setting.data), {})[setting.config_hash] = setting
    files = {path: read(path) if Path(path).is_file() else [] for path, *_ in by_data}
    return "".join(_ranked(by_hash, files[path]) for (path, _, _), by_hash in by_data.items() if len(by_hash) > 1)


def _ranked(by_hash: dict[str, Setting], results: Sequence[Result]) -> str:
    its = [one for one in results if one.config_hash in by_hash and one.data == by_hash[one.config_hash].data]
    groups = gathered(Line(result, "", 0) for result in its)
    candidates = [Candidate(by_hash[runs.setting], runs) for runs in ranked(chain.from_iterable(groups.values()))]
    if len(candidates) < 2 or len({key.metric for key in groups}) > 1:
        return ""
    best, *others = candidates
    common = {*best.setting.overrides}.intersection(*(candidate.setting.overrides for candidate in others))

    def changes(candidate: Candidate) -> list[str]:
        return [text for text in candidate.setting.overrides if text not in common and not names_of([text]) & REPEATED]

    metric, runs = metric_named(its[0].metric), len(best.runs.lines)
    title = f"\n{len(candidates)} settings of {its[0].dataset}, the best first by validation {metric.title}"
    lines = [f"{title}{'' if runs == 1 else f', mean ± std over {runs} runs'}:"]
    lines += [f"  {metric.value(*one.runs.vals.values()):<14}{' '.join(changes(one))}" for one in candidates[:SHOWN]]
    lines += ["  ..."] * (len(candidates) > SHOWN)
    equal = [other for other in others if not t_test(best.runs.vals, other.runs.vals).p < LEVEL]
    if runs == 1:
        lines.append("One run of each does not show whether close scores differ by the settings or by chance.")
    else:
        worse = f"{len(others) - len(equal)} of the other {len(others)}"
        lines.append(f"Significantly worse: {worse} (p < {LEVEL}, t-tests of the validation scores).")
    if equal and "from" not in names_of(best.setting.overrides):  # which a table of methods refuses
        compared = [best, *equal][: COMPARED if runs == 1 else SHOWN]
        lines += [f"To compare {len(compared)} of them by other seeds:", f"  {_comparison(compared, changes)}"]
    lines += [
        f"The best has test {metric.title} {metric.value(*best.runs.values)}. To train it:",
        f"  {_command(best)}",
    ]
    return "\n".join(lines) + "\n"


def _command(candidate: Candidate) -> str:
    """Return the command that trains the settings, with the seeds of the sweep."""
    overrides = [text for text in candidate.setting.overrides if not names_of([text]) & {"ckpt_path"}]
    return " ".join(["gat-pyg", *map(quoted, overrides)])


def _comparison(candidates: Sequence[Candidate], changes: Callable[[Candidate], Sequence[str]]) -> str:
    """Return the command that trains several settings as a table, with seeds that the sweep did not use."""
    best, methods = candidates[0], []
    for candidate in candidates:
        others = [text for text in changes(candidate) if not names_of([text]) & {"model"}]
        methods.append("'" + " ".join([candidate.setting.model, *others]).replace("'", "\\'") + "'")
    different = {text for candidate in candidates for text in changes(candidate)}
    common = [text for text in best.setting.overrides if not names_of([text]) & {*REPEATED, "model", "dataset"}]
    table = [f"methods=[{','.join(methods)}]", f"datasets=[{best.setting.dataset}]"]
    seed = 1 + max(line.result.seed for candidate in candidates for line in candidate.runs.lines)
    overrides = [*table, *(text for text in common if text not in different), f"seed={seed}", f"runs={SEEDS}"]
    return " ".join(["gat-pyg", *map(quoted, overrides)])
