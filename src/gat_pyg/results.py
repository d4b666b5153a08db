"""What a run leaves behind: its Result, one JSON line, and its trained model, one safetensors file."""

from __future__ import annotations

import copy
import errno
import hashlib
import importlib
import importlib.metadata
import inspect
import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch_geometric.data import Data

from .preparation import Preparation, attach
from .stack import Stack

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

MODEL, RESULT, CONFIG, CHECKPOINT, METRICS = (
    "model.safetensors",
    "result.json",
    "config.yaml",
    "last.ckpt",
    "metrics.csv",
)
PACKAGES = ("gat_pyg", "torch", "torch_geometric", "lightning", "torch_scatter")
LARGEST = 10_000  # of an argument of a model with fewer parameters
PART = ".*.[0-9]*.part"  # a file that is being written, by the process of that id: see `write_whole`
PATIENCE = 5.0  # seconds of waiting for a lock before it is reported
FULL = {  # errors of a disk that takes no more
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "it would exceed the limit on the size of a file (ulimit -f, or a quota)",
}
HELD = (errno.EAGAIN, errno.EACCES, errno.EDEADLK)  # errors of a lock that another process holds
REBUILT = ("gat_pyg.", "torch_geometric.nn.models.", "torch_geometric.nn.conv.")  # what `load` may build by its name


# One run is one line ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """What came out of one run: one line of ``results.jsonl``.

    ``value`` and ``val`` are the test and the validation score of the weights that were kept: accuracy in percent, or
    micro-F1 as a fraction. ``seconds`` is the training alone, without reading data and without the test.

    >>> line = Result("GAT", "cora", "accuracy", 83.1, 0, 812, 711, 82.0, 9.2, 0.011, 92373).to_json()
    >>> Result.from_json(line).value
    83.1
    """

    method: str
    dataset: str
    metric: str  # "accuracy" in percent, or "micro_f1"
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
    majority: float | None = None  # the best test score of one prediction for all nodes: the majority class's share

    @property
    def warning(self) -> str:
        """The warning that one prediction for all nodes has the same test score or a better one, else ""."""
        if self.majority is None or self.value > self.majority + 2e-5:  # both are rounded to 5 digits
            return ""
        if self.metric == "accuracy":
            return f"no better than predicting the majority class for every node ({self.majority:.1f} %)"
        return f"no better than the best prediction that is the same for every node ({self.majority:.3f})"

    def to_json(self) -> str:
        """One line of JSON, without the line break; a score that is NaN is null."""
        values = {key: None if value != value else value for key, value in asdict(self).items()}
        return json.dumps(values, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Result:
        """The Result that ``to_json`` wrote; fields that a later version added are left out.

        Raises ValueError when the line is not a whole Result.
        """
        known = {field.name: field.type for field in fields(cls)}
        try:
            found = json.loads(line)
            found |= {key: float("nan") for key in ("value", "val") if found.get(key, 0) is None}
            found = {key: value for key, value in found.items() if key in known}
            for key, value in found.items():
                if isinstance(value, bool) or not isinstance(value, _JSON[str(known[key])]):
                    raise TypeError(f"{key} is {value!r}")
            return cls(**found)
        except (AttributeError, TypeError, RecursionError) as error:
            raise ValueError(f"not a Result ({error}), expected a JSON object with the fields of Result.") from error


_JSON: dict[str, type | tuple[type, ...]] = {
    "str": str,
    "int": int,
    "float": (int, float),
    "float | None": (int, float, type(None)),
    "Mapping[str, str | None] | None": (dict, type(None)),
}


def versions() -> dict[str, str | None]:
    """The versions a number depends on; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def config_hash(config: Mapping[str, Any]) -> str:
    """Twelve hex digits, the same for the same settings whatever their order.

    >>> config_hash({"a": 1, "b": [2]}) == config_hash({"b": [2], "a": 1})
    True
    """
    text = json.dumps(config, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def append(result: Result, path: str | Path) -> None:
    """Add ``result`` to the file at ``path`` as one line, whoever else adds to it at the same time.

    The line goes out in one write under a lock on the file, unless the file has it already. A line that an earlier
    writer left torn (a full disk, a lost machine) stays as it is, and the new one begins on a line of its own.

    Raises OSError when the line cannot be written whole; the file is then as it was before.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    line = (result.to_json() + "\n").encode()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
    try:
        with _locked(descriptor, path):
            end = os.lseek(descriptor, 0, os.SEEK_END)
            os.lseek(descriptor, 0, os.SEEK_SET)
            *before, last = os.read(descriptor, end).split(b"\n")
            if line.rstrip() not in (*before, last):
                add(descriptor, b"\n" + line if last else line, path, sync=True)
    finally:
        os.close(descriptor)


def add(descriptor: int, data: bytes, path: Path, sync: bool = False) -> None:
    """Write all of ``data`` at the end of the open file at ``path``, or raise OSError and leave the file as it was."""
    end = os.lseek(descriptor, 0, os.SEEK_END)
    failed = _full(path)  # a disk takes as much as it has room for
    try:
        if os.write(descriptor, data) == len(data):
            if sync:
                os.fsync(descriptor)
            return
    except OSError as error:
        failed = OSError(error.errno, error.strerror, str(path))
    os.ftruncate(descriptor, end)
    raise failed


def _full(path: Path, number: int = errno.ENOSPC) -> OSError:
    return OSError(number, os.strerror(number), str(path))


def full(error: BaseException | None) -> int | None:
    """The key in `FULL` of an error, or of the error that it came from; None where the disk is not full."""
    if error is None:
        return None
    if isinstance(error, OSError) and error.errno in FULL:
        return error.errno
    return full(error.__cause__ or error.__context__)


def read(path: str | Path) -> list[Result]:
    """The results in the file at ``path``, in the order they came; a torn line is left out with a warning."""
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


@contextmanager
def _locked(descriptor: int, path: Path) -> Iterator[None]:
    """Wait until this process alone holds the open file; the system lets go of it should the process die."""
    start, reported = time.monotonic(), False
    while not _takes(descriptor, path):
        if not reported and time.monotonic() - start > PATIENCE:
            print(f"Waiting for {path}, which another process has locked", file=sys.stderr, flush=True)
            reported = True
        time.sleep(0.01)
    try:
        yield
    finally:
        if sys.platform == "win32":  # elsewhere closing the file unlocks it
            os.lseek(descriptor, 0, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)


def _takes(descriptor: int, path: Path) -> bool:
    """Lock an open file, unless another process holds it."""
    try:
        if sys.platform == "win32":
            os.lseek(descriptor, 0, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in HELD:
            raise OSError(error.errno, error.strerror, str(path)) from error
        return False
    return True


def try_lock(path: Path) -> int | None:
    """Hold the file at ``path`` for as long as this process lives, or None when another process holds it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        if not _takes(descriptor, path):
            os.close(descriptor)
            return None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        os.close(descriptor)  # its last holder has removed it meanwhile


def unlock(path: Path, descriptor: int) -> None:
    """Remove a file that `try_lock` holds, and let go of it."""
    if sys.platform == "win32":
        os.close(descriptor)
        with suppress(OSError):  # another process has it now
            path.unlink()
    else:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def write_whole(path: str | Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a file beside ``path``, then put it there in one step: a reader meets the old or the new.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "note.txt"
    >>> write_whole(path, lambda file: file.write_text("whole"))
    >>> path.read_text()
    'whole'

    Raises what ``write`` raises, or an OSError that names ``path`` where the disk is full.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        write(beside)
        with beside.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    except Exception as error:
        if (number := full(error)) is not None:
            raise _full(path, number) from error
        raise
    finally:
        beside.unlink(missing_ok=True)


# The trained model --------------------------------------------------------------------------------------------------


def save_model(path: str | Path, model: nn.Module, target: str, arguments: Mapping[str, Any], **facts: Any) -> None:
    """Write the weights of ``model`` with what rebuilds it: ``target``, the class's name, and its ``arguments``.

    The file is safetensors: numbers and a JSON text, nothing that could run. ``facts`` (JSON too) go into that text.
    """
    about = {"target": target, "arguments": dict(arguments), **facts}
    # a state dict may hold one tensor twice, which safetensors refuses
    tensors = {key: value.detach().cpu().clone().contiguous() for key, value in _tensors(model).items()}
    metadata = {"gat_pyg": json.dumps(about, ensure_ascii=False)}
    write_whole(path, lambda beside: beside.write_bytes(safetensors.torch.save(tensors, metadata)))


def load(run_dir: str | Path, model: nn.Module | None = None, seed: int | Literal["all"] | None = None) -> nn.Module:
    """The trained model of a run, with its best weights and in eval mode, on the CPU.

    Of a folder with the runs of several seeds, ``seed=3`` gives one model and ``seed="all"`` the stack of them, whose
    call gives logits [S, N, K] in the order of the seeds: ``load(folder, seed="all")(x, edge_index)``.

    ``model.preparation`` says how the data of the run were prepared, and prepares others: ``model.preparation(data)``.
    The first call raises ValueError for another number of features, and warns of features prepared differently. It is
    None for a file saved without.

    Nothing in the folder is ever run: the weights are plain numbers, and the class is built by its name only where it
    is an ``nn.Module`` of gat_pyg or one of PyG's models or layers. For any other, give a ``model`` of the same shapes.

    Raises FileNotFoundError when ``run_dir`` is not the folder of a finished run, and ValueError when the file is
    truncated, the class is not one to be built by name, or its shapes differ from those saved.

    >>> load("nowhere")
    Traceback (most recent call last):
    FileNotFoundError: nowhere is not a run folder: it does not exist. Give the folder that a run named at its end.
    """
    folder = Path(run_dir)
    if seed == "all":
        inner = sorted(folder.glob(f"seed-*/{MODEL}"), key=_seed_of)
        if not inner:
            raise FileNotFoundError(f"{folder} holds no runs of several seeds. Leave out seed, or give their folder.")
        models = [load(path, copy.deepcopy(model)) for path in inner]
        stack = Stack(models).eval()
        attach(stack, getattr(models[0], "preparation", None))
        return stack
    path = _model_file(folder if seed is None else folder / f"seed-{seed}")
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get("gat_pyg", "null"))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} cannot be read: {error}. It is truncated or of another kind. Copy it again, or train again."
        ) from error
    if model is None:
        model = _rebuild(path, about, tensors)
    _fill(model, tensors, path)
    attach(model, _preparation(path, about))
    return model.eval()


def _seed_of(path: Path) -> int:
    try:
        return int(path.parent.name.removeprefix("seed-"))
    except ValueError:
        raise ValueError(f"{path.parent} is no folder of a seed, expected seed-0, seed-1, ... Rename it.") from None


@torch.no_grad()
def predict(
    run_dir: str | Path, data: Data, model: nn.Module | None = None, seed: int | Literal["all"] | None = None
) -> Tensor:
    """Return the probabilities [N, K] of each node's classes, or of its labels, by the model of a run.

    ``data`` is a graph, or a batch of them, as it comes from its source: it is prepared as the run's data were
    (``Preparation``), on the device of its features. ``seed="all"`` gives the mean probabilities over the seeds. The
    other arguments, and what else is raised, are those of ``load``.

    Raises ValueError when the dimensions of ``data`` are not the run's, or the run has no preparation that can be
    applied, and warns of features that differ from the run's.

    >>> predict("nowhere", Data())
    Traceback (most recent call last):
    FileNotFoundError: nowhere is not a run folder: it does not exist. Give the folder that a run named at its end.
    """
    trained = load(run_dir, model, seed)
    preparation: Any = trained.preparation
    if preparation is None:
        raise ValueError(
            f"{run_dir} was saved without its data preparation. Prepare the data yourself, and call the model: "
            "gat_pyg.load(run_dir)."
        )
    data = preparation(data)
    single = trained.models if isinstance(trained, Stack) else trained
    takes = inspect.signature(single.forward).parameters
    edges = [data.edge_index] if "edge_index" in takes else []
    with_edge_attr = preparation.edge_dim is not None and "edge_attr" in takes
    with_edge_attr = with_edge_attr and getattr(single, "supports_edge_attr", True)
    options = {"edge_attr": data.edge_attr} if with_edge_attr else {}
    out = trained.to(data.x.device)(data.x, *edges, **options)
    probabilities: Tensor = out.sigmoid() if preparation.multilabel else out.softmax(-1)
    return probabilities.mean(0) if isinstance(trained, Stack) else probabilities


def _preparation(path: Path, about: Any) -> Preparation | None:
    """The preparation that the file describes, or None where it has none."""
    description = about.get("preparation") if isinstance(about, dict) else None
    try:
        return None if description is None else Preparation.from_dict(description)
    except (AttributeError, TypeError) as error:
        raise ValueError(
            f"{path} describes its data preparation in another form: {error}. Use the version that saved it."
        ) from error


def _model_file(folder: Path) -> Path:
    path = folder if folder.name == MODEL else folder / MODEL
    if path.is_file():
        return path
    if not folder.exists():
        why = "it does not exist. Give the folder that a run named at its end"
    elif inner := sorted(child.parent.name for child in folder.glob(f"*/{MODEL}")):
        seeds = all(name.startswith("seed-") for name in inner)
        beside = f", or seed={inner[0].removeprefix('seed-')} or seed='all' beside it" if seeds else ""
        why = f"it holds the runs {', '.join(inner[:10])}. Give one of these{beside}"
    elif (folder / CONFIG).is_file() and not (folder / RESULT).is_file():
        why = f"it has no {MODEL} since its run is not finished. Finish it by ckpt_path=last"
    else:
        why = f"it has no {MODEL}. Give the folder that a run named at its end"
    raise FileNotFoundError(f"{folder} is not a run folder: {why}.")


def _rebuild(path: Path, about: Any, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A fresh model of the class and arguments that the file names, if the class is one of ``REBUILT``."""
    known = isinstance(about, dict) and isinstance(about.get("target"), str)
    if not known or not isinstance(about.get("arguments"), dict):
        raise ValueError(f"{path} does not say of which class its model is. Give it: load(run_dir, model=...).")
    target, arguments = about["target"], about["arguments"]
    most = max(LARGEST, sum(value.numel() for value in tensors.values()))
    if large := [f"{key}={size}" for key, size in _sizes(arguments) if size > most]:
        raise ValueError(f"{path} asks for {target} with {large[0]}, but has {most} numbers at most. Copy it again.")
    try:
        with torch.device("meta"):  # takes no memory, whatever the arguments ask for
            claimed = _built(path, target, arguments)
    except (
        ValueError
    ):  # a constructor that computes with its values; or nothing that can be built, as is reported below
        pass
    else:
        _check_fits(claimed, tensors, path)
    return _built(path, target, arguments)


def _sizes(value: Any, key: str = "") -> Iterator[tuple[str, int]]:
    """Yield the whole numbers in nested arguments, each with the argument's name."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _sizes(inner, key or name)
    elif isinstance(value, list):
        for inner in value:
            yield from _sizes(inner, key)
    elif isinstance(value, int):
        yield key, value


def _built(path: Path, target: str, arguments: Mapping[str, Any]) -> nn.Module:
    home, _, name = target.rpartition(".")
    found: object = None
    if f"{home}.".startswith((*REBUILT, "torch_geometric.nn.")):
        with suppress(ImportError, ValueError):
            found = getattr(importlib.import_module(home), name, None)
    if not inspect.isclass(found) or not issubclass(found, nn.Module) or not found.__module__.startswith(REBUILT):
        raise ValueError(
            f"{path} names the class {target}, expected one of gat_pyg or one of torch_geometric.nn's models and "
            "layers; no other is built by its name alone. Build it yourself: load(run_dir, model=...)."
        )
    arguments = dict(arguments)
    for key, value in arguments.items():
        if isinstance(value, dict) and "_target_" in value:  # a module inside, such as a mechanism
            inner = {name: part for name, part in value.items() if name != "_target_"}
            arguments[key] = _built(path, str(value["_target_"]), inner)
    try:
        return found(**arguments)
    except Exception as error:
        raise ValueError(
            f"{path} asks for {target}(**{arguments}), which this version cannot build: {error}. "
            "Build it yourself: load(run_dir, model=...)."
        ) from error


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {key: value for key, value in model.state_dict().items() if isinstance(value, Tensor)}


def _fill(model: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    _check_fits(model, tensors, path)
    model.load_state_dict(tensors, strict=False)


def _check_fits(model: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    if different := differing(_tensors(model), tensors):
        raise ValueError(
            f"{path} does not fit {type(model).__name__}: {different}. Give the model that was trained: "
            "load(run_dir, model=...) with the arguments in the run's config.yaml."
        )


def differing(model: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> str:
    """The first difference between the names, shapes and kinds of two state dicts in words, or an empty text.

    A tensor of floats may be of another precision, but not of integers or of 8 bits.

    >>> differing(nn.Linear(2, 7).state_dict(), nn.Linear(2, 3).state_dict())
    'weight has shape (7, 2) in the model and (3, 2) in the file'
    """
    for key, value in model.items():
        if key not in saved:
            return f"{key} {tuple(value.shape)} of the model is not in the file"
        if is_lazy(value):  # takes the shape in the file
            continue
        if value.shape != saved[key].shape:
            return f"{key} has shape {tuple(value.shape)} in the model and {tuple(saved[key].shape)} in the file"
        if _kind(value) != _kind(saved[key]):
            return f"{key} is {value.dtype} in the model and {saved[key].dtype} in the file"
    for key in saved:
        if key not in model:
            return f"{key} {tuple(saved[key].shape)} of the file is not in the model"
    return ""


def _kind(value: Tensor) -> str:
    if value.is_floating_point() and value.element_size() > 1:
        return "float"
    odd = value.is_floating_point() or value.is_complex() or value.dtype == torch.bool
    return str(value.dtype) if odd else "integer"
