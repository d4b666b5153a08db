"""Hostile files: each is read correctly or refused by its name, and nothing in it is run.

`FUZZ_CASES` is how many files are tried, `FUZZ_SEED` of what they are drawn.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import pickletools
import re
import shutil
import signal
import struct
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch_geometric.data import Batch, Data, InMemoryDataset
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import GlobalStorage
from torch_geometric.nn import GCN

from gat_pyg.data import Task, from_file
from gat_pyg.runs.folder import settings_in
from gat_pyg.runs.model_file import save_model
from gat_pyg.runs.result import Result, read
from gat_pyg.tasks.checks import KEYS
from gat_pyg.trained.load import load
from gat_pyg.training import SafeCheckpoints
from tests.data.test_files import Gadget

resource = pytest.importorskip("resource", reason="no such limits here")

CASES = int(os.environ.get("FUZZ_CASES", "60"))
SEED = int(os.environ.get("FUZZ_SEED", "0"))
SECONDS, MIB = 20, 400  # of one file, whose honest reading takes 0.1 s and 1 MiB; the rest is for a busy machine

Files = dict[str, bytes]
Rng = np.random.Generator
NUMBERS = (0, -1, 1, 7, 255, 10**6, 2**31, 2**33, 2**40, 2**63, 10**30)
DTYPES = ("<f2", ">f4", "<f8", "<f16", "<c8", "<c16", "|O", "<U3", "|V8", "|V0", "|S2", "<M8[s]", "|b1", "|i1", "<u2")
DTYPES += (">u4", "<u8", ">i8", "<i4", "O", "()", "[('a', '<f4')]")


# Valid files --------------------------------------------------------------------------------------------------------


def graph() -> dict[str, np.ndarray[Any, Any]]:
    nodes = np.arange(12)
    masks = {f"{split}_mask": nodes % 4 == part for part, split in enumerate(("train", "val", "test"))}
    x, edge_index = np.eye(12, 5, dtype=np.float32), np.stack([nodes, np.roll(nodes, 1)])
    return {"x": x, "edge_index": edge_index, "y": nodes % 3, "edge_attr": np.ones((12, 2), np.float32), **masks}


def dumped(write: Callable[[Any], object]) -> bytes:
    buffer = io.BytesIO()
    write(buffer)
    return buffer.getvalue()


def tensors() -> dict[str, torch.Tensor]:
    return {key: torch.from_numpy(value) for key, value in graph().items()}


def old(data: Data) -> Data:
    """A graph with the attributes of PyG 1."""
    result, values = Data(), data.to_dict()
    del result.__dict__["_store"]
    result.__dict__.update(values)
    return result


PT: dict[str, Callable[[list[Data]], Any]] = {  # what is saved of six graphs
    "a graph": lambda graphs: Data(**tensors()),
    "a dict": lambda graphs: tensors(),
    "a batch": Batch.from_data_list,
    "a data set": InMemoryDataset.collate,
    "PyG 1": lambda graphs: [*map(old, graphs)],
}


def pt_files(form: str) -> Files:
    """Graphs as PyG writes them; `tests/data/test_pyg_files.py` has what its transforms leave."""
    values = {key: value for key, value in tensors().items() if "mask" not in key}
    graphs = [Data(**{**values, "x": values["x"] + number}) for number in range(6)]
    return {"mine.pt": dumped(lambda file: torch.save(PT[form](graphs), file))}


def npz_files() -> Files:
    return {"mine.npz": dumped(lambda file: np.savez(file, **graph()))}


def union_files() -> Files:
    union = {key: value for key, value in graph().items() if "mask" not in key}
    union |= {"edge_index": np.stack([np.arange(12), np.arange(12).reshape(4, 3)[:, ::-1].ravel()])}
    return {"mine.npz": dumped(lambda file: np.savez(file, batch=np.arange(12) // 3, **union))}


def folder_files() -> Files:
    return {f"mine/{key}.npy": npy(value) for key, value in graph().items()}


def npy(array: Any) -> bytes:
    return dumped(lambda file: np.save(file, array, allow_pickle=True))


def model_files(folder: Path) -> Files:
    arguments = {"in_channels": 3, "hidden_channels": 4, "num_layers": 2, "out_channels": 5}
    save_model(folder / "model", GCN(**arguments), "torch_geometric.nn.GCN", arguments, dataset="cora")
    return {"run/model.safetensors": (folder / "model").read_bytes()}


def checkpoint_files() -> Files:
    model = GCN(3, 4, 2, 5)
    optimizer = torch.optim.Adam(model.parameters())
    content = {"epoch": 3, "state_dict": model.state_dict(), "loops": {"fit": {"n": 1}}, "callbacks": {}}
    return {
        "last.ckpt": dumped(lambda f: torch.save({**content, "optimizer_states": [optimizer.state_dict()]}, f)),
    }


RESULT = Result("GAT", "cora", "accuracy", 83.1, 0, 812, 711, 82.0, 9.2, 0.011, 92373, {"torch": "2"})


# The content of a file -----------------------------------------------------------------------


def check_task(task: Task) -> None:
    for data in {id(data): data for data in task.train + task.val + task.test}.values():
        N, E = len(data.x), data.edge_index.size(1)
        assert data.x.shape == (N, task.num_features) and data.x.isfinite().all()
        assert data.edge_index.shape == (2, E) and (not E or 0 <= data.edge_index.min() <= data.edge_index.max() < N)
        if task.objective.columns == "targets":
            assert data.y.shape == (N, task.num_classes) and not data.y.isinf().any()
        elif task.objective.columns == "labels":
            assert data.y.shape == (N, task.num_classes) and ((data.y == 0) | (data.y == 1) | data.y.isnan()).all()
        else:
            assert data.y.shape == (N,) and data.y.min() >= -1 and data.y.max() < task.num_classes
        assert (task.edge_dim is None) == (data.edge_attr is None)
        assert data.edge_attr is None or data.edge_attr.shape == (E, task.edge_dim)


def stored_in(folder: Path) -> Any:
    """What NumPy or torch read in a file."""
    if (folder / "mine.npz").exists():
        with np.load(folder / "mine.npz") as stored:
            return {key: stored[key] for key in KEYS if key in stored}
    if (folder / "mine").is_dir():
        return {path.stem: np.load(path) for path in (folder / "mine").glob("*.npy") if path.stem in KEYS}
    kinds = {Data, DataEdgeAttr, DataTensorAttr, GlobalStorage}
    with torch.serialization.safe_globals(list(kinds.difference(torch.serialization.get_safe_globals()))):
        content = torch.load(folder / "mine.pt", map_location="cpu", weights_only=True)
    return content.to_dict() if isinstance(content, Data) else content


def check_graph(task: Task, folder: Path) -> None:
    """The graph has the shapes and the ids that were stored, by NumPy's or torch's own reading."""
    check_task(task)
    data, stored = task.train[0], stored_in(folder)
    if isinstance(stored, list):
        return
    has_features = stored["x"].shape[1:] != (0,)  # else x is the ids of the nodes
    assert len(data.x) == len(stored["x"]) and (data.x.shape == stored["x"].shape or not has_features)
    assert data.edge_index.tolist() == stored["edge_index"].tolist()
    assert len(data.y) == len(stored["y"])
    y = stored["y"]
    known = y.detach().double().numpy() if isinstance(y, torch.Tensor) else y.astype(float)
    read_y = data.y.double().nan_to_num(-1).flatten().numpy()
    assert np.allclose(np.nan_to_num(known, nan=-1).ravel(), read_y, rtol=1e-6, atol=0)


def check_graphs(task: Task, folder: Path) -> None:
    """Each graph is well formed; those of a union have all of its nodes and edges."""
    graphs = {id(data): data for data in (*task.train, *task.val, *task.test)}.values()
    if (folder / "mine.npz").exists():
        stored = stored_in(folder)
        assert sum(len(data.x) for data in graphs) == len(stored["x"])
        assert sum(data.num_edges for data in graphs) == stored["edge_index"].shape[1]
    for data in graphs:
        assert len(data.y) in (1, len(data.x), data.num_edges)
        assert not data.num_edges or 0 <= data.edge_index.min() <= data.edge_index.max() < len(data.x)


def check_model(model: torch.nn.Module, folder: Path) -> None:
    content = (folder / "run" / "model.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
    shapes = {key: entry["shape"] for key, entry in header.items() if key != "__metadata__"}
    assert {key: list(value.shape) for key, value in model.state_dict().items()} == shapes


def check_lines(results: list[Result], folder: Path) -> None:
    lines = (folder / "results.jsonl").read_bytes().splitlines()
    for result in results:
        assert isinstance(result.value, (int, float)) and isinstance(result.method, str)
    assert len(results) <= len(lines)


def check_result(result: Result, folder: Path) -> None:
    stored = json.loads((folder / "result.json").read_bytes())
    known = {key: value for key, value in stored.items() if hasattr(result, key) and value == value}
    assert all(getattr(result, key) == value for key, value in known.items() if value is not None)


class Reader(NamedTuple):
    files: Callable[..., Files]
    read: Callable[[Path], Any]
    check: Callable[[Any, Path], None]


def graph_in(name: str) -> Callable[[Path], Task]:
    return lambda folder: from_file(folder / name, per_class=1, val=2, test=2)


def graphs_in(name: str) -> Callable[[Path], Task]:
    return lambda folder: from_file(folder / name, val=1, test=1)


CONFIG = b"dataset:\n  name: cora\ntraining:\n  lr: 0.005\n  patience: 100\nmodel:\n  hidden_channels: [8]\nruns: 1\n"
READERS = {
    **{
        f"pt of {form}": Reader(partial(pt_files, form), graph_in("mine.pt"), check_graph)
        for form in ("a graph", "a dict")
    },
    **{
        f"pt of {form}": Reader(partial(pt_files, form), graphs_in("mine.pt"), check_graphs)
        for form in ("a batch", "a data set", "PyG 1")
    },
    "npz": Reader(npz_files, graph_in("mine.npz"), check_graph),
    "union": Reader(union_files, graphs_in("mine.npz"), check_graphs),
    "folder": Reader(folder_files, graph_in("mine"), check_graph),
    "model": Reader(model_files, lambda folder: load(folder / "run"), check_model),
    "checkpoint": Reader(
        checkpoint_files,
        lambda folder: SafeCheckpoints().load_checkpoint(folder / "last.ckpt"),
        lambda found, _: [found[key] for key in ("state_dict", "loops", "optimizer_states")],
    ),
    "results": Reader(
        lambda: {"results.jsonl": (RESULT.to_json() + "\n").encode() * 3},
        lambda folder: read(folder / "results.jsonl"),
        check_lines,
    ),
    "result": Reader(
        lambda: {"result.json": RESULT.to_json().encode()},
        lambda folder: Result.from_json((folder / "result.json").read_text(encoding="utf-8")),
        check_result,
    ),
    "config": Reader(
        lambda: {"run/config.yaml": CONFIG},
        lambda folder: settings_in(folder / "run"),
        lambda found, _: found.keys(),
    ),
}


# What is done to them -----------------------------------------------------------------------------------------------


def choice(rng: Rng, options: Any) -> Any:
    return options[int(rng.integers(len(options)))]


def on_bytes(content: bytes, rng: Rng, marker: Path) -> bytes:
    start, end = sorted(int(i) for i in rng.integers(len(content) + 1, size=2))
    flipped = bytearray(content)
    for place in rng.integers(max(1, len(content)), size=int(rng.integers(1, 9))) if content else ():
        flipped[place] ^= 1 << int(rng.integers(8))
    return choice(
        rng,
        [
            content[:end],
            content[start:],
            content[:start] + content[end:],
            content[:end] + content[start:],
            content[:start] + rng.bytes(min(end - start, 64)) + content[start + min(end - start, 64) :],
            bytes(flipped),
            bytes(flipped),
            b"",
            rng.bytes(100),
            b"\xff" * 9,
            pickle.dumps(Gadget(os.system, f"touch {marker}")),
            b"[" * 200_000,
        ],
    )


def on_digits(content: bytes, rng: Rng, marker: Path) -> bytes:
    """Another number in the place of one that is written as text."""
    results = list(re.finditer(rb"-?\d+", content))
    if not results:
        return on_bytes(content, rng, marker)
    match = choice(rng, results)
    return content[: match.start()] + str(choice(rng, NUMBERS)).encode() + content[match.end() :]


def on_pickle(content: bytes, rng: Rng, marker: Path) -> bytes:
    """Something else in the place of what one opcode of a pickle pushes."""
    try:
        ops = list(pickletools.genops(content))
        assert len(ops) > 2
    except Exception:
        return on_bytes(content, rng, marker)
    whole = [place for place, (op, _, _) in enumerate(ops[:-1]) if isinstance(ops[place][1], int) and "INT" in op.name]
    place = choice(rng, whole) if whole and rng.random() < 0.6 else int(rng.integers(1, len(ops) - 1))
    start, end = ops[place][2], ops[place + 1][2]
    wanted = f"S'touch {marker}'\n".encode()
    other = [
        b"cposix\nsystem\n(" + wanted + b"tR",
        b"c__builtin__\neval\n(" + wanted + b"tR",
        b"c__builtin__\nexec\n(" + wanted + b"tR",
        b"(" + wanted + b"iposix\nsystem\n",
        b"csubprocess\ncall\n(" + wanted + b"tR",
        content[start:end] + b"r\xff\xff\xff\xff",  # kept under a number that wants a table of 2^32
        content[start:end] * 2,
        b"]" * 5000 + b"a" * 4999,  # lists in lists
        b"]q\xfeh\xfea",  # a list that holds itself
        b"N",
        b"",
        b"}",
        b"\x8e" + struct.pack("<Q", 2**40),  # so many bytes
        b"T" + struct.pack("<I", 2**31 - 1),
    ]
    inner = pickle.dumps(choice(rng, NUMBERS), 2)[2:-1] if place in whole and rng.random() < 0.8 else choice(rng, other)
    return content[:start] + inner + content[end:]


def on_zip(content: bytes, rng: Rng, marker: Path) -> bytes:
    """Another member in an archive whose check sums are right."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    names = [name for name in members if name.endswith((".npy", ".pkl"))]
    name = choice(rng, names if rng.random() < 0.85 else list(members))
    members[name] = mutated(name, members[name], rng, marker)
    if rng.random() < 0.1:
        del members[choice(rng, list(members))]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, member in members.items():
            archive.writestr(name, member)
    return buffer.getvalue()


def on_npy(content: bytes, rng: Rng, marker: Path) -> bytes:
    """An array of another header, or of other numbers."""
    how = rng.random()
    if how < 0.2:
        return re.sub(rb"'[<>|][a-z]\d+'", repr(choice(rng, DTYPES)).encode(), content, count=1)
    if how < 0.4:
        head = content[10 : content.index(b"\n") + 1]
        return content[:10] + on_digits(head, rng, marker)[: len(head)].ljust(len(head)) + content[10 + len(head) :]
    try:
        array = np.load(io.BytesIO(content))
        other = choice(
            rng,
            [
                lambda: array.astype(choice(rng, DTYPES[:18])),
                lambda: array[: int(rng.integers(len(array) + 1))],
                lambda: array.T,
                lambda: array[None],
                lambda: array.ravel(),
                lambda: array.sum(),
                lambda: np.where(rng.random(array.shape) < 0.1, choice(rng, (np.nan, np.inf, -1.0, 1e300, 0.5)), array),
                lambda: np.where(rng.random(array.shape) < 0.1, choice(rng, (-5, 2**31, 2**62)), array.astype(int)),
                lambda: np.array([Gadget(os.system, f"touch {marker}")], dtype=object),
                lambda: np.asfortranarray(array),
                lambda: np.full_like(array, -1),
            ],
        )()
        return npy(other)
    except (ValueError, TypeError):  # what cannot be converted
        return on_bytes(content, rng, marker)


def on_json(value: Any, rng: Rng, marker: Path) -> Any:
    """Something else somewhere in what a JSON text holds."""
    inner = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    if len(inner) and rng.random() < 0.8:
        key = choice(rng, list(inner))
        changed = dict(value) if isinstance(value, dict) else list(value)
        if rng.random() < 0.1:
            del changed[key]
        elif isinstance(value[key], str) and value[key].startswith("{"):
            changed[key] = json.dumps(on_json(json.loads(value[key]), rng, marker))
        else:
            changed[key] = on_json(value[key], rng, marker)
        return changed
    deep: Any = []
    for _ in range(800):
        deep = [deep]
    target = {"_target_": "os.system", "command": f"touch {marker}"}
    names = ("os.system", "gat_pyg.run.os.system", "gat_pyg..x", "gat_pyg.\0", "torch_geometric.nn.Sequential", "F64")
    others = (*NUMBERS, *names, None, True, 0.5, float("inf"), float("nan"), [], {}, [1] * 9, [-1, 3], deep, target)
    return choice(rng, [*others, [value], {"a": value}])


def on_text(content: bytes, rng: Rng, marker: Path) -> bytes:
    try:
        return json.dumps(on_json(json.loads(content), rng, marker)).encode()
    except ValueError:
        return on_digits(content, rng, marker)


def on_safetensors(content: bytes, rng: Rng, marker: Path) -> bytes:
    size = struct.unpack("<Q", content[:8])[0]
    if rng.random() < 0.1:
        return struct.pack("<Q", choice(rng, (0, 1, size + 8, 2**20, 2**40, 2**63))) + content[8:]
    header = json.loads(content[8 : 8 + size])
    if rng.random() < 0.5:
        header["__metadata__"] = on_json(header["__metadata__"], rng, marker)
    else:
        header = on_json(header, rng, marker)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + size :]


def on_yaml(content: bytes, rng: Rng, marker: Path) -> bytes:
    line = choice(
        rng,
        [
            f'a: !!python/object/apply:os.system ["touch {marker}"]',
            f'a: !!python/object/new:os.system ["touch {marker}"]',
            "a: ${oc.env:HOME}",
            "a: ${b}\nb: ${a}",
            "a: ${",
            "a: *b",
            "- 1",
            "3",
            "a: " + "[" * 3000,
            "\tx",
            "a: \0",
            "? [1, 2]\n: 3",
            "runs: 2",
        ],
    ).encode()
    lines = content.splitlines()
    place = int(rng.integers(len(lines) + 1))
    return b"\n".join([*lines[:place], line, *lines[place:]]) + b"\n"


FORMS: dict[str, Callable[[bytes, Rng, Path], bytes]] = {
    ".npz": on_zip,
    ".pt": on_zip,
    ".ckpt": on_zip,
    ".pkl": on_pickle,
    ".npy": on_npy,
    ".json": on_text,
    ".jsonl": on_text,
    ".safetensors": on_safetensors,
    ".yaml": on_yaml,
}


def mutated(name: str, content: bytes, rng: Rng, marker: Path) -> bytes:
    change = on_bytes if rng.random() < 0.3 else FORMS.get(Path(name).suffix, on_pickle)
    return change(content, rng, marker)


# One after the other ------------------------------------------------------------------------------------------------


class Overtime(BaseException):
    """Not an Exception, so that no reader can take it for a broken file."""


@contextmanager
def bounded() -> Iterator[None]:
    """Interrupt what takes longer than `SECONDS`, and raise where the process has grown by more than `MIB`."""

    def late(number: int, frame: FrameType | None) -> None:
        raise Overtime(f"still reading after {SECONDS} s")

    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    handler = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    if grown > MIB or time.monotonic() - start > SECONDS:
        raise Overtime(f"{grown:.0f} MiB, {time.monotonic() - start:.0f} s")


def outcome(reader: Reader, folder: Path) -> str:
    """Read the files: "read" where they are what they say, "refused" where the error names one of them."""
    try:
        with bounded():
            results = reader.read(folder)
    except (ValueError, OSError) as error:
        if str(folder) not in str(error) and reader is not READERS["result"]:  # which is a text, of no file
            raise AssertionError(f"the message names no file: {type(error).__name__}: {error}") from error
        if ("allow_pickle=" in str(error) and "allow_pickle=False" not in str(error)) or "weights_only" in str(error):
            raise AssertionError(f"the message says how to run the file: {error}") from error
        return "refused"
    reader.check(results, folder)
    return "read"


def write(files: Files, folder: Path) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="no alarm here")
@pytest.mark.parametrize("kind", READERS)
def test_a_hostile_file_is_read_as_what_it_says_or_refused(kind: str, tmp_path: Path):
    reader, marker = READERS[kind], tmp_path / "it_ran"
    valid = reader.files(tmp_path) if kind == "model" else reader.files()
    write(valid, tmp_path / "valid")
    assert outcome(reader, tmp_path / "valid") == "read"
    wrong, counts = [], {"read": 0, "refused": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in range(-(-CASES // len(READERS))):
            rng, folder = np.random.default_rng([SEED, case, *kind.encode()]), tmp_path / str(case)
            name = choice(rng, list(valid))
            write({**valid, name: mutated(name, valid[name], rng, marker)}, folder)
            try:
                counts[outcome(reader, folder)] += 1
            except (Exception, Overtime) as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                wrong.append(
                    f"case {case}, {name}: {where.filename}:{where.lineno}: {type(error).__name__}: {error}"[:600]
                )
            if marker.exists():
                wrong.append(f"case {case}, {name}: it ran code")
                marker.unlink()
            shutil.rmtree(folder)
    print(f"{kind}: {counts}")
    assert not wrong, f"{len(wrong)} of {counts}:\n" + "\n".join(wrong)
