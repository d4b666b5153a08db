"""The command: compose the settings, train, test, leave a run folder and append one Result."""

from __future__ import annotations

import inspect
import logging
import os
import platform
import statistics
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, cast

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from hydra.utils import get_object, instantiate
from lightning import Trainer, seed_everything
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn

from . import models
from .data import Task, data_root, from_dataset
from .results import (
    CHECKPOINT,
    CONFIG,
    METRICS,
    MODEL,
    RESULT,
    Result,
    append,
    config_hash,
    read,
    save_model,
    try_lock,
    versions,
    write_whole,
)
from .training import (
    Inductive,
    MetricsFile,
    PaperStopping,
    Progress,
    Resumable,
    SafeCheckpoints,
    TaskData,
    Transductive,
    sparse_pays,
    takes_sparse,
    told,
)

RUN_DIR = "GAT_PYG_RUN_DIR"  # tells the processes that Lightning starts which folder the first one took
LOCK = ".lock"
NUMBERS = ("dataset", "model", "training", "split")  # the settings that decide what is learnt: they make the hash
HOW = {  # the settings of ``training`` that decide how fast it is learnt, and their values
    "sparse": ("auto", True, False),
    "compile": (True, False),
    "cuda_graphs": ("auto", True, False),
}
QUIET = (  # what Lightning and torch say of themselves, and of a loader that is right here as it is
    r".*LeafSpec.* is deprecated",
    r"The '(train|val|test)_dataloader' does not have many workers",
    r"Sparse CSR tensor support is in beta state",
)


def main() -> None:
    """The console script ``gat-pyg``: what can go wrong is told in a message, and the exit status is 1."""
    asked = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands errors on; here they are told in our own way
    try:
        hydra.main(version_base="1.3", config_path=str(config_folder()), config_name="config")(job)()
    except Exception as error:
        message = None if asked == "1" else _message(error)
        if message is None:
            traceback.print_exc()
        else:
            print(f"gat-pyg: {message}\n(HYDRA_FULL_ERROR=1 shows where.)", file=sys.stderr)
        sys.exit(1)
    finally:
        os.environ.pop("HYDRA_FULL_ERROR")
        if asked is not None:
            os.environ["HYDRA_FULL_ERROR"] = asked


def config_folder() -> Path:
    """The folder of the settings: inside the installed package, else the repository's own."""
    here = Path(__file__).resolve()
    for folder in (here.parent / "conf", here.parents[2] / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise FileNotFoundError(f"There is no conf/config.yaml beside {here} or in its repository. Install gat_pyg anew.")


def job(config: DictConfig) -> float:
    """Train and test with the seeds ``seed``, ``seed + 1``, ...; the mean validation score."""
    with run_folder(config) as folder, _quiet():
        _check(config)
        task = build_task(config)
        results = []
        for seed in range(config.seed, config.seed + config.runs):
            inner = seed_folder(folder, config, seed)
            result = finished(inner, config.results) or one_run(config, task, seed, inner)
            results.append(result)
            if _rank() == 0:
                print(summary(result, config), flush=True)
        if _rank() == 0 and len(results) > 1:
            print(summary_of_all(results, folder))
        return statistics.fmean(result.val for result in results)


# One run ------------------------------------------------------------------------------------------------------------


def one_run(config: DictConfig, task: Task, seed: int, folder: Path) -> Result:
    """Train with one seed, test the weights kept last, and leave everything in ``folder``."""
    first = _rank() == 0
    if first:
        own = OmegaConf.merge(config, {"seed": seed, "runs": 1, "ckpt_path": None})
        write_whole(folder / CONFIG, lambda beside: OmegaConf.save(own, beside, resolve=True))
    seed_everything(seed, workers=True, verbose=False)
    model, target, arguments, method = build_model(config.model, task)
    stopping = PaperStopping(config.training.patience, config.training.criterion)
    resumable = Resumable(folder / CHECKPOINT, seed, config.checkpoint_every)
    callbacks = [stopping, MetricsFile(folder / METRICS), resumable, Progress(f"{task.name}, seed {seed}")]
    module = build_module(config, task, model)
    with _deterministic():
        trainer = build_trainer(config, folder, callbacks)
        data = TaskData(task, config.training.batch_size, seed, _sparse(config, task, model, trainer))
        if task.transductive and trainer.world_size > 1:
            raise ValueError(
                f"{task.name} is one graph, which {trainer.world_size} processes cannot share out among them. "
                "Use trainer=cpu or trainer=gpu."
            )
        try:
            trainer.fit(module, datamodule=data, ckpt_path=_checkpoint(config, folder))
        except (KeyboardInterrupt, SystemExit):  # Lightning turns the one into the other
            if first:
                print(
                    f"\nStopped in {_told(folder)}. The same command with ckpt_path=last finishes it.", file=sys.stderr
                )
            raise
        scores = trainer.test(module, datamodule=data, verbose=False)[0]
    name = "micro_f1" if task.multilabel else "accuracy"
    result = Result(
        method=method,
        dataset=task.name,
        metric=name,
        value=round(scores[f"test_{name}"], 5),  # Lightning logs float32
        seed=seed,
        epochs=stopping.epoch,
        best_epoch=stopping.best_epoch,
        val=round(stopping.kept_score, 5),
        seconds=round(resumable.seconds, 3),
        seconds_per_epoch=round(resumable.seconds / max(stopping.epoch, 1), 6),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        versions=versions(),
        device=_device(trainer),
        config_hash=config_hash(_numbers(config)),
        run_dir=str(folder),
        timestamp=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
    if first:
        facts = {"method": method, "dataset": task.name, "metric": name, "multilabel": task.multilabel}
        save_model(folder / MODEL, model, target, arguments, **facts)
        write_whole(folder / RESULT, lambda beside: beside.write_text(result.to_json() + "\n", encoding="utf-8"))
        append(result, config.results)
        (folder / CHECKPOINT).unlink(missing_ok=True)
    return result


def _sparse(config: DictConfig, task: Task, model: nn.Module, trainer: Trainer) -> bool:
    """Whether the features are to be a sparse matrix, as ``training.sparse`` says."""
    asked = config.training.sparse
    if asked is True and not (task.transductive and takes_sparse(model)):
        raise ValueError(
            f"training.sparse is true, but {task.name} with {type(model).__name__} cannot do that: it needs a single "
            "graph and a model that takes sparse features, such as gat_pyg.models.GAT, and is not compiled. "
            "Use training.sparse=auto."
        )
    sparse = sparse_pays(task, model, trainer.strategy.root_device.type) if asked == "auto" else bool(asked)
    if sparse and _rank() == 0:
        x = task.train[0].x
        share = 100 * int(x.count_nonzero()) / max(x.numel(), 1)
        print(f"{task.name}: {share:.1f} % of the features are not 0, so they are a sparse matrix", file=sys.stderr)
    return sparse


def build_task(config: DictConfig) -> Task:
    """The task that ``dataset`` names: one of this package's, or any PyG data set by its ``_target_``.

    A class that comes in parts (``split="train"`` by default) is made three times; ``root`` is by default a folder of
    the class's name in ``data_root``.
    """
    settings = config.dataset
    target = _located("dataset", settings._target_)
    given: dict[str, Any] = {}
    takes = inspect.signature(target).parameters
    if inspect.isclass(target) and "root" in takes and settings.get("root") is None:
        given["root"] = str(data_root(config.data_root) / target.__name__)
    if "split" in takes and takes["split"].default == "train" and "split" not in settings:
        parts = [instantiate(settings, split=split, _convert_="all", **given) for split in ("train", "val", "test")]
        return from_dataset(parts, target.__name__.lower(), **config.split)
    found = instantiate(settings, _convert_="all", **given)
    return found if isinstance(found, Task) else from_dataset(found, target.__name__.lower(), **config.split)


def build_model(settings: DictConfig, task: Task) -> tuple[nn.Module, str, dict[str, Any], str]:
    """A fresh model for the task, the name of its class, its arguments, and the method's name."""
    arguments = cast(dict[str, Any], OmegaConf.to_container(settings, resolve=True))
    target = str(arguments.pop("_target_"))
    made = _located("model", target)
    if not inspect.isclass(made) or not issubclass(made, nn.Module):
        raise ValueError(f"model._target_={target} is no torch.nn.Module, expected the class of one.")
    namesake = hasattr(models, made.__name__) and not made.__module__.startswith("gat_pyg.")
    method = str(arguments.pop("method", f"PyG's {made.__name__}" if namesake else made.__name__))
    takes = inspect.signature(made).parameters
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
    sizes = {"in_channels": task.num_features, "out_channels": task.num_classes}
    if task.edge_dim is not None and ("edge_dim" in takes or (anything and getattr(made, "supports_edge_attr", False))):
        sizes["edge_dim"] = task.edge_dim
    arguments = {key: value for key, value in sizes.items() if key in takes or anything} | arguments
    try:
        model = instantiate({"_target_": target, **arguments}, _convert_="all")
    except HydraException as error:
        if not isinstance(error.__cause__, (TypeError, ValueError)):
            raise
        raise ValueError(f"model._target_={target}: {error.__cause__} Its settings: {arguments}.") from error
    return model, target, arguments, method


def build_module(config: DictConfig, task: Task, model: nn.Module) -> Transductive | Inductive:
    """The setup that the task asks for, with the model compiled where ``training.compile`` says so."""
    training = config.training
    if training.compile:
        model.compile()
    if task.transductive:
        return Transductive(model, training.lr, training.weight_decay, training.cuda_graphs)
    if training.cuda_graphs is True:
        raise ValueError(
            f"training.cuda_graphs is true, but {task.name} has many graphs. Use training.cuda_graphs=auto."
        )
    return Inductive(model, training.lr, training.weight_decay)


def _located(group: str, target: str) -> Any:
    try:
        return get_object(target)
    except Exception as error:
        message = f"{group}._target_={target} cannot be found. Give the dotted name of something that can be imported."
        raise ValueError(message) from error


def build_trainer(config: DictConfig, folder: Path, callbacks: Sequence[Any]) -> Trainer:
    """Lightning's trainer as ``trainer`` and ``logger`` say; what would cost time in each epoch is off."""
    trainer = instantiate(
        config.trainer,
        callbacks=list(callbacks),
        logger=build_logger(config.logger, folder),
        plugins=[SafeCheckpoints()],
        default_root_dir=str(folder),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        _convert_="all",
    )
    return cast(Trainer, trainer)


def build_logger(settings: DictConfig, folder: Path) -> Any:
    """A Lightning logger that writes into ``folder``, or False where metrics.csv is enough."""
    target = settings.get("_target_")
    if target is None:
        return False
    takes = inspect.signature(_located("logger", target)).parameters
    place = next((key for key in ("save_dir", "log_dir") if key in takes and key not in settings), None)
    try:
        return instantiate(settings, **({place: str(folder)} if place else {}))
    except (HydraException, ModuleNotFoundError) as error:
        cause = error if isinstance(error, ModuleNotFoundError) else error.__cause__
        if not isinstance(cause, ModuleNotFoundError):
            raise
        package = {"WandbLogger": "wandb", "MLFlowLogger": "mlflow"}.get(target.rpartition(".")[2], "tensorboard")
        raise ValueError(
            f"{target} needs a package that is not installed. Run: python -m pip install {package}. "
            "Or use logger=csv, which needs none."
        ) from error


# Where a run lives --------------------------------------------------------------------------------------------------


@contextmanager
def run_folder(config: DictConfig) -> Iterator[Path]:
    """The folder of this job, which no other process takes meanwhile; one that holds nothing afterwards goes.

    It is Hydra's (``hydra.run.dir``), which must not hold a run yet. With ``ckpt_path=last`` it is that folder if it
    holds a run, else the newest folder in ``outputs`` with an unfinished run of the same settings.
    """
    given = Path(HydraConfig.get().runtime.output_dir)
    if _rank() > 0:
        yield Path(os.environ.get(RUN_DIR, given))
        return
    folder = given
    try:
        folder, lock = _resumed(config, given) if config.ckpt_path == "last" else _fresh(given)
        if folder != given:
            _drop(given)
        os.environ[RUN_DIR] = str(folder)
        if not (folder / CONFIG).is_file():
            write_whole(folder / CONFIG, lambda beside: OmegaConf.save(_plain(config), beside))
        try:
            yield folder
        except Exception:
            if {path.name for path in folder.iterdir()} == {CONFIG, LOCK}:
                (folder / CONFIG).unlink()  # it failed before anything was done: the settings alone are no run
            raise
        finally:
            (folder / LOCK).unlink(missing_ok=True)
            os.close(lock)
            os.environ.pop(RUN_DIR)
    finally:
        _drop(given)
        _drop(folder)


def _drop(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()  # refused unless it is empty


def _fresh(folder: Path) -> tuple[Path, int]:
    if (folder / CONFIG).is_file():
        raise ValueError(
            f"{folder} holds a run already, which would be lost. Choose another hydra.run.dir, "
            "or finish that run by ckpt_path=last."
        )
    lock = try_lock(folder / LOCK)
    if lock is None:
        raise ValueError(f"{folder} is in use by another process. Choose another hydra.run.dir.")
    return folder, lock


def _resumed(config: DictConfig, given: Path) -> tuple[Path, int]:
    wanted = _settings(_plain(config))
    if (given / CONFIG).is_file():
        if changed := _changes(_settings(OmegaConf.load(given / CONFIG)), wanted):
            raise ValueError(
                f"The run in {given} was started with other settings: {changed}. Resume it with its own, "
                "or start anew in another folder."
            )
        candidates = [given]
    else:
        every = [path.parent for pattern in ("*", "*/*") for path in Path(config.outputs).glob(f"{pattern}/{CONFIG}")]
        same = [folder for folder in every if not _changes(_settings(OmegaConf.load(folder / CONFIG)), wanted)]
        candidates = [folder.absolute() for folder in same if not _complete(folder, config)]
        candidates.sort(key=lambda folder: (folder / CONFIG).stat().st_mtime, reverse=True)
    for folder in candidates:
        lock = try_lock(folder / LOCK)
        if lock is not None:
            print(f"Resuming the run in {_told(folder)}", file=sys.stderr)
            return folder, lock
    if candidates:
        raise ValueError(f"The run in {candidates[0]} is still going on in another process. Let it end, or stop it.")
    raise ValueError(
        f"There is no unfinished run with these settings in {config.outputs}. Name its folder by hydra.run.dir=..., "
        "or start anew without ckpt_path."
    )


def seed_folder(folder: Path, config: DictConfig, seed: int) -> Path:
    """The folder of one seed: the job's own, or one inside it when there are several."""
    return folder if config.runs == 1 else folder / f"seed-{seed}"


def finished(folder: Path, results: str) -> Result | None:
    """The Result of a run that has come to its end, or None; if it did not reach the shared file, it is added there."""
    if not (folder / RESULT).is_file():
        return None
    result = Result.from_json((folder / RESULT).read_text(encoding="utf-8"))
    if _rank() == 0:
        if not Path(results).is_file() or result not in read(results):
            append(result, results)
        (folder / CHECKPOINT).unlink(missing_ok=True)
    return result


def _complete(folder: Path, config: DictConfig) -> bool:
    seeds = range(config.seed, config.seed + config.runs)
    return all((seed_folder(folder, config, seed) / RESULT).is_file() for seed in seeds)


def _checkpoint(config: DictConfig, folder: Path) -> str | None:
    if config.ckpt_path in (None, "last"):
        return str(folder / CHECKPOINT) if config.ckpt_path and (folder / CHECKPOINT).is_file() else None
    return str(config.ckpt_path)


def _plain(config: DictConfig) -> DictConfig:
    """The settings with all references resolved."""
    return cast(DictConfig, OmegaConf.create(OmegaConf.to_container(config, resolve=True)))


def _settings(config: Any) -> dict[str, Any]:
    """Each setting that a resumed run must share, by its dotted name."""
    flat: dict[str, Any] = {}

    def walk(value: Any, name: str) -> None:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                walk(inner, f"{name}.{key}" if name else str(key))
        else:
            flat[name] = value

    walk(OmegaConf.to_container(config), "")
    return {key: value for key, value in flat.items() if key not in ("ckpt_path", "checkpoint_every")}


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    keys = sorted(key for key in {*old, *new} if old.get(key) != new.get(key))
    return ", ".join(f"{key} was {old.get(key)}, is {new.get(key)}" for key in keys[:5])


def _numbers(config: DictConfig) -> dict[str, Any]:
    plain = cast(dict[str, Any], OmegaConf.to_container(config, resolve=True))
    plain["dataset"].pop("root", None)  # where the files lie changes nothing
    plain["training"] = {key: value for key, value in plain["training"].items() if key not in HOW}
    shared = {key: plain["trainer"].get(key) for key in ("devices", "num_nodes", "precision")}  # the batch, the bits
    return {**{key: plain[key] for key in NUMBERS}, "trainer": shared}


# What is told -------------------------------------------------------------------------------------------------------


def summary(result: Result, config: DictConfig) -> str:
    """A few lines that say what came out and where it is."""
    lines = {
        "data set": result.dataset,
        "model": f"{result.method}, {result.parameters:,} parameters, seed {result.seed}",
        "epochs": f"{result.epochs}, best {result.best_epoch}",
        "validation": told(result.metric, result.val),
        "test": told(result.metric, result.value),
        "seconds": f"{result.seconds:.1f} ({_per_epoch(result)} per epoch, {result.device})",
        "files": _told(Path(result.run_dir)),
        "results": _told(Path(config.results)),
    }
    return "\n".join(f"{key:<12}{value}" for key, value in lines.items()) + "\n"


def summary_of_all(results: Sequence[Result], folder: Path) -> str:
    """Mean ± std over the seeds."""
    name, n = results[0].metric, len(results)
    scores = [result.value for result in results]
    mean, std = statistics.fmean(scores), statistics.stdev(scores)
    spread = f"accuracy {mean:.1f} ± {std:.1f} %" if name == "accuracy" else f"micro-F1 {mean:.3f} ± {std:.3f}"
    seconds = statistics.fmean(result.seconds for result in results)
    return f"{results[0].dataset}, {n} runs: test {spread}, {seconds:.1f} seconds a run, in {_told(folder)}"


def _per_epoch(result: Result) -> str:
    seconds = result.seconds_per_epoch
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _told(path: Path) -> str:
    """The path as one would type it from here."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _device(trainer: Trainer) -> str:
    device = trainer.strategy.root_device
    processes = f"{trainer.world_size} x " if trainer.world_size > 1 else ""
    if device.type == "cuda":
        return f"{processes}{torch.cuda.get_device_name(device)}"
    return f"{processes}{device.type} {platform.machine()}, {torch.get_num_threads()} threads"


def _message(error: Exception) -> str | None:
    """The error in words where its own words are enough: ours, Hydra's, the disk's. None where they are not."""
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        return f"{group}={name} is unknown. Known are: {', '.join(error.options)}."
    if isinstance(error, HydraException) and isinstance(error.__cause__, Exception):
        return _message(error.__cause__) or str(error)
    if isinstance(error, MisconfigurationException):
        return f"{error} On this machine trainer=cpu may be what works."
    if isinstance(error, (HydraException, OmegaConfBaseException)):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}. Choose a folder that can be written: hydra.run.dir=... outputs=..."
    frames = traceback.extract_tb(error.__traceback__)
    ours = frames and Path(frames[-1].filename).resolve().is_relative_to(Path(__file__).resolve().parent)
    return str(error) if ours and isinstance(error, (ValueError, TypeError, OSError)) else None


def _rank() -> int:
    """This process's number among those that train together."""
    return int(getattr(rank_zero_only, "rank", 0))


def _check(config: DictConfig) -> None:
    """Raise ValueError for settings that cannot work, before anything is written."""
    if config.runs < 1:
        raise ValueError(f"runs is {config.runs}, expected at least 1.")
    if not 0 <= config.seed <= 2**32 - config.runs:
        raise ValueError(f"seed is {config.seed} with runs={config.runs}, expected seeds from 0 to 2^32 - 1.")
    for key, known in HOW.items():
        if (value := config.training[key]) not in known:
            raise ValueError(f"training.{key} is {value!r}, expected {', '.join(map(str, known)).lower()}.")
    if config.trainer.max_epochs == 0:
        raise ValueError("training.max_epochs is 0, expected at least 1: without an epoch there is nothing to test.")
    if config.ckpt_path not in (None, "last") and config.runs > 1:
        raise ValueError(f"ckpt_path={config.ckpt_path} is one checkpoint, but runs={config.runs}. Use runs=1.")
    several = config.trainer.get("strategy") is not None
    if several and HydraConfig.get().mode == RunMode.MULTIRUN:
        raise ValueError("Several processes cannot go with --multirun: start the runs one by one, without -m.")


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Lightning's banners and tips from the screen; its warnings stay, but for those in ``QUIET``."""
    names = ("lightning.pytorch", "lightning.fabric", "lightning")
    loggers = {name: logging.getLogger(name) for name in names}
    levels = {name: logger.level for name, logger in loggers.items()}
    with warnings.catch_warnings():
        for message in QUIET:
            warnings.filterwarnings("ignore", message)
        try:
            for logger in loggers.values():
                logger.setLevel(logging.WARNING)
            yield
        finally:
            for name, logger in loggers.items():
                logger.setLevel(levels[name])


@contextmanager
def _deterministic() -> Iterator[None]:
    """Undo what ``trainer.deterministic`` sets for the whole process."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


if __name__ == "__main__":
    main()
