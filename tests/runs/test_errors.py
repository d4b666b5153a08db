"""Errors are reported, and nothing is lost."""

from __future__ import annotations

import errno
import os
import pickle
import re
import socket
import sys
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError, URLError

import pytest
import torch
from torch import nn
from torch_geometric.datasets import Amazon

import gat_pyg.run
import gat_pyg.runs.network
import gat_pyg.runs.process
import gat_pyg.runs.stacked
import gat_pyg.sweeps.job
from gat_pyg.files import try_lock
from gat_pyg.runs.result import read
from tests.commands import NORM, SETS, SMALL, Command, runs, weights

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated")


def test_an_unknown_data_set_names_the_known_ones(command: Command):
    output = command("dataset=coral", fails=True)
    assert re.search(r"dataset=coral is unknown\. Did you mean dataset=cora\?", output)
    assert "Did you mean dataset=cora?" in command("dataset=Cora", fails=True)
    output = command("dataset=karate", fails=True)
    assert re.search(r"dataset=karate is unknown\. Known are: actor, .*cora, .*pubmed, .*pubmed_links, ", output)


@pytest.mark.parametrize(
    "error",
    [
        URLError(socket.gaierror(-2, "Name or service not known")),
        HTTPError("https://nowhere", 503, "Name or service not known", Message(), None),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_class_of_pyg_without_a_network_says_where_its_files_go(
    command: Command, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    def fail(self: Amazon) -> None:
        raise error

    monkeypatch.setattr(Amazon, "download", fail)
    mine = Path("data/Amazon/mine")
    mine.mkdir(parents=True)
    os.utime(mine, (0, 0))
    output = command("dataset=photo", "data_root=data", fails=True)
    reason = r"photo was not downloaded: (HTTP Error 503: )?Name or service not known\."
    assert re.search(rf"{reason} Put the raw files in data/Amazon/Photo/raw, or point .* or use dataset=digits", output)
    assert not Path("outputs").exists() and [*Path("data/Amazon").iterdir()] == [mine]


HALO = ("trainer=ddp_cpu", "trainer.strategy=halo")
PAIRS = ("model=gat", "dataset._target_=gat_pyg.data.links", "+dataset.dataset._target_=gat_pyg.data.digits")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["+candidates=[a]"], r"candidates is set by the command\. Leave it out\."),
        (["model=gin", "model.dropuot=0"], r"GIN has no argument model\.dropuot\. Did you mean model\.dropout\?"),
        (["model.decoder=mlp"], r"model\.decoder has no effect: digits predicts 10 node classes, and a decoder is for"),
        (["+model.decoder.decoder=mlp"], r"model\.decoder has no effect: .* is for pairs of nodes\. Leave it out\."),
        (["~training.lr"], r"training\.lr is None, expected a finite number, at least 0\."),
        (["training=abc"], r"training has no settings\."),
        (
            ["logger=null"],
            r"logger=null is no choice, expected logger=NAME with one of csv, mlflow",
        ),
        (["loader=[]"], r"loader=\[\] is no choice|loader has no settings"),
        (["~dataset"], r"~dataset is no choice, expected dataset=NAME with one of actor, amazon-ratings"),
        (["+=3"], r"\+=3 cannot be read as a setting, expected name=value"),
        (["+model.in_channels=3"], r"model\.in_channels follows from the data set, which has 64\. Leave it out\."),
        (["+trainer.max_steps=0"], r"1 of 1 runs diverged|no epoch ended with"),
        (["+trainer.max_time=abc"], r"trainer\._target_=.*: .*'abc'.* Its settings: .*max_time=abc"),
        (["dataset=file"], r"gat-pyg: dataset\.path has no value\. Pass dataset\.path=graph\.npz"),
        (["dataset=file", "dataset.path=none.npz"], r"gat-pyg: none\.npz does not exist\. Give the path"),
        (["model=gat", "model.hidden_channels=8"], r"is 8, expected a list with one entry per hidden layer, \[8\], or"),
        (["loader=neighbor", "+loader.num_links=5"], r"num_neighbors is \[10, 10\] and num_links is 5, expected only"),
        ([*PAIRS, "loader=cluster", "loader.num_parts=2", "recipe=none"], "whose ends may be in two parts"),
        (["hydra.run.dir="], r"hydra\.run\.dir is empty, expected the path of a folder\."),
        (["hydra.run.dir=null"], r"hydra\.run\.dir: field 'hydra\.run\.dir' is not Optional"),
        (
            ["vectorize=on", "runs=2", "dataset=planted", "training.cuda_graphs=true"],
            r"vectorize is on, but training\.cuda_graphs is true, and planted has many graphs\. Use vector",
        ),
        (
            ["vectorize=on", "runs=2", "logger=tensorboard"],
            r"vectorize is on, but .*TensorBoardLogger logs one run",
        ),
        (
            ["vectorize=on", "runs=2", *NORM],
            r"vectorize is on, but MLP cannot be stacked: torch\.func\.vmap fails \(.*\.item\(\)",
        ),
        (
            ["methods=[[gat,training.lr=0.01]]"],
            r"methods=\[\[gat,training\.lr=0\.01\]\] cannot be read as a setting: .*\. Quote .*'training\.lr=0\.01'",
        ),
        (["cora"], r"cora cannot be read as a setting, expected name=value"),
        (
            ["training.sparse=true", "model._target_=torch_geometric.nn.MLP"],
            r"digits with MLP does not support: .*auto",
        ),
        (["training.cuda_graphs=true"], r"cuda_graphs is true, but the device is a cpu\."),
        (["training.cuda_graphs=true", "dataset=planted"], r"cuda_graphs is true, but planted has many graphs\."),
        (["ckpt_path=x.ckpt"], r"There is no checkpoint x\.ckpt\."),
        (["ckpt_path=last"], r"There is no run with these settings in outputs\."),
        (
            ["dataset._target_=torch_geometric.datasets.KarateClub", "+dataset.transform=OneHotDegree"],
            r"dataset\.transform is 'OneHotDegree', .*: \+dataset\.transform\._target_=torch_geometric\.transforms\.",
        ),
        (["trainer=ddp_cpu"], "digits is one graph, which 2 processes do not divide by default"),
        ([*HALO, "dataset=planted"], r"trainer\.strategy is halo, which divides a single graph"),
        (HALO, "MLP cannot be trained on a graph in parts"),
        (
            [*HALO, "training.sparse=true", "model=gat"],
            r"true, but trainer\.strategy=halo fetches dense rows",
        ),
    ],
)
def test_wrong_settings_are_refused_without_a_file(command: Command, arguments: list[str], message: str):
    before = Path.cwd()
    output = command("model=mlp", *arguments, fails=True)
    (line,) = (line for line in output.splitlines() if not re.match("Compil(ing|ed) the kernels", line))
    assert re.search(message, line)
    assert before.is_dir() and not [*before.rglob("*")]


@pytest.mark.skipif(sys.platform == "win32", reason="files of POSIX")
@pytest.mark.parametrize(
    ("results", "message"),
    [
        ("/proc/x", r"/proc/x: No such file or directory\."),
        ("a_folder", r"results is a_folder, which is not a regular file\."),
        ("/dev/full", r"results is /dev/full, which is not a regular file\."),
        ("a_fifo", r"results is a_fifo, which is not a regular file\."),
        ("a_file/results.jsonl", r"results is a_file/results\.jsonl, but .*a_file is not a folder\."),
    ],
)
def test_results_that_cannot_be_written_are_refused_before_the_training(
    command: Command, place: Path, results: str, message: str
):
    (place / "a_folder").mkdir()
    (place / "a_file").touch()
    os.mkfifo(place / "a_fifo")
    before = sorted(place.rglob("*"))
    output = command(*SMALL, f"results={results}", fails=True)
    assert re.search(message, output) and "epoch" not in output
    assert sorted(place.rglob("*")) == before


def test_a_refused_setting_removes_no_folder_that_was_there(command: Command, place: Path):
    command("runs=0", "hydra.run.dir=.", fails=True)
    (place / "own").mkdir()
    command("-m", "runs=0", "seed=1,2", "outputs=own/new/outputs", fails=True)
    assert [*place.iterdir()] == [place / "own"] and not [*(place / "own").iterdir()]


def test_missing_gpus_are_named_before_anything_is_read_or_written(command: Command, monkeypatch: pytest.MonkeyPatch):
    before = Path.cwd()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(gat_pyg.sweeps.job, "read_task", lambda config: pytest.fail("the data would be downloaded"))
    output = command("trainer=ddp", "trainer.devices=2", fails=True)
    assert "requested gpu: [0, 1] But your machine only has: [0]" in output and len(output.splitlines()) == 1, output
    assert not [*before.rglob("*")]


def test_the_memory_of_the_trial_is_freed_before_each_device_trains_its_share(
    command: Command, monkeypatch: pytest.MonkeyPatch
):
    done: list[str] = []

    def spawn(*arguments: object, nprocs: int) -> None:
        assert pickle.loads(pickle.dumps(arguments))  # as it has to go to processes that are started again
        done.append(f"{nprocs} processes")

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("freed"))
    monkeypatch.setattr(gat_pyg.runs.stacked, "spawn", spawn)
    command(*SMALL, "trainer=ddp_cpu", "runs=2", "vectorize=on", fails=True)  # nobody trains
    assert done == ["freed", "2 processes"]


def test_a_share_trains_on_its_own_gpu(place: Path, monkeypatch: pytest.MonkeyPatch):
    together = gat_pyg.runs.stacked
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(together, "read_task", lambda settings: "task")
    monkeypatch.setattr(together, "one_share", lambda own, *_: calls.append(own))
    places = [together.Place(rank, 2, torch.device("cuda", rank)) for rank in range(2)]
    together._share(1, places, [together.Job(SimpleNamespace(), place)], None, os.getppid())
    assert calls == [torch.device("cuda", 1), places[1]]


def test_results_name_the_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU of {device}")
    strategy = SimpleNamespace(root_device=torch.device("cuda", 0))
    trainer = SimpleNamespace(strategy=strategy, world_size=2, precision="bf16-mixed")
    assert gat_pyg.runs.process.device_name(trainer) == "2 x GPU of cuda:0, bf16-mixed"


def test_several_processes_and_multirun_do_not_go_together(command: Command):
    other = f"dataset._target_={SETS}.KarateClub"  # which removes recipes
    assert "--multirun runs in a single process" in command("-m", other, "trainer=ddp_cpu", "seed=1,2", fails=True)


def test_a_folder_that_cannot_be_written_is_named(command: Command, place: Path):
    (place / "file").touch()
    output = command("model=mlp", "hydra.run.dir=file/run", fails=True)
    assert re.search(r"file/run: Not a directory\. Choose a folder that can be written: hydra\.run\.dir=", output)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_named(command: Command, place: Path):
    (place / "sealed").mkdir(mode=0o500)
    assert re.search(r"sealed/run: Permission denied", command("model=mlp", "hydra.run.dir=sealed/run", fails=True))


LEFT = ("last.ckpt", "model.safetensors", "result.json", "results.jsonl", "metrics.csv")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads a file's name from /proc")
def test_full_disk_is_reported_and_loses_nothing(command: Command, monkeypatch: pytest.MonkeyPatch):
    def is_the_file(descriptor: int) -> bool:
        return name in Path(os.readlink(f"/proc/self/fd/{descriptor}")).name

    def full_after(descriptor: int, data: bytes | None = None) -> int | None:
        if not is_the_file(descriptor) or (name == "last.ckpt" and not list(outputs.rglob(name))):
            return fsync(descriptor) if data is None else write(descriptor, data)
        if data is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[:7])

    fsync, write = os.fsync, os.write
    settings = (*SMALL, "training.max_epochs=4", "checkpoint_every=0")
    command(*settings, "outputs=whole")
    (whole,), (expected,) = runs("whole"), read("whole/results.jsonl")
    for name in LEFT:
        outputs = Path(f"full-{LEFT.index(name)}")
        with monkeypatch.context() as disk:
            disk.setattr(os, "fsync" if name != "metrics.csv" else "write", full_after)
            output = command(*settings, f"outputs={outputs}", fails=True)
        assert re.search(
            rf"{name} could not be written: the disk is full\. .*Free some space, .*ckpt_path=last", output
        )
        assert not list(outputs.rglob("*.part")) and not any(path.read_bytes() for path in outputs.glob("*.jsonl"))
        command(*settings, f"outputs={outputs}", *([] if name == "metrics.csv" else ["ckpt_path=last"]))
        (result,) = read(outputs / "results.jsonl")
        assert (result.value, result.val, result.best_epoch) == (expected.value, expected.val, expected.best_epoch)
        for folder in runs(str(outputs)):
            assert (folder / "metrics.csv").read_text() == (whole / "metrics.csv").read_text()
            assert all(torch.equal(value, weights(folder)[key]) for key, value in weights(whole).items())


def test_a_folder_with_a_run_is_not_written_over(command: Command):
    command(*SMALL, "training.max_epochs=2", "hydra.run.dir=mine")
    before = {path: path.read_bytes() for path in Path("mine").iterdir()}
    Path("used").mkdir()
    lock = try_lock(Path("used/.lock"))
    assert lock is not None
    assert "used is in use by another process" in command("model=mlp", "hydra.run.dir=used", fails=True)
    os.close(lock)
    output = command(*SMALL, "training.max_epochs=2", "hydra.run.dir=mine", fails=True)
    assert re.search(r"mine already holds a run, which would be lost\.", output)
    assert {path: path.read_bytes() for path in Path("mine").iterdir()} == before
    output = command(*SMALL, "training.max_epochs=3", "hydra.run.dir=mine", "ckpt_path=last", fails=True)
    assert re.search(r"started with other settings: .*training\.max_epochs was 2, is 3\.", output)
    assert {path: path.read_bytes() for path in Path("mine").iterdir()} == before


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04half a file", b"a text"])
def test_broken_checkpoint_is_refused(command: Command, place: Path, content: bytes):
    (place / "broken.ckpt").write_bytes(content)
    output = command("model=mlp", "ckpt_path=broken.ckpt", fails=True)
    assert re.search(r"broken\.ckpt cannot be read: it is truncated or not a checkpoint", output)


@pytest.mark.filterwarnings("ignore:.*he validation loss or score was not finite:UserWarning")
@pytest.mark.parametrize("vectorize", ["on", pytest.param("off", marks=pytest.mark.weekly)])
def test_a_seed_that_diverges_costs_no_other_its_result(
    command: Command, monkeypatch: pytest.MonkeyPatch, vectorize: str
):
    def poisoned(*arguments: Any) -> Any:
        built = build_model(*arguments)
        if torch.initial_seed() == 1:
            nn.init.constant_(next(built.model.parameters()), torch.nan)
        return built

    build_model = gat_pyg.runs.network.build_model
    monkeypatch.setattr(gat_pyg.runs.network, "build_model", poisoned)
    settings = (*SMALL, "training.max_epochs=3", "runs=4", f"vectorize={vectorize}")
    output = command(*settings, fails=True)
    assert re.search(r"1 of 4 runs diverged \(seed 1\): no epoch ended with a finite .* others are in outputs/", output)
    assert [result.seed for result in read("outputs/results.jsonl")] == [0, 2, 3]
    again = command(*settings, "ckpt_path=last", fails=True)
    assert "1 of 4 runs diverged (seed 1)" in again
    assert [result.seed for result in read("outputs/results.jsonl")] == [0, 2, 3]


@pytest.mark.filterwarnings("ignore:The validation loss or score was not finite:UserWarning")
@pytest.mark.parametrize("dataset", ["digits", "planted"])
def test_a_run_that_diverges_ends_at_once_without_a_result(command: Command, dataset: str):
    output = command(*SMALL, f"dataset={dataset}", "training.lr=1e30", fails=True)
    assert re.search(r"1 of 1 runs diverged \(seed 0\): .* A smaller training\.lr may help\.$", output, re.MULTILINE)
    assert not Path("outputs/results.jsonl").exists()


def test_our_bugs_keep_their_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def bug(*arguments: object) -> None:
        torch.zeros(2) + torch.zeros(3)

    monkeypatch.setattr(gat_pyg.sweeps.job, "read_task", bug)
    monkeypatch.setattr(sys, "argv", ["gat-pyg"])
    with pytest.raises(SystemExit):
        gat_pyg.run.main()
    assert "Traceback" in capsys.readouterr().err
