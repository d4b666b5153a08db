"""Where a run lives: in a folder of its own, which one process takes at a time and a resumed run finds again."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment  # type: ignore[attr-defined]
from omegaconf import DictConfig, OmegaConf
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ..distributed.ranks import is_first, say
from ..files import PART, try_lock, unlock, write_whole
from .result import CHECKPOINT, CONFIG, RESULT, Result, append

RUN_DIR = "GAT_PYG_RUN_DIR"  # tells the processes that Lightning starts which folder the first one took
LOCK, SWEEP = ".lock", "multirun.yaml"
FREE = (  # what a resumed run may have otherwise
    "ckpt_path",
    "checkpoint_every",
    "vectorize",
    "seeds_per_pass",
    "loader.num_workers",
)
WHERE = ("accelerator", "devices", "num_nodes", "strategy", "deterministic")  # and those of ``trainer``


@contextmanager
def run_folder(config: DictConfig) -> Iterator[Path]:
    """The folder of this job, which no other process takes meanwhile; one that holds nothing afterwards goes.

    It is Hydra's (``hydra.run.dir``), which must not hold a run yet. With ``ckpt_path=last`` it is that folder if it
    holds a run, else the newest folder in ``outputs`` with an unfinished run of the same settings. Where there is none,
    it is the newest with a finished run, which is not done again; in a multirun without one, it is Hydra's.
    """
    given = Path(HydraConfig.get().runtime.output_dir)
    store = _store()
    if not is_first():
        folder = Path(os.environ.get(RUN_DIR) or (store.get(RUN_DIR).decode() if store else given))
        if folder != given:
            drop_empty(given)
        yield folder
        return
    folder = given
    try:
        folder, lock = _resumed(config, given) if config.ckpt_path == "last" else _fresh(given)
        if folder != given:
            drop_empty(given)
            _drop_sweep(given.parent)
        os.environ[RUN_DIR] = str(folder)
        if store is not None:
            store.set(RUN_DIR, str(folder))
        try:
            with held(folder, config, lock):
                if not (folder / CONFIG).is_file():
                    write_whole(folder / CONFIG, lambda beside: OmegaConf.save(plain(config), beside))
                try:
                    yield folder
                except Exception:
                    if {path.name for path in folder.iterdir()} == {CONFIG, LOCK}:
                        (folder / CONFIG).unlink()  # it failed before anything was done: the settings alone are no run
                    raise
        finally:
            os.environ.pop(RUN_DIR)
    finally:
        drop_empty(given)
        drop_empty(folder)


@contextmanager
def held(folder: Path, config: DictConfig, lock: int) -> Iterator[None]:
    """Work in a folder whose lock this process has, without the half files of a process that died there.

    The lock's file is removed at the end. It stays where a process dies, and where a job is interrupted between its
    last result and its summary: ``over`` tells such a job from a finished one.
    """
    ended = False
    try:
        _remove_parts(folder)
        yield
        ended = True
    finally:
        if ended or not (begun(folder) and complete(folder, config)):  # settings that cannot work get here, too
            unlock(folder / LOCK, lock)
        else:
            os.close(lock)


def _remove_parts(folder: Path) -> None:
    for pattern in (PART, f"seed-*/{PART}"):
        for part in folder.glob(pattern):
            part.unlink(missing_ok=True)


def _store() -> Store | None:
    """Where processes that torchrun or SLURM started can tell one another something, before they train together."""
    launchers = (TorchElasticEnvironment, SLURMEnvironment)
    place = next((launcher() for launcher in launchers if launcher.detect()), None)
    if place is None or place.world_size() == 1:
        return None
    hosts = place.global_rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    wait = timedelta(seconds=60)
    store = TCPStore(place.main_address, place.main_port, place.world_size(), hosts, wait, False, multi_tenant=True)
    return PrefixStore(f"gat_pyg/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def drop_empty(folder: Path) -> None:
    """Remove a folder that holds nothing, unless it is the working directory."""
    if folder.absolute() == Path.cwd():
        return
    with suppress(OSError):
        folder.rmdir()  # refused unless it is empty


def _drop_sweep(folder: Path) -> None:
    """Remove the folder of a multirun whose jobs are all done elsewhere so far: Hydra writes its command into it."""
    if HydraConfig.get().mode == RunMode.MULTIRUN and {path.name for path in folder.iterdir()} <= {SWEEP}:
        (folder / SWEEP).unlink(missing_ok=True)
        drop_empty(folder)


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
    wanted = settings_of(plain(config))
    if (given / CONFIG).is_file():
        if changed := changes(settings_in(given), wanted):
            raise ValueError(
                f"The run in {given} was started with other settings: {changed}. Resume it with its own, "
                "or start anew in another folder."
            )
        candidates = [given]
    else:
        outputs = Path(config.outputs)
        _remove_unbegun(outputs)
        same = [folder.absolute() for folder, its in _begun(outputs) if not changes(its, wanted)]
        candidates = [folder for folder in same if not over(folder, config)] or same[:1]
        if not candidates and HydraConfig.get().mode == RunMode.MULTIRUN:
            return _fresh(given)
    for folder in candidates:
        lock = try_lock(folder / LOCK)
        if lock is not None:
            if complete(folder, config):
                say(f"The run in {from_here(folder)} is finished")
            else:
                say(f"Resuming the run in {from_here(folder)}{'' if begun(folder) else ' from its start'}")
            return folder, lock
    if candidates:
        raise ValueError(f"The run in {candidates[0]} is still going on in another process. Let it end, or stop it.")
    raise ValueError(
        f"There is no run with these settings in {config.outputs}. Name its folder by hydra.run.dir=..., "
        "or start anew without ckpt_path."
    )


def _in(outputs: Path, name: str) -> Iterator[Path]:
    """The folders of jobs, in ``outputs`` or in a folder of several, that have a file of this name."""
    return (path.parent for pattern in ("*", "*/*") for path in outputs.glob(f"{pattern}/{name}"))


def _begun(outputs: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The folders of all jobs with their settings, the newest first; one that cannot be read is reported."""
    found = []
    for folder in _in(outputs, CONFIG):
        try:
            found.append(((folder / CONFIG).stat().st_mtime, folder, settings_in(folder)))
        except FileNotFoundError:  # removed meanwhile
            continue
        except ValueError as error:
            say(f"{from_here(folder)} was left out: {error}")
    return [(folder, its) for _, folder, its in sorted(found, key=lambda each: each[0], reverse=True)]


def _remove_unbegun(outputs: Path) -> None:
    """Remove the folders whose process died before it wrote the job's settings."""
    for folder in _in(outputs, LOCK):
        names = {path.name for path in folder.iterdir()} - {path.name for path in folder.glob(PART)}
        if names == {LOCK} and (lock := try_lock(folder / LOCK)) is not None:
            _remove_parts(folder)
            unlock(folder / LOCK, lock)
            drop_empty(folder)


def settings_in(folder: Path, free: Sequence[str] = FREE) -> dict[str, Any]:
    """The settings of the job in a folder, as ``settings_of``.

    Raises ValueError where they cannot be read, and FileNotFoundError where there are none.
    """
    try:
        return settings_of(OmegaConf.load(folder / CONFIG), free)
    except FileNotFoundError:
        raise
    except Exception as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"{from_here(folder / CONFIG)} cannot be read, expected the settings of a run: {why}."
        ) from error


def seed_folder(folder: Path, config: DictConfig, seed: int) -> Path:
    """The folder of one seed: the job's own, or one inside it when there may be several."""
    return folder if config.runs == 1 and config.methods is None else folder / f"seed-{seed}"


def finished(folder: Path, results: str) -> Result | None:
    """The Result of a run that has come to its end, or None; if it did not reach the shared file, it is added there."""
    if not (folder / RESULT).is_file():
        return None
    try:
        result = Result.from_json((folder / RESULT).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{folder / RESULT} cannot be read: {error}. Remove it, and the same command with ckpt_path=last "
            "trains this run again."
        ) from error
    if is_first():
        append(result, results)
        remove_checkpoints(folder)
    return result


def remove_checkpoints(folder: Path) -> None:
    """Remove what a finished job or run would have gone on from."""
    for pattern in (CHECKPOINT, f"[0-9]*.{CHECKPOINT}"):  # of several devices each has its own
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


def complete(folder: Path, config: DictConfig) -> bool:
    """Whether every seed has come to its end."""
    seeds = range(config.seed, config.seed + config.runs)
    return all((seed_folder(folder, config, seed) / RESULT).is_file() for seed in seeds)


def over(folder: Path, config: DictConfig) -> bool:
    """Return whether a job is finished: every seed, their lines in the shared file, and the summary."""
    return complete(folder, config) and not (folder / LOCK).exists()


def begun(folder: Path) -> bool:
    """Whether there is something to go on from: a checkpoint, or a seed that is finished."""
    return any(True for name in (f"*{CHECKPOINT}", RESULT) for _ in folder.rglob(name))


def checkpoint_of(config: DictConfig, folder: Path) -> str | None:
    """Return the checkpoint to resume from, by ``ckpt_path``: the last one, else the one the run was started from."""
    if config.ckpt_path == "last" and (folder / CHECKPOINT).is_file():
        return str(folder / CHECKPOINT)
    return started_from(config, folder)


def started_from(config: DictConfig, folder: Path) -> str | None:
    """The checkpoint that the run in a folder was started from, which its settings keep when it is resumed."""
    if config.ckpt_path != "last":
        return config.ckpt_path and str(config.ckpt_path)
    first = settings_in(folder, free=()).get("ckpt_path") if (folder / CONFIG).is_file() else None
    return None if first in (None, "last") else str(first)


def plain(config: DictConfig) -> DictConfig:
    """The settings with all references resolved."""
    return cast(DictConfig, OmegaConf.create(OmegaConf.to_container(config, resolve=True)))


def settings_of(config: Any, free: Sequence[str] = FREE) -> dict[str, Any]:
    """Each setting that a resumed run must share, by its dotted name; ``free`` are those that may differ."""
    flat: dict[str, Any] = {}

    def walk(value: Any, name: str) -> None:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                walk(inner, f"{name}.{key}" if name else str(key))
        else:
            flat[name] = value

    walk(OmegaConf.to_container(config), "")
    others = {*free, *(f"trainer.{key}" for key in WHERE)}
    return {key: value for key, value in flat.items() if key not in others}


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """How settings differ, in words; "" where they do not."""
    keys = sorted(key for key in {*old, *new} if old.get(key) != new.get(key))
    return ", ".join(f"{key} was {old.get(key)}, is {new.get(key)}" for key in keys[:5])


def from_here(path: Path) -> str:
    """The path as one would type it from here."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
