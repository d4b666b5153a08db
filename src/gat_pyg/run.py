"""The command `gat-pyg`: a verb, or the training of one job or a table of them by settings that Hydra composes."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import get_object
from omegaconf import DictConfig

from .command.command import errors_as_messages, exit_with
from .command.verbs import TRAIN, completed, verb_of, warn
from .settings.conf import TRUSTED, VERSION_BASE, check_names, config_folder
from .settings.errors import message
from .settings.overrides import translated
from .terminal import message as over_progress
from .terminal import print_any_text

# Waiting threads release their cores instead of spinning: if other processes are busy, an epoch is several times
# faster. OpenMP reads this when `job` imports torch. A value set by the user is not replaced.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# torch 2.14 warns of what PyG does as it is imported. The processes of a training read the variable.
os.environ.setdefault("PYTHONWARNINGS", "ignore:`torch.jit.script` is deprecated:FutureWarning")


def main() -> None:
    """Run the console script `gat-pyg`: print an error as a message, and exit with status 1.

    On SIGINT (Ctrl-C) or SIGTERM it exits with status 128 + number; a training first finishes the epoch and its
    checkpoint.
    """
    print_any_text()
    if "--version" in sys.argv[1:]:
        print(f"gat_pyg {get_object('gat_pyg.__version__')}")
        return
    verb = verb_of(sys.argv[1:])
    is_on_path, is_safe = bool({"", os.getcwd()} & {*sys.path}), getattr(sys.flags, "safe_path", False)
    if not is_on_path and not is_safe and (verb is None or "--trust" in sys.argv):
        sys.path.append(os.getcwd())  # for classes by their `_target_`, as with `python -m gat_pyg.run`
    warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", FutureWarning)
    if verb:
        with errors_as_messages(), warnings.catch_warnings():
            warnings.showwarning = warn
            warnings.filterwarnings("once", category=UserWarning)  # wherever it is raised again
            verb()
        return
    if {"-h", "--help"} & {*sys.argv}:
        with errors_as_messages():
            print_help(sys.argv[1:])
        return
    if {"-sc", "--shell-completion"} & {*sys.argv} and "COMP_LINE" in os.environ:
        if (line := completed(os.environ["COMP_LINE"])) is None:
            return
        os.environ["COMP_LINE"] = line
    restart_without_thread_caches()
    sys.argv[1:] = translated(sys.argv[2:] if sys.argv[1:2] == [TRAIN] else sys.argv[1:])
    with errors_as_messages(sys.argv[1:]):
        if (folder := get_args_parser().parse_known_args()[0].config_dir) is not None:
            check_names(Path(folder))
        hydra.main(config_path=str(config_folder()), config_name="config", **VERSION_BASE, **TRUSTED)(_job)()


def restart_without_thread_caches() -> None:
    """Start the command again in the same process, without glibc's caches of small freed blocks.

    Such blocks lie between those of batches of varying size, so that a training's memory grows from epoch to epoch.
    glibc reads the variable only as a process starts. A process that is not the command's alone is not restarted, nor
    one in which the user has set the variable.
    """
    is_ours = (__name__ == "__main__" or Path(sys.argv[0]).name == "gat-pyg") and "torch" not in sys.modules
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if sys.platform == "linux" and is_ours and "tcache_count" not in tunables:
        os.environ["GLIBC_TUNABLES"] = f"{tunables}:glibc.malloc.tcache_count=0".lstrip(":")
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def print_help(arguments: Sequence[str]) -> None:
    """Print the help of the command, or of the settings among the arguments; those with a value select the classes."""
    from .command.help import explanation, overview  # compose all settings

    words = [text for text in arguments if not text.startswith("-") and text != TRAIN]
    names = [text for text in words if "=" not in text]
    overrides = [text for text in words if "=" in text]
    print("\n\n".join(explanation(name, overrides) for name in names) if names else overview())


def job(config: DictConfig) -> float:
    """Train with the seeds `seed`, `seed + 1`, ..., or fill a table; return the score for a sweeper: see `execute`."""
    from .sweeps.job import execute  # imports torch, and Lightning, which chooses how warnings look

    warnings.formatwarning = lambda text, *_, **__: over_progress(f"gat-pyg: {text}\n")
    return execute(config)


def _job(config: DictConfig) -> float:
    """Run `job`, and exit here on an error of a single run: Hydra would print the command's arguments first."""
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        return job(config)
    try:
        return job(config)
    except Exception as error:
        exit_with(error, message(error))


if __name__ == "__main__":
    main()
