"""A search by Optuna: its study is a folder, survives kills, and is shared by all processes with the same command."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any
from uuid import uuid4

import optuna
from filelock import FileLock
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig, OmegaConf, open_dict
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from ..files import try_lock, unlock
from ..runs.defaults_by_data import suited
from ..runs.folder import LOCK, SWEEP
from ..runs.pruning import PrunedError, pruned_by
from ..settings.errors import message
from ..settings.factory import Factory
from ..settings.hashing import config_hash
from ..settings.overrides import names_of, translated
from ..settings.settings import Settings
from .job import DivergedError
from .ranking import BestSettings, Setting

TRIALS = "trials.log"  # in the folder of a study: all changes of its trials, one in a line
WORKER, SETTING, ERROR = "worker", "setting", "error"  # attributes of a trial

ENDED = (PrunedError, DivergedError)  # errors of trainings that ended early, whose trials count as pruned
Space = Mapping[str, BaseDistribution]


def distribution(override: Override) -> BaseDistribution:
    """Return Optuna's distribution of a setting with several values.

    >>> parser = OverridesParser.create()
    >>> distribution(parser.parse_override("training.lr=tag(log,interval(0.001,0.1))"))
    FloatDistribution(high=0.1, log=True, low=0.001, step=None)
    """
    value: Any = override.value()
    if override.is_interval_sweep():
        is_whole = isinstance(value.start, int) and isinstance(value.end, int)
        return (IntDistribution if is_whole else FloatDistribution)(value.start, value.end, log="log" in value.tags)
    if override.is_range_sweep() and isinstance(values := value.range(), range) and len(values):
        return IntDistribution(min(values), max(values), step=abs(values.step))
    return CategoricalDistribution(list(override.sweep_string_iterator()))


def values_of(name: str, distribution: BaseDistribution) -> Sequence[Any]:
    """Return the values of a setting.

    Raises:
        ValueError: if they are an interval.
    """
    if isinstance(distribution, CategoricalDistribution):
        return tuple(distribution.choices)
    if isinstance(distribution, IntDistribution):
        return range(distribution.low, distribution.high + 1, distribution.step or 1)
    raise ValueError(
        f"{name} has an interval of values, but the search goes through lists of them. Pass a list, or a number as "
        "hydra.sweeper.n_trials and hydra.sweeper.sampler._target_=optuna.samplers.TPESampler."
    )


class InOrder(optuna.samplers.BaseSampler):
    """Sampler that goes through all combinations of values; those of the first setting change fastest.

    Trials one after the other then differ in the first settings alone, and can be trained as one model if these are
    numbers. The combinations follow from the numbers of the trials, so kills and other processes do not change them.

    Example:
        >>> study, lists = optuna.create_study(sampler=InOrder()), {"lr": [0.1, 0.01], "norm": ["batch", "layer"]}
        >>> [study.ask({name: CategoricalDistribution(lists[name]) for name in lists}).params for _ in range(3)]
        [{'lr': 0.1, 'norm': 'batch'}, {'lr': 0.01, 'norm': 'batch'}, {'lr': 0.1, 'norm': 'layer'}]
    """

    def infer_relative_search_space(self, study: Any, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return no settings: each value follows from the number of the trial."""
        return {}

    def sample_relative(self, study: Any, trial: FrozenTrial, search_space: Any) -> dict[str, Any]:
        """Return no values, as `infer_relative_search_space` has no settings."""
        return {}

    def sample_independent(
        self, study: Any, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Return the value of a setting; those that the trial already has change faster."""
        values = values_of(param_name, param_distribution)
        faster = math.prod(len(values_of(name, each)) for name, each in trial.distributions.items())
        return values[trial.number // faster % len(values)]


@dataclass
class Search:
    """A search: its arguments are the settings of `hydra/sweeper=study`."""

    n_trials: int | None
    n_jobs: int
    sampler: Mapping[str, Any]
    pruner: Mapping[str, Any]
    report_every: int
    storage: str | None
    params: Mapping[str, Any]

    def run(self, arguments: Sequence[str], config: DictConfig, context: Any, launcher: Any) -> None:
        """Train trials until the study has `n_trials`, and pass all of them to the callback `BestSettings`."""
        params = [f"{name}={values}" for name, values in self.params.items() if name not in names_of(arguments)]
        parsed = OverridesParser.create(context.config_loader).parse_overrides([*translated(params), *arguments])
        space = {each.get_key_element(): distribution(each) for each in parsed if each.is_sweep_override()}
        fixed = [str(each.input_line) for each in parsed if each.get_key_element() not in space]
        sweep = Path(config.hydra.sweep.dir)
        sweep.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(config, sweep / SWEEP)
        folder = self._folder(config, context.config_loader, fixed, space)
        with Worker.in_folder(folder, Factory("hydra.sweeper.pruner", self.pruner)()) as worker:
            self._train(worker, fixed, space, launcher)
        settings = [
            Setting(**trial.user_attrs[SETTING]) for trial in worker.study.trials if SETTING in trial.user_attrs
        ]
        for callback in context.callbacks.callbacks:
            if isinstance(callback, BestSettings):
                callback.settings = settings

    def _folder(self, config: DictConfig, loader: Any, fixed: Sequence[str], space: Space) -> Path:
        """Return the folder of the study, by default named by everything that determines the values of its trials."""
        if self.storage is not None:
            return Path(self.storage)
        ranges: Mapping[str, Any] = space
        lowest = {name: (getattr(each, "choices", None) or [each.low])[0] for name, each in ranges.items()}
        example = loader.load_sweep_config(config, [*fixed, *_overrides(lowest, space)])
        with open_dict(example):
            del example["hydra"]
        settings = suited(Settings.parse(example), fixed)
        others = {
            "data": settings.data_hash,
            "seed": settings.seed,
            "runs": settings.runs,
            "space": repr(sorted(space.items())),
        }
        return Path(settings.outputs) / f"study-{config_hash({**settings.hashed(), **others})}"

    def total(self, space: Space) -> int:
        """Return the number of trials in total: `n_trials`, else that of all combinations of values."""
        if self.n_trials is not None:
            return self.n_trials
        return math.prod(len(values_of(name, each)) for name, each in space.items())

    def new_sampler(self, number: int) -> Any:
        """Return the sampler for the trial of this number, whose proposals avoid those that are being trained."""
        factory = Factory("hydra.sweeper.sampler", self.sampler)
        others = {
            "seed": (self.sampler.get("seed") or 0) + number,
            "constant_liar": self.sampler.get("constant_liar", True),
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return factory(**{name: others[name] for name in others if name in signature(factory.locate()).parameters})

    def _train(self, worker: Worker, fixed: Sequence[str], space: Space, launcher: Any) -> None:
        index = 0
        while (taken := worker.take(self, space))[0]:
            trials, resumed = taken
            last = ["ckpt_path=last"] if resumed and "ckpt_path" not in names_of(fixed) else []
            known = {_overrides(trial.params, space): trial.value for trial in worker.trials(TrialState.COMPLETE)}
            jobs: dict[tuple[str, ...], list[Trial]] = {}
            for trial in trials:
                if (overrides := _overrides(trial.params, space)) in known:
                    worker.study.tell(trial, known[overrides])
                else:
                    jobs.setdefault((*fixed, *last, *overrides), []).append(trial)
            if not jobs:
                continue
            judge = Judge([same[0] for same in jobs.values()], index, self.report_every)
            with nullcontext() if isinstance(worker.study.pruner, optuna.pruners.NopPruner) else pruned_by(judge):
                returns = launcher.launch([*jobs], initial_job_idx=index)
            index += len(jobs)
            values = [job._return_value for job in returns]
            errors = [value for value in values if isinstance(value, Exception) and not isinstance(value, ENDED)]
            for error in errors:
                if isinstance(error, OSError):  # such as a full disk: the same command tries these trials again
                    raise error
            for same, job in zip(jobs.values(), returns, strict=True):
                worker.tell(same, job)
            if number := sum(isinstance(value, PrunedError) for value in values):
                print(f"{number} of {len(jobs)} trainings were pruned", flush=True)
            unknown = [error for error in errors if message(error) is None]
            if len(errors) == len(jobs) and (unknown or not worker.trials(TrialState.COMPLETE)):
                raise errors[0]


@dataclass
class Worker:
    """A process of a search. Its name is in the trials that it trains; it holds a lock of this name until it ends."""

    study: optuna.Study
    folder: Path
    lock: FileLock  # held while trials are taken or the file is written
    name: str

    @classmethod
    @contextmanager
    def in_folder(cls, folder: Path, pruner: optuna.pruners.BasePruner) -> Iterator[Worker]:
        """Context manager: a process that takes part in the study in a folder, which it creates if there is none."""
        folder.mkdir(parents=True, exist_ok=True)
        lock: Any = FileLock(folder / LOCK)  # which the system releases when a process is killed
        name = uuid4().hex
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with lock:
            _repair(folder / TRIALS)
            storage: Any = JournalStorage(JournalFileBackend(str(folder / TRIALS), lock_obj=lock))
            study = optuna.create_study(
                study_name=folder.name, storage=storage, pruner=pruner, direction="maximize", load_if_exists=True
            )
            held = try_lock(folder / f"{name}{LOCK}")
        assert held is not None  # no other process has this name
        try:
            yield cls(study, folder, lock, name)
        finally:
            unlock(folder / f"{name}{LOCK}", held)

    def trials(self, state: TrialState) -> list[FrozenTrial]:
        """Return the trials in this state."""
        trials: list[FrozenTrial] = self.study.get_trials(deepcopy=False, states=(state,))
        return trials

    def take(self, search: Search, space: Space) -> tuple[list[Trial], bool]:
        """Return the next trials to train, at most `n_jobs`, and whether a process that was killed has left them.

        The sampler of each trial has the seed `sampler.seed` plus its number, so that kills change no proposals.
        """
        with self.lock:
            running = self.trials(TrialState.RUNNING)
            owners = dict.fromkeys(trial.user_attrs.get(WORKER) for trial in running)
            dead = [owner for owner in owners if self._is_dead(owner)][:1]
            ids = [(trial.number, trial._trial_id) for trial in running if trial.user_attrs.get(WORKER) in dead]
            left, count = dict(ids[: search.n_jobs]), len(self.study.trials)
            trials, total = [], search.total(space)
            for number in left or range(count, min(count + search.n_jobs, total)):
                self.study.sampler = search.new_sampler(number)
                trial = Trial(self.study, left[number]) if left else self.study.ask()
                for name, values in space.items():
                    trial._suggest(name, values)
                trial.set_user_attr(WORKER, self.name)
                trials.append(trial)
        if trials:
            first, last = trials[0].number + 1, trials[-1].number + 1
            numbers = f"Trial {last}" if first == last else f"Trials {first} to {last}"
            print(f"{numbers} of {total}{', of a process that was killed' if left else ''}", flush=True)
        return trials, bool(left)

    def _is_dead(self, name: str | None) -> bool:
        """Return True if the process of this name has ended; a trial without one was left while it was proposed."""
        if name is None:
            return True
        lock = try_lock(path := self.folder / f"{name}{LOCK}")
        if lock is not None:
            unlock(path, lock)
        return lock is not None

    def tell(self, trials: Iterable[Trial], job: JobReturn) -> None:
        """Write what a job returned into the study, for all trials with its settings."""
        setting, value = Setting.of(job), job._return_value
        for trial in trials:
            if setting is not None:
                trial.set_user_attr(SETTING, setting._asdict())
            if job.status == JobStatus.FAILED:
                text, ended = message(value) or repr(value), isinstance(value, ENDED)
                if not ended:
                    print(f"Trial {trial.number + 1} failed: {text}", flush=True)
                trial.set_user_attr(ERROR, text)
                self.study.tell(trial, state=TrialState.PRUNED if ended else TrialState.FAIL)
            else:
                self.study.tell(trial, value)


class Judge:
    """Reports the scores of trials to the study, whose pruner compares them."""

    def __init__(self, trials: Sequence[Trial], first: int, every: int) -> None:
        self.trials, self.first, self.every = trials, first, every
        studied = trials[0].study.get_trials(deepcopy=False)
        self.reported = [{*studied[trial.number].intermediate_values} for trial in trials]  # before a kill

    def __call__(self, job: int, epoch: int, quality: float) -> bool:
        """Report the score of a job every few epochs; return True if its training is to end."""
        if epoch % self.every:
            return False
        trial, reported = self.trials[job - self.first], self.reported[job - self.first]
        if epoch not in reported and math.isfinite(quality):
            trial.report(quality, epoch)
        ends: bool = trial.should_prune()
        return ends


def _overrides(values: Mapping[str, Any], space: Space) -> tuple[str, ...]:
    return tuple(f"{name}={values.get(name)}" for name in space)


def _repair(path: Path) -> None:
    """Remove an incomplete last line, of a process that was killed as it wrote.

    Raises:
        ValueError: if another line is damaged.
    """
    content = path.read_bytes() if path.is_file() else b""
    *lines, torn = content.split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            json.loads(line)["op_code"]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{path} is damaged in line {number}: {line[:40].decode(errors='replace')!r} is no change of a trial. "
                f"Keep the lines above it, by `head -n {number - 1}`; the same command trains the later trials again."
            ) from error
    if torn:
        os.truncate(path, len(content) - len(torn))
