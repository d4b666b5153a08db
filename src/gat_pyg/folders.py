"""Where a run lives: in a folder of its own, which one process takes at a time and a resumed run finds again."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment  # type: ignore[attr-defined]
from omegaconf import DictConfig, OmegaConf
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from .ranks import is_first, say
from .results import CHECKPOINT, CONFIG, RESULT, Result, append, try_lock, write_whole

RUN_DIR = "GAT_PYG_RUN_DIR"  # tells the processes that Lightning starts which folder the first one took
LOCK = ".lock"
FREE = ("ckpt_path", "checkpoint_every", "vectorize", "seeds_per_pass")  # what a resumed run may have otherwise
WHERE = ("accelerator", "devices", "num_nodes", "strategy", "deterministic")  # and those of ``trainer``


@contextmanager
def run_folder(config: DictConfig) -> Iterator[Path]:
    """The folder of this job, which no other process takes meanwhile; one that holds nothing afterwards goes.

    It is Hydra's (``hydra.run.dir``), which must not hold a run yet. With ``ckpt_path=last`` it is that folder if it
    holds a run, else the newest folder in ``outputs`` with an unfinished run of the same settings. In a multirun, where
    there is no such one, it is the newest with a finished run, which is not done again, else Hydra's.
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
        os.environ[RUN_DIR] = str(folder)
        if store is not None:
            store.set(RUN_DIR, str(folder))
        if not (folder / CONFIG).is_file():
            write_whole(folder / CONFIG, lambda beside: OmegaConf.save(plain(config), beside))
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
        drop_empty(given)
        drop_empty(folder)


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
    """Remove a folder that holds nothing."""
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
    wanted = settings_of(plain(config))
    if (given / CONFIG).is_file():
        if changed := changes(settings_of(OmegaConf.load(given / CONFIG)), wanted):
            raise ValueError(
                f"The run in {given} was started with other settings: {changed}. Resume it with its own, "
                "or start anew in another folder."
            )
        candidates = [given]
    else:
        every = [path.parent for pattern in ("*", "*/*") for path in Path(config.outputs).glob(f"{pattern}/{CONFIG}")]
        every.sort(key=lambda folder: (folder / CONFIG).stat().st_mtime, reverse=True)
        same = [folder for folder in every if not changes(settings_of(OmegaConf.load(folder / CONFIG)), wanted)]
        candidates = [folder.absolute() for folder in same if not complete(folder, config)]
        if not candidates and HydraConfig.get().mode == RunMode.MULTIRUN:
            if not same:
                return _fresh(given)
            candidates = [same[0].absolute()]
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
        f"There is no unfinished run with these settings in {config.outputs}. Name its folder by hydra.run.dir=..., "
        "or start anew without ckpt_path."
    )


def seed_folder(folder: Path, config: DictConfig, seed: int) -> Path:
    """The folder of one seed: the job's own, or one inside it when there may be several."""
    return folder if config.runs == 1 and config.methods is None else folder / f"seed-{seed}"


def finished(folder: Path, results: str) -> Result | None:
    """The Result of a run that has come to its end, or None; if it did not reach the shared file, it is added there."""
    if not (folder / RESULT).is_file():
        return None
    text = (folder / RESULT).read_text(encoding="utf-8").strip()
    result = Result.from_json(text)
    if is_first():
        if not Path(results).is_file() or text not in Path(results).read_text(encoding="utf-8").splitlines():
            append(result, results)
        (folder / CHECKPOINT).unlink(missing_ok=True)
    return result


def complete(folder: Path, config: DictConfig) -> bool:
    """Whether every seed has come to its end."""
    seeds = range(config.seed, config.seed + config.runs)
    return all((seed_folder(folder, config, seed) / RESULT).is_file() for seed in seeds)


def begun(folder: Path) -> bool:
    """Whether there is something to go on from: a checkpoint, or a seed that is finished."""
    return any(True for name in (f"*{CHECKPOINT}", RESULT) for _ in folder.rglob(name))


def checkpoint_of(config: DictConfig, folder: Path) -> str | None:
    """What the run in a folder goes on from, as ``ckpt_path`` says."""
    if config.ckpt_path in (None, "last"):
        return str(folder / CHECKPOINT) if config.ckpt_path and (folder / CHECKPOINT).is_file() else None
    return str(config.ckpt_path)


def plain(config: DictConfig) -> DictConfig:
    """The settings with all references resolved."""
    return cast(DictConfig, OmegaConf.create(OmegaConf.to_container(config, resolve=True)))


def settings_of(config: Any) -> dict[str, Any]:
    """Each setting that a resumed run must share, by its dotted name."""
    flat: dict[str, Any] = {}

    def walk(value: Any, name: str) -> None:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                walk(inner, f"{name}.{key}" if name else str(key))
        else:
            flat[name] = value

    walk(OmegaConf.to_container(config), "")
    free = {*FREE, *(f"trainer.{key}" for key in WHERE)}
    return {key: value for key, value in flat.items() if key not in free}


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """How settings differ, in words; "" where they do not."""
    keys = sorted(key for key in {*old, *new} if old.get(key) != new.get(key))
    return ", ".join(f"{key} was {old.get(key)}, is {new.get(key)}" for key in keys[:5])


def from_here(path: Path) -> str:
    """The path as one would type it from here."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
