"""The folder of a job: its lock, its settings, and the search for the folder of a job to resume."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from ..distributed.ranks import is_first, rank_zero_print, shared_store
from ..files import PART, locked, try_lock, unlock, write_whole
from ..settings.hashing import flattened
from ..settings.names import CREATED
from ..settings.overrides import quoted, typed
from ..settings.settings import Settings, differences
from .process import end_with
from .pruning import Pruner
from .result import CHECKPOINT, CONFIG, RESULT, Result, append, result_in, settings_in

RUN_DIR = "GAT_PYG_RUN_DIR"  # environment variable: passes the folder to the processes that Lightning starts
PARENT = "GAT_PYG_PARENT"  # environment variable: the id of the process that started them
AT_ONCE = 100  # jobs that one process holds at the same time: each has an open file, its lock
LOCK, SWEEP = ".lock", "multirun.yaml"
COMMENT = "# "  # before the command, in the first line of the settings


class Invocation(NamedTuple):
    """Hydra's part of a job: its folder, its mode, its overrides, the command that trains it."""

    folder: Path  # `hydra.run.dir`, which Hydra created
    multirun: bool
    experiment: str | None  # the name of a file in conf/experiment
    overrides: tuple[str, ...]
    command: str | None = None

    @classmethod
    def current(cls) -> Invocation:
        """Read Hydra's own configuration."""
        hydra = HydraConfig.get()
        runtime, multirun = hydra.runtime, hydra.mode == RunMode.MULTIRUN
        overrides = (*hydra.overrides.task,)
        command = " ".join(["gat-pyg", *map(quoted, typed(overrides, runtime.choices["recipe"]))])
        return cls(Path(runtime.output_dir), multirun, runtime.choices.get("experiment"), overrides, command)

    def check(self) -> None:
        """Raise ValueError for a search without `-m`, or a folder without a name."""
        if not self.multirun and (search := [text for text in self.overrides if text.startswith("search=")]):
            raise ValueError(f"{search[0]} trains many settings, each in its own job. Write gat-pyg -m {search[0]}.")
        hydra: Any = OmegaConf.to_container(HydraConfig.get(), resolve=False, enum_to_str=True)
        mode = "sweep" if self.multirun else "run"
        if hydra[mode]["dir"] == "":
            raise ValueError(f"hydra.{mode}.dir is empty, expected the path of a folder.")

    def drop_folder(self) -> None:
        """Remove Hydra's folder if it is empty, and that of the multirun if it holds only Hydra's file."""
        drop_empty(self.folder)
        sweep = self.folder.parent
        if self.multirun and {path.name for path in sweep.iterdir()} <= {SWEEP}:
            (sweep / SWEEP).unlink(missing_ok=True)
            drop_empty(sweep)


class Run(NamedTuple):
    """One seed of a job."""

    job: Job
    seed: int

    @property
    def settings(self) -> Settings:
        """The settings of the run, with `runs=1`."""
        return self.job.settings.replace(seed=self.seed, runs=1)

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self.job.run_folder(self.seed)

    @property
    def is_finished(self) -> bool:
        """True if the run has a result."""
        return (self.folder / RESULT).is_file()


class Job(NamedTuple):
    """The settings of one method on one data set, and the folder of its runs: of a command, or a cell of a table."""

    settings: Settings
    folder: Path
    title: str = ""  # its name among several jobs
    pruner: Pruner | None = None  # of a sweep

    def run_folder(self, seed: int) -> Path:
        """Return the folder of one seed: the job's folder, or one inside it if the job may have several seeds."""
        alone = self.settings.runs == 1 and self.settings.cell is None
        return self.folder if alone else self.folder / f"seed-{seed}"

    @property
    def runs(self) -> list[Run]:
        """The run of each seed."""
        return [Run(self, seed) for seed in self.settings.seeds]

    @property
    def unfinished(self) -> list[int]:
        """The seeds without a result."""
        return [run.seed for run in self.runs if not run.is_finished]

    @property
    def is_finished(self) -> bool:
        """True if the job is finished, including the lines in the shared file and the summary."""
        return not self.unfinished and not (self.folder / LOCK).exists()

    def save_settings(self, command: str | None = None) -> None:
        """Write the settings into the folder, below the command if it trains with these settings alone."""
        text = OmegaConf.to_yaml(OmegaConf.create(self.settings.to_dict()))
        if command := command or command_in(self.folder):
            text = f"{COMMENT}{command}\n{text}"
        write_whole(self.folder / CONFIG, lambda beside: beside.write_text(text, encoding="utf-8"))

    @property
    def started_from(self) -> str | None:
        """The checkpoint from which the run in the folder started, which stays in its settings on resume."""
        if self.settings.ckpt_path != "last":
            return self.settings.ckpt_path
        first = settings_in(self.folder)["ckpt_path"] if (self.folder / CONFIG).is_file() else None
        return None if first in (None, "last") else str(first)

    @property
    def checkpoint(self) -> str | None:
        """The checkpoint to resume from, by `ckpt_path`: the last one, else the one from which the run started."""
        last = self.folder / CHECKPOINT
        return str(last) if self.settings.ckpt_path == "last" and last.is_file() else self.started_from

    @contextmanager
    def child(self, rank: int, parent: int) -> Iterator[None]:
        """Context manager in a process that the job's process, `parent`, has started: hold a lock of its own.

        After a kill of the job, such a process ends after its epoch. A job that resumes the folder waits for that.
        """
        with locked(self.folder / f"{rank}{LOCK}"):
            end_with(parent)
            yield

    @contextmanager
    def held(self, lock: int) -> Iterator[None]:
        """Context manager: hold the folder's lock, and remove the incomplete files of a process that died there.

        It first waits for the processes that a killed job has started: see `child`.

        The lock file is removed at the end. It remains if the process dies, or if a job is interrupted between its
        last result and its summary, so that `is_finished` can distinguish such a job from a finished one.
        """
        ended = False
        try:
            for path in self.folder.glob(f"[0-9]*{LOCK}"):
                with locked(path):
                    pass
            _remove_parts(self.folder)
            yield
            ended = True
        finally:
            if ended or not (has_progress(self.folder) and not self.unfinished):  # False for bad settings
                unlock(self.folder / LOCK, lock)
            else:
                os.close(lock)


@contextmanager
def started_job(settings: Settings, invocation: Invocation) -> Iterator[Job]:
    """Context manager: the job in its folder, locked against other processes, removed on exit if empty.

    It is Hydra's folder (`hydra.run.dir`), which must not hold a run yet. With `ckpt_path=last`, it is the first of:

    - Hydra's folder, if it holds a run;
    - the newest folder in `outputs` with an unfinished run of the same settings;
    - the newest one with a finished run of the same settings, which is not repeated;
    - in a multirun, Hydra's folder.
    """
    fresh = invocation.folder
    store = shared_store()
    if not is_first():
        if PARENT in os.environ:
            end_with(int(os.environ[PARENT]))
        folder = Path(os.environ.get(RUN_DIR) or (store.get(RUN_DIR).decode() if store else fresh))
        if folder != fresh:
            drop_empty(fresh)
        yield Job(settings, folder)
        return
    folder = fresh
    try:
        folder, lock = _resumed(settings, invocation) if settings.ckpt_path == "last" else _fresh(fresh)
        if folder != fresh:
            invocation.drop_folder()
        os.environ |= {RUN_DIR: str(folder), PARENT: str(os.getpid())}
        if store is not None:
            store.set(RUN_DIR, str(folder))
        try:
            job = Job(settings, folder)
            with job.held(lock):
                if not (folder / CONFIG).is_file():
                    job.save_settings(invocation.command)
                try:
                    yield job
                except Exception:
                    if {path.name for path in folder.iterdir()} == {CONFIG, LOCK}:
                        (folder / CONFIG).unlink()  # nothing was done: the folder is not a run
                    raise
        finally:
            for name in (RUN_DIR, PARENT):
                os.environ.pop(name, None)  # another job of a multirun may have removed it
    finally:
        drop_empty(fresh)
        drop_empty(folder)


def _remove_parts(folder: Path) -> None:
    for pattern in (PART, f"seed-*/{PART}"):
        for part in folder.glob(pattern):
            part.unlink(missing_ok=True)


def drop_empty(folder: Path) -> None:
    """Remove an empty folder, unless it is the working directory, and empty ones around it that the command created."""
    if folder.absolute() == Path.cwd():
        return
    with suppress(OSError):
        folder.rmdir()  # fails unless it is empty
        for parent in folder.absolute().parents:
            if parent not in CREATED:
                break
            parent.rmdir()


def _fresh(folder: Path) -> tuple[Path, int]:
    if (folder / CONFIG).is_file():
        raise ValueError(
            f"{folder} already holds a run, which would be lost. Choose another hydra.run.dir, "
            "or finish that run by ckpt_path=last."
        )
    lock = try_lock(folder / LOCK)
    if lock is None:
        raise ValueError(f"{folder} is in use by another process. Choose another hydra.run.dir.")
    return folder, lock


def _resumed(settings: Settings, invocation: Invocation) -> tuple[Path, int]:
    fresh, values = invocation.folder, flattened(settings.to_dict())
    if (fresh / CONFIG).is_file():
        if changed := differences(flattened(settings_in(fresh)), values):
            raise ValueError(
                f"The run in {fresh} was started with other settings: {changed}. Resume it with its own, "
                "or start again in another folder."
            )
        candidates = [fresh]
    else:
        outputs = Path(settings.outputs)
        _remove_unstarted(outputs)
        started = _started(outputs)
        same = [folder.absolute() for folder, saved in started if not differences(saved, values)]
        candidates = [folder for folder in same if not Job(settings, folder).is_finished] or same[:1]
        if not candidates:
            _check_content(started, values)
        if not candidates and invocation.multirun:
            return _fresh(fresh)
    for folder in candidates:
        lock = try_lock(folder / LOCK)
        if lock is not None:
            if not Job(settings, folder).unfinished:
                rank_zero_print(f"The run in {relative_path(folder)} is finished")
            else:
                begins = not invocation.multirun and not has_progress(folder)  # a stack's checkpoint is of several jobs
                rank_zero_print(f"Resuming the run in {relative_path(folder)}{' from its start' if begins else ''}")
            return folder, lock
    if candidates:
        raise ValueError(f"The run in {candidates[0]} is still running in another process. Let it end, or stop it.")
    raise ValueError(
        f"There is no run with these settings in {settings.outputs}. Name its folder by hydra.run.dir=..., "
        "or start again without ckpt_path."
    )


def _check_content(started: Sequence[tuple[Path, Mapping[str, Any]]], values: Mapping[str, Any]) -> None:
    """Raise ValueError if a run has the same settings, but the user's files had another content."""
    of_files = {name: values.get(name) for name in ("content", "code", "start")}
    for folder, saved in started:
        if not differences({**saved, **of_files}, values):
            raise ValueError(
                f"The run in {relative_path(folder)} has the same settings, but {differences(saved, values)}. Restore "
                "the file, or start again without ckpt_path."
            )


def _in(outputs: Path, name: str) -> Iterator[Path]:
    """Return the folders with a file of this name among those of jobs: in `outputs` and one level below."""
    return (path.parent for pattern in ("*", "*/*") for path in outputs.glob(f"{pattern}/{name}"))


def _started(outputs: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Return the folders of all jobs with their settings, the newest first; print those that cannot be read."""
    jobs = []
    for folder in _in(outputs, CONFIG):
        try:
            changed = (folder / CONFIG).stat().st_mtime_ns
            jobs.append((changed, folder, _settings_since(changed, folder.absolute())))
        except FileNotFoundError:  # removed meanwhile
            continue
        except ValueError as error:
            rank_zero_print(f"{relative_path(folder)} was left out: {error}")
    return [(folder, values) for _, folder, values in sorted(jobs, key=lambda job: job[0], reverse=True)]


@functools.cache
def _settings_since(changed: int, folder: Path) -> dict[str, Any]:
    """Return flat `settings_in(folder)`, which each job of a sweep reads; the file was written at `changed`, in ns."""
    return flattened(settings_in(folder))


def _remove_unstarted(outputs: Path) -> None:
    """Remove the folders of processes that died before they wrote the job's settings."""
    for folder in _in(outputs, LOCK):
        names = {path.name for path in folder.iterdir()} - {path.name for path in folder.glob(PART)}
        if names == {LOCK} and (lock := try_lock(folder / LOCK)) is not None:
            _remove_parts(folder)
            unlock(folder / LOCK, lock)
            drop_empty(folder)


def finished(folder: Path, results: str) -> Result | None:
    """Return the result of a finished run, or None; append its line to the shared file if it is missing there."""
    if (result := result_in(folder)) is None:
        return None
    if is_first():
        append(result, results)
        (folder / CHECKPOINT).unlink(missing_ok=True)  # that of a stack is also of other runs
    return result


def remove_checkpoints(folder: Path) -> None:
    """Remove the checkpoints of a finished job."""
    for pattern in (CHECKPOINT, f"[0-9]*.{CHECKPOINT}"):  # the second: one for each of several devices
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


def has_progress(folder: Path) -> bool:
    """Return True if there is something to resume: a checkpoint, or a finished seed."""
    return any(True for name in (f"*{CHECKPOINT}", RESULT) for _ in folder.rglob(name))


def command_in(folder: Path) -> str | None:
    """Return the command that trained the run in a folder; None if it trained other settings too, as a table does."""
    for path in (folder / CONFIG, folder.parent / CONFIG):  # of the seed, of the job
        first = path.read_text(encoding="utf-8").partition("\n")[0] if path.is_file() else ""
        if first.startswith(COMMENT):
            return first.removeprefix(COMMENT)
    return None


def relative_path(path: Path) -> str:
    """Return the path relative to the working directory, if it is inside."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
