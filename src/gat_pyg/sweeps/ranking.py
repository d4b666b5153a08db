"""The end of a sweep: the best settings, how sure their order is, and the commands that train and compare them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback

from ..runs.defaults_by_data import suited
from ..runs.result import Result, read
from ..runs.warm_start import with_earlier_model
from ..settings.overrides import ADDED, names_of, quoted, without_recipes
from ..settings.settings import Settings
from ..tasks.metrics import metric_named

SHOWN = 5  # settings in the message
COMPARED = 3  # at least, by the command with other seeds
SEEDS = 10  # of that command
REPEATED = frozenset({"seed", "runs", "ckpt_path"})  # settings of a command that do not distinguish two settings


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
        overrides = [_as_typed(text) for text in hydra.overrides.task if not text.startswith("~recipe")]
        if without_recipes(overrides) == overrides:  # the user removed the recipes
            overrides = [_as_typed(text) for text in hydra.overrides.task]
        choices = hydra.runtime.choices
        overrides = [f"recipe={choices.recipe}" if text.startswith("search=") else text for text in overrides]
        return cls(
            overrides, choices.model, choices.dataset, settings.hash, settings.data_hash, str(Path(settings.results))
        )


def _as_typed(override: str) -> str:
    """Return an override as a user writes it: the command adds the ++ of a model's settings itself."""
    return override.removeprefix("++") if override.startswith(tuple(f"++{group}" for group in ADDED)) else override


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
    """Settings with the results of their runs."""

    setting: Setting
    results: Sequence[Result]

    @property
    def quality(self) -> float:
        """The mean `Result.quality`."""
        return statistics.fmean(result.quality for result in self.results)

    @property
    def error(self) -> float:
        """The standard error of the mean; NaN for one run."""
        scores = [result.val for result in self.results]
        return statistics.stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else math.nan

    def score(self, name: str) -> str:
        """Return `val` or `value` with its unit, of several runs as mean ± std."""
        return metric_named(self.results[0].metric).value(*(getattr(result, name) for result in self.results))


def best_settings(settings: Iterable[Setting]) -> str:
    """Return the best settings of each data set, "" for those with a single one."""
    by_data: dict[tuple[str, ...], dict[str, Setting]] = {}
    for setting in settings:
        by_data.setdefault((setting.results, setting.dataset, setting.data), {})[setting.config_hash] = setting
    files = {path: read(path) if Path(path).is_file() else [] for path, *_ in by_data}
    return "".join(_ranked(by_hash, files[path]) for (path, _, _), by_hash in by_data.items() if len(by_hash) > 1)


def _ranked(by_hash: dict[str, Setting], results: Sequence[Result]) -> str:
    runs_of: dict[str, dict[tuple[int, int], Result]] = {}
    for result in results:  # of several runs of one seed, the last
        if result.config_hash in by_hash and result.data == by_hash[result.config_hash].data:
            runs_of.setdefault(result.config_hash, {})[result.split, result.seed] = result
    candidates = [Candidate(by_hash[key], [*runs.values()]) for key, runs in runs_of.items()]
    candidates = sorted(candidates, key=lambda candidate: -candidate.quality)
    if len(candidates) < 2 or len({candidate.results[0].metric for candidate in candidates}) > 1:
        return ""
    best, *others = candidates
    common = {*best.setting.overrides}.intersection(*(candidate.setting.overrides for candidate in others))

    def changes(candidate: Candidate) -> list[str]:
        return [text for text in candidate.setting.overrides if text not in common and not names_of([text]) & REPEATED]

    metric, runs = metric_named(best.results[0].metric), len(best.results)
    title = f"\n{len(candidates)} settings of {best.results[0].dataset}, the best first by validation {metric.title}"
    lines = [f"{title}{'' if runs == 1 else f', mean ± std over {runs} runs'}:"]
    lines += [f"  {candidate.score('val'):<14}{' '.join(changes(candidate))}" for candidate in candidates[:SHOWN]]
    lines += ["  ..."] * (len(candidates) > SHOWN)
    equal = [candidate for candidate in others if not best.quality - candidate.quality > best.error]
    if runs == 1:
        lines.append("One run of each does not show whether close scores differ by the settings or by chance.")
    else:
        number = {0: "No other is", 1: "One other is"}.get(len(equal), f"{len(equal)} others are")
        lines.append(f"{number} within one standard error of the best, {metric.value(best.error)}.")
    if equal and "from" not in names_of(best.setting.overrides):  # which a table of methods refuses
        compared = [best, *equal][: COMPARED if runs == 1 else SHOWN]
        lines += [f"To compare {len(compared)} of them by other seeds:", f"  {_comparison(compared, changes)}"]
    lines += [f"The best has test {metric.title} {best.score('value')}. To train it:", f"  {_command(best)}"]
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
    seed = 1 + max(result.seed for candidate in candidates for result in candidate.results)
    overrides = [*table, *(text for text in common if text not in different), f"seed={seed}", f"runs={SEEDS}"]
    return " ".join(["gat-pyg", *map(quoted, overrides)])
