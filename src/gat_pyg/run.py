"""The command: compose the settings, then one job in a folder of its own, or all those of a table."""

from __future__ import annotations

import difflib
import math
import os

# Threads that wait for others leave their cores to those that work, rather than spin: beside other busy processes an
# epoch is several times faster, and torch's threads no longer take cores from the kernels'. OpenMP reads this when
# torch is imported; what the user has set stays.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast, get_args

import hydra
from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from hydra.utils import get_object
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from . import on_ray
from .build import RAY, check_gpus, dataset_name
from .data import name_of
from .folders import (
    LOCK,
    changes,
    complete,
    drop_empty,
    finished,
    from_here,
    held,
    over,
    plain,
    remove_checkpoints,
    run_folder,
    seed_folder,
    settings_in,
    settings_of,
)
from .jobs import HOW, VECTORIZE, all_runs, end, keep_memory
from .ranks import say
from .results import CONFIG, FULL, RESULT, full, try_lock, write_whole
from .training import Criterion, handled

FULL_ERROR = "GAT_PYG_FULL_ERROR"  # and what HYDRA_FULL_ERROR was before it was set here


class Rule(NamedTuple):
    """The values that a setting may have."""

    expected: str
    fits: Callable[[Any], bool]


def _whole(least: int, *others: Any) -> Rule:
    words = "".join(f"{_word(other)} or " for other in others)
    return Rule(
        f"{words}a whole number, at least {least}",
        lambda value: (type(value) is int and value >= least) or _is_one_of(value, others),
    )


def _number(expected: str, fits: Callable[[float], bool]) -> Rule:
    return Rule(expected, lambda value: type(value) in (int, float) and fits(value))


def _choice(*values: Any) -> Rule:
    *first, last = map(_word, values)
    return Rule(f"{', '.join(first)} or {last}" if first else last, lambda value: _is_one_of(value, values))


def _text(expected: str, *others: Any) -> Rule:
    return Rule(expected, lambda value: (isinstance(value, str) and value != "") or _is_one_of(value, others))


def _list(expected: str, fits: Callable[[Any], bool], *others: Any) -> Rule:
    def fits_all(value: Any) -> bool:
        return isinstance(value, ListConfig) and len(value) > 0 and all(map(fits, value))

    return Rule(expected, lambda value: fits_all(value) or _is_one_of(value, others))


def _is_one_of(value: Any, values: Iterable[Any]) -> bool:
    return any(type(value) is type(one) and value == one for one in values)  # 1 == True


def _word(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_method(value: Any) -> bool:
    return _is_name(value) or (isinstance(value, ListConfig) and len(value) > 0 and all(map(_is_name, value)))


_POSITIVE = _number("a number above 0", lambda value: value > 0)
_FINITE = _number("a finite number, at least 0", lambda value: 0 <= value < math.inf)
_SECONDS = _number("a number of seconds, at least 0", lambda value: value >= 0)
GROUPS = ("dataset", "model", "loader", "trainer", "logger", "training", "split")
RULES = {  # every setting outside of the groups whose keys are the arguments of a class or function
    "seed": _whole(0),
    "runs": _whole(1),
    "vectorize": Rule("auto, on or off", lambda value: _is_one_of(value, VECTORIZE)),
    "seeds_per_pass": _whole(1, "auto"),
    "methods": Rule(
        "null or a list such as [gat,gcn], where a method with settings is a list too",
        lambda value: value is None or _is_name(value) or _list("", _is_method).fits(value),
    ),
    "datasets": Rule(
        "null or a list such as [cora,citeseer]",
        lambda value: value is None or _is_name(value) or _list("", _is_name).fits(value),
    ),
    "ckpt_path": _text("null, last or the path of a checkpoint", None),
    "checkpoint_every": _SECONDS,
    "data_root": _text("null or the path of a folder, such as data or ./1", None),
    "outputs": _text("the path of a folder, such as outputs or ./1"),
    "results": _text("the path of a file, such as results.jsonl or ./1"),
    "training.lr": _FINITE,
    "training.weight_decay": _FINITE,
    "training.batch_size": _whole(1),
    "training.patience": _whole(1),
    "training.criterion": Rule(
        "both, accuracy (or micro-F1) or loss", lambda value: _is_one_of(value, get_args(Criterion))
    ),
    "training.max_epochs": _whole(1),
    **{f"training.{key}": _choice(*values) for key, values in HOW.items()},
    "split.per_class": _whole(0),
    "split.val": _whole(0),
    "split.test": _whole(0),
    "split.seed": _whole(0),
    "split.split": _whole(0),
    "trainer.max_epochs": _whole(1),
}
OPTIONAL_RULES = {  # of those that are there
    "loader.num_neighbors": _list(
        "null or a list of whole numbers, one for each hop: at least 1, or -1 for all neighbours",
        lambda value: type(value) is int and (value >= 1 or value == -1),
        None,
    ),
    "loader.num_parts": _whole(1),
    "loader.batch_size": _whole(1),
    "loader.num_workers": _whole(0),
    "trainer.devices": Rule(
        "auto, a number of devices, at least 1, or a list of their indices",
        lambda value: (
            (_is_name(value) or value == -1 or _whole(1).fits(value))
            or _list("", lambda index: type(index) is int and index >= 0).fits(value)
        ),
    ),
    "trainer.deterministic": _choice(None, True, False, "warn"),
    "trainer.limit_train_batches": _POSITIVE,
    "trainer.limit_val_batches": _POSITIVE,
    "trainer.limit_test_batches": _POSITIVE,
    "trainer.fast_dev_run": _choice(False),
}


def main() -> None:
    """The console script ``gat-pyg``: errors are printed as a message, and the exit status is 1.

    SIGINT (Ctrl-C) and SIGTERM end it with 128 + their number, in a training after the epoch and its checkpoint.
    """
    if "--version" in sys.argv[1:]:
        print(f"gat_pyg {get_object('gat_pyg.__version__')}")
        return
    sys.argv[1:] = for_what_runs(sys.argv[1:])
    given = os.environ.get("HYDRA_FULL_ERROR")
    os.environ.setdefault(FULL_ERROR, given or "0")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands errors on; here they are told in our own way
    keep_memory()
    try:
        with handled(end):
            hydra.main(version_base="1.3", config_path=str(config_folder()), config_name="config")(_job)()
    except Exception as error:
        _exit(error, _misused_group(sys.argv[1:]) or _message(error))
    finally:
        os.environ.pop(FULL_ERROR)
        os.environ.pop("HYDRA_FULL_ERROR")
        if given is not None:
            os.environ["HYDRA_FULL_ERROR"] = given


def _job(config: DictConfig) -> float:
    """``job``, but an error of a single run exits here: Hydra would print the command's arguments before it."""
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        return job(config)
    try:
        return job(config)
    except Exception as error:
        _exit(error, _message(error))


def _exit(error: Exception, message: str | None) -> NoReturn:
    """Print the message, or the traceback where there is none or ``HYDRA_FULL_ERROR=1`` asks for it."""
    if message is None or os.environ[FULL_ERROR] == "1":
        traceback.print_exception(error)
    else:
        print(f"gat-pyg: {message}\n(HYDRA_FULL_ERROR=1 shows where.)", file=sys.stderr)
    sys.exit(1)


def for_what_runs(arguments: Sequence[str]) -> list[str]:
    """Drop what belongs to a named model and a named data set where another class takes the place of either.

    Those are the pair's numbers (``experiment/numbers``) and the model's ``method``: Hydra chooses them by the two
    names, which a setting such as ``dataset._target_`` leaves as they are.

    >>> for_what_runs(["model=gat", "dataset._target_=torch_geometric.datasets.KarateClub"])
    ['model=gat', '~experiment/numbers', 'dataset._target_=torch_geometric.datasets.KarateClub']
    """
    keys = [argument.lstrip("+~").partition("=")[0] for argument in arguments]
    first = next((at for at, key in enumerate(keys) if key in REPLACES), None)
    if first is None or "experiment/numbers" in keys:
        return list(arguments)
    method = ["++model.method=null"] if "model._target_" in keys and "model.method" not in keys else []
    return [*arguments[:first], "~experiment/numbers", *method, *arguments[first:]]


REPLACES = ("dataset._target_", "dataset.name", "model._target_")


def run_name(_root_: DictConfig) -> str:
    """Return the part of a run folder's name that follows the time: the model, the data set, and how it attends.

    ``_root_`` is the composed configuration, with Hydra's own. The model is named as in ``conf/model``, or after its
    class where ``model._target_`` is replaced.
    """
    choices = _root_.hydra.runtime.choices
    overrides = (override.lstrip("+").partition("=") for override in _root_.hydra.overrides.task)
    values: dict[str, str] = {key: value for key, _, value in overrides}
    model = choices.model
    if target := values.get("model._target_"):
        package, *_, kind = target.split(".")
        model = name_of("pyg" if package == "torch_geometric" else "", kind)
    mechanism = values.get("model.mechanism._target_", values.get("model.mechanism", ""))
    words = [
        model,
        dataset_name(_root_.dataset),
        choices.loader if choices.loader != "full" else "",
        name_of(mechanism.rpartition(".")[2]),
        "reproduction" if values.get("model.reproduction", "false") != "false" else "",
    ]
    return "_".join(word for word in words if word)


OmegaConf.register_new_resolver("run_name", run_name, replace=True)  # of hydra.run.dir


def config_folder() -> Path:
    """The folder of the settings: inside the installed package, else the repository's own."""
    here = Path(__file__).resolve()
    for folder in (here.parent / "conf", here.parents[2] / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise FileNotFoundError(f"There is no conf/config.yaml beside {here} or in its repository. Install gat_pyg anew.")


def job(config: DictConfig) -> float:
    """All methods of a table, or one with the seeds ``seed``, ``seed + 1``, ...; its mean validation score."""
    own_folder = Path(HydraConfig.get().runtime.output_dir)
    try:
        _check(config)
    except Exception:
        drop_empty(own_folder)
        if config.outputs is None:
            drop_empty(Path(str(config.outputs)))  # which Hydra made
        raise
    if config.methods is not None or config.datasets is not None:
        drop_empty(own_folder)
        return table(config)
    with run_folder(config) as folder:
        return by_ray(config, folder) if config.trainer.get("strategy") == RAY else all_runs(config, folder)


def by_ray(config: DictConfig, folder: Path) -> float:
    """The same in processes that Ray starts."""
    devices = config.trainer.devices
    if type(devices) is not int or devices < 1:
        raise ValueError(f"trainer.devices is {devices}, expected how many processes Ray is to start, at least 1.")
    given = {"config": OmegaConf.to_container(config, resolve=True), "folder": str(folder), "place": os.getcwd()}
    work = get_object("gat_pyg.run.ray_process")  # by a name that they can import, whatever this file is called here
    return float(on_ray.train(work, given, devices, config.trainer.accelerator == "gpu", folder))


def ray_process(given: Mapping[str, Any]) -> float:
    """One of the processes that Ray starts; an error that is told in words is a ValueError of these."""
    os.chdir(given["place"])
    keep_memory()
    cast(Any, rank_zero_only).rank = int(os.environ["RANK"])
    try:
        return all_runs(cast(DictConfig, OmegaConf.create(given["config"])), Path(given["folder"]))
    except Exception as error:
        if message := _message(error):
            raise ValueError(message) from None
        raise


# A table ------------------------------------------------------------------------------------------------------------


def table(config: DictConfig) -> float:
    """Every method on every data set, each with its seeds; nan, since scores of several data sets have no mean.

    A cell of the table is a folder of its own, which one process at a time works on: several may fill one table. What
    is finished is not done again, what was interrupted goes on, and a cell that fails leaves the others alone.
    """
    runtime = HydraConfig.get().runtime
    cells = _cells(config)
    folder = Path(config.outputs).absolute() / (runtime.choices.get("experiment") or "table")  # the same each time
    for name, own in cells.items():
        _check_begun(own, folder / name)
    failed: dict[str, Exception] = {}
    start, done_before = time.perf_counter(), _runs_done(cells, folder)

    def so_far() -> str:
        return _so_far(cells, folder, done_before, time.perf_counter() - start)

    while todo := [name for name in cells if name not in failed and not over(folder / name, cells[name])]:
        mine = False
        for name in todo:
            (folder / name).mkdir(parents=True, exist_ok=True)
            lock = try_lock(folder / name / LOCK)
            if lock is None:
                continue
            mine = True
            try:
                with held(folder / name, cells[name], lock):
                    if not complete(folder / name, cells[name]):  # by another process meanwhile
                        _begin(cells[name], folder / name)
                        say(f"{so_far()}; {name} begins")
                        all_runs(cells[name], folder / name)
                    _finish(cells[name], folder / name)
            except Exception as error:
                failed[name] = error
                say(f"{name} failed: {_message(error) or traceback.format_exc()}")
        if not mine:  # other processes have all that is left
            time.sleep(PAUSE)
    say(so_far())
    for name, own in cells.items():  # of cells that were finished before, whose lines may have been removed
        if name not in failed:
            _finish(own, folder / name)
    if failed:
        raise ValueError(
            f"{len(failed)} of {len(cells)} cells failed: {', '.join(failed)}. The same command tries again."
        )
    where, lines = from_here(folder), from_here(Path(config.results))
    print(f"All {len(cells)} cells are done, in {where}; their lines are in {lines}")
    return float("nan")


def _cells(config: DictConfig) -> dict[str, DictConfig]:
    """The settings of each cell, by its name: those of the model on the data set, then the method's own, then yours."""
    given = [override for override in HydraConfig.get().overrides.task if not override.startswith(TABLE)]
    if clash := [override for override in given if override.startswith(("model=", "dataset="))]:
        raise ValueError(f"{clash[0]} is for a single run. In a table, use methods=[...] and datasets=[...].")
    file = config_folder() / "experiment" / f"{HydraConfig.get().runtime.choices.get('experiment')}.yaml"
    in_file: Any = OmegaConf.load(file) if file.is_file() else {}
    if more := {*in_file} - {"methods", "datasets", "runs"}:
        raise ValueError(
            f"{file} has {', '.join(sorted(map(str, more)))}, which no cell would get. Name such settings with each "
            "method, or on the command line."
        )
    lists = {}
    for name in ("methods", "datasets"):
        lists[name] = [config[name]] if isinstance(config[name], str) else list(config[name] or ())
        if not lists[name]:
            raise ValueError(f"{name} is {config[name]}, expected a list such as {name}=[{TABLES[name]}].")
    cells = {}
    for dataset in lists["datasets"]:
        for model, *own in _methods(lists["methods"], in_file.get("methods") or ()):
            settings = [f"dataset={dataset}", f"model={model}", f"runs={config.runs}", *own, *given, "ckpt_path=last"]
            made = _composed(for_what_runs(settings))
            if made.trainer.get("strategy") is not None:
                raise ValueError("A table is of runs in one process each. Leave out trainer=ddp or ddp_cpu.")
            made.methods = model  # it is a cell
            said = [part.rpartition("=")[2] for part in own if not part.startswith("runs=")]
            name = "_".join(
                [dataset_name(made.dataset), model, *(re.sub(r"[^\w.]+", "-", word).strip("-") for word in said)]
            )
            if name in cells:
                raise ValueError(
                    f"Two methods make the cell {name}. Tell them apart by +model.method=..., and list a data set once."
                )
            cells[name] = made
            _check(made)
    return cells


def _composed(settings: list[str]) -> DictConfig:
    try:
        return compose("config", overrides=settings)
    except Exception as error:
        if message := _misused_group(settings):
            raise ValueError(message) from error
        raise


def _methods(asked: Iterable[Any], in_file: Iterable[Any]) -> Iterable[tuple[str, ...]]:
    """The methods asked for, each a model and its settings; a model alone is all that the file has of it, if any."""

    def parts(methods: Iterable[Any]) -> list[tuple[str, ...]]:
        return [tuple(method.split() if isinstance(method, str) else method) for method in methods]

    entries: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for entry in parts(in_file):
        entries.setdefault(entry[:1], []).append(entry)
    return dict.fromkeys(each for method in parts(asked) for each in entries.get(method, [method]))


def _check_begun(config: DictConfig, folder: Path) -> None:
    """Raise ValueError where a cell was begun with other settings than these."""
    if (folder / CONFIG).is_file():
        old, new = settings_in(folder), settings_of(plain(config))
        if changed := changes({**old, "runs": 0}, {**new, "runs": 0}):
            raise ValueError(
                f"{folder} was begun with other settings: {changed}. Choose other outputs=..., or remove the folder."
            )


def _begin(config: DictConfig, folder: Path) -> None:
    write_whole(folder / CONFIG, lambda beside: OmegaConf.save(plain(config), beside))


def _finish(config: DictConfig, folder: Path) -> None:
    """Add the lines of a complete cell where they lack, and remove its checkpoints."""
    for seed in range(config.seed, config.seed + config.runs):
        finished(seed_folder(folder, config, seed), config.results)
    remove_checkpoints(folder)


def _runs_done(cells: Mapping[str, DictConfig], folder: Path) -> int:
    def seeds(name: str, own: DictConfig) -> Iterator[Path]:
        return (seed_folder(folder / name, own, seed) for seed in range(own.seed, own.seed + own.runs))

    return sum((inner / RESULT).is_file() for name, own in cells.items() for inner in seeds(name, own))


def _so_far(cells: Mapping[str, DictConfig], folder: Path, before: int, seconds: float) -> str:
    """How far the table is, in runs, and when it will be done if the rest takes as long as what was done."""
    done, runs = _runs_done(cells, folder), sum(own.runs for own in cells.values())
    whole = sum(complete(folder / name, own) for name, own in cells.items())
    left = f", about {_minutes(seconds * (runs - done) / (done - before))} left" if done > before else ""
    full = 20 * done // runs
    bar = "#" * full + "." * (20 - full)
    return f"[{bar}] {done} of {runs} runs, {whole} of {len(cells)} cells, {_minutes(seconds)}{left}"


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


PAUSE = 5.0  # seconds between looks at what others work on
TABLE = ("experiment=", "+experiment=", "methods=", "datasets=", "ckpt_path=")  # what is asked of a table, not a cell
TABLES = {"methods": "gat,gcn", "datasets": "cora,citeseer"}


# What can go wrong --------------------------------------------------------------------------------------------------


def _message(error: Exception) -> str | None:
    """The error in words where its own words are enough: ours, Hydra's, the disk's. None where they are not."""
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        return f"{group}={name} is unknown.{_similar(name, error.options, f'{group}=')}"
    if isinstance(error, OverrideParseException):
        given = error.override
        if "=" not in given:
            return f"{given} cannot be read as a setting, expected name=value, as in dataset=cora."
        why = str(error).removeprefix(f"Error parsing override '{given}'\n").splitlines()[0]
        return (
            f"{given} cannot be read as a setting: {why}. Quote a value that holds signs such as = or (, and inside a "
            "list each setting that does: methods=\"[[gat,'training.lr=0.01']]\"."
        )
    if isinstance(error, HydraException) and isinstance(error.__cause__, Exception):
        return _message(error.__cause__) or str(error)
    if isinstance(error, (ConfigAttributeError, ConfigKeyError)) and error.full_key:
        name, siblings = str(error.full_key), error.parent_node
        group = name.rpartition(".")[0]
        known = [f"{group}.{key!s}".removeprefix(".") for key in (siblings if isinstance(siblings, DictConfig) else ())]
        more = (
            f" To pass it all the same, write +{name}=..." if group in ("dataset", "model", "trainer", "logger") else ""
        )
        return f"{name} is unknown.{_similar(name, [*known, *RULES])}{more}"
    if isinstance(error, MisconfigurationException):
        return str(error)
    if isinstance(error, OmegaConfBaseException):
        return ": ".join([str(error.full_key), str(error).splitlines()[0]])
    if isinstance(error, HydraException):
        return " ".join(str(error).split("\n\n")[0].split())
    if isinstance(error, OSError) and error.filename is not None and (number := full(error)) is not None:
        return (
            f"{error.filename} could not be written: {FULL[number]}. What was there before is whole. Free some "
            "space; then the same command with ckpt_path=last goes on from the last checkpoint."
        )
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}. Choose a folder that can be written: hydra.run.dir=... outputs=..."
    frames = traceback.extract_tb(error.__traceback__)
    ours = frames and Path(frames[-1].filename).resolve().is_relative_to(Path(__file__).resolve().parent)
    return str(error) if ours and isinstance(error, (ValueError, TypeError, OSError, ImportError)) else None


def _similar(name: str, known: Iterable[str], prefix: str = "") -> str:
    """A sentence on the names that are close to ``name``, else on those beside it, else on all."""
    last = {one: one.rpartition(".")[2].lower() for one in known}
    group, _, key = name.lower().rpartition(".")
    close = difflib.get_close_matches(name.lower(), [*map(str.lower, last)], 1, 0.8)
    close = [one for one in last if one.lower() in close]
    close = close or [one for one in last if last[one] in difflib.get_close_matches(key, last.values(), 1, 0.7)]
    if close:
        return f" Did you mean {prefix}{close[0]}?"
    beside = [one for one in last if one.rpartition(".")[0] == group]
    return f" Known are: {', '.join(beside or last)}."


def _misused_group(overrides: Iterable[str]) -> str | None:
    """A message on the first override that sets a group of settings to something that is no name, or on none."""
    parser = OverridesParser.create()
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException:
            continue
        if not override.key_or_group:
            return f"{text} cannot be read as a setting, expected name=value, as in dataset=cora."
        folder = config_folder() / override.key_or_group
        if folder.is_dir() and (override.is_delete() or not isinstance(override.value(), str)):
            names = ", ".join(sorted(file.stem for file in folder.glob("*.yaml")))
            return f"{text} is no choice, expected {override.key_or_group}=NAME with one of {names}."
    return None


def _check(config: DictConfig) -> None:
    """Raise ValueError for settings that cannot work, before anything is written."""
    for group in GROUPS:
        if not isinstance(OmegaConf.select(config, group), DictConfig):
            raise ValueError(f"{group} has no settings. Choose one of conf/{group}, or leave {group} out.")
    for name in _names(config):
        if name not in RULES and name not in OPTIONAL_RULES:
            raise ValueError(f"{name} is unknown.{_similar(name, [*RULES, *OPTIONAL_RULES])}")
    for name, rule in {**RULES, **OPTIONAL_RULES}.items():
        group, _, key = name.rpartition(".")
        if name in OPTIONAL_RULES and key not in config[group]:
            continue
        if not rule.fits(value := OmegaConf.select(config, name)):
            raise ValueError(f"{name} is {value!r}, expected {rule.expected}.")
    if config.seed > 2**32 - config.runs:
        raise ValueError(f"seed is {config.seed} with runs={config.runs}, expected seeds from 0 to 2^32 - 1.")
    if config.ckpt_path not in (None, "last") and config.runs > 1:
        raise ValueError(f"ckpt_path={config.ckpt_path} is one checkpoint, but runs={config.runs}. Use runs=1.")
    mode = HydraConfig.get().mode
    if config.trainer.get("strategy") is not None and mode == RunMode.MULTIRUN:
        raise ValueError("Several processes cannot go with --multirun: start the runs one by one, without -m.")
    where = "sweep" if mode == RunMode.MULTIRUN else "run"
    if OmegaConf.to_container(HydraConfig.get()[where], resolve=False)["dir"] == "":  # type: ignore[index, call-overload]
        raise ValueError(f"hydra.{where}.dir is empty, expected the path of a folder.")
    check_gpus(config.trainer)
    _check_appendable(Path(config.results))


def _names(config: DictConfig) -> Iterator[str]:
    """The dotted names of all settings that no class or function gets."""
    for key in map(str, config):
        if key in ("training", "split", "loader"):
            yield from (f"{key}.{inner}" for inner in config[key])
        elif key not in GROUPS:
            yield key


def _check_appendable(path: Path) -> None:
    """Raise OSError or ValueError if lines cannot be added to the file, which need not exist; nothing is created."""
    if path.exists():
        if not path.is_file():
            raise ValueError(f"results is {path}, which is no regular file. Choose another results=...")
        os.close(os.open(path, os.O_RDWR))
        return
    folder = next(folder for folder in path.absolute().parents if folder.exists())
    if not folder.is_dir():
        raise ValueError(f"results is {path}, but {folder} is no folder. Choose another results=...")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


if __name__ == "__main__":
    main()
