"""Several processes that train one model: the steps, the stop and the scores of a single one."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from safetensors.torch import load_file
from torch import Tensor
from torch_geometric.data import Data

from gat_pyg.data import planted
from gat_pyg.distributed import monitor, ranks
from gat_pyg.distributed.monitor import RankMonitor
from gat_pyg.distributed.ranks import SILENT, Beats
from gat_pyg.experiments.process import exit_on_signal
from gat_pyg.experiments.result import Result, read
from gat_pyg.training import signals
from gat_pyg.training.loading import TaskData
from gat_pyg.training.shares import Shares
from tests.distributed import train_objectives
from tests.graphs import random
from tests.processes import WITHOUT_KERNELS, python

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes are stopped by POSIX signals")

EXACT = ("dataset=planted", "dataset.graphs=14", "dataset.nodes=40", "model=gat", "+trainer.precision=64-true")
SEGMENT = "+model.backend=segment"  # for processes that are not forked from ours and would compile kernels
STEPS = ("training.batch_size=3", "training.lr=0.02", "training.patience=6", "training.max_epochs=40")


def started(*arguments: str, cwd: Path | None = None, **more: str) -> Any:
    """A process of Python, which compiles nothing where it is forked."""
    quick = {"OMP_NUM_THREADS": "1", WITHOUT_KERNELS: "what is tested is not the kernels"}
    return python(*arguments, cwd=cwd, env={**os.environ, **quick, **more})


def command(outputs: Path, *arguments: str, world: int = 1) -> Any:
    several = ("trainer=ddp_cpu", f"trainer.devices={world}") if world > 1 else ()
    return started("-m", "gat_pyg.run", *EXACT, *STEPS, *several, *arguments, f"outputs={outputs}")


def ended(process: Any, status: int = 0) -> None:
    _, complaints = process.communicate(timeout=240)
    assert process.returncode == status, complaints
    assert "Warning" not in complaints, complaints


def left(outputs: Path) -> tuple[Result, dict[str, Tensor]]:
    (result,) = read(outputs / "results.jsonl")
    return result, load_file(Path(result.run_dir) / "model.safetensors")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    outputs = tmp_path_factory.mktemp("alone")
    ended(command(outputs))
    result, _ = left(outputs)
    assert 20 < 4 * result.epochs < 160  # of the 10 training graphs, four steps an epoch; the rule stopped it
    return outputs


def same(outputs: Path, alone: Path) -> None:
    (result, weights), (expected, its) = left(outputs), left(alone)
    assert (result.epochs, result.best_epoch, result.value, result.val) == (
        expected.epochs,
        expected.best_epoch,
        expected.value,
        expected.val,
    )
    assert weights.keys() == its.keys()
    for name, value in weights.items():
        assert value.dtype == torch.float64
        torch.testing.assert_close(value, its[name], rtol=0, atol=1e-10)


def test_ranks_take_the_steps_of_one_process(alone: Path, tmp_path: Path):
    ended(command(tmp_path, world=3))  # there are two graphs to validate on
    same(tmp_path, alone)


def test_two_ranks_train_every_objective_over_graphs_and_pairs_as_one_process(tmp_path: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    module, root = ("-m", train_objectives.__name__), Path(__file__).parents[2]
    paths = {1: tmp_path / "1.pt", 2: tmp_path / "2.pt"}
    several = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": "0"}
    processes = [started(*module, str(paths[1]), "1", cwd=root)]
    processes += [started(*module, str(paths[2]), "2", cwd=root, LOCAL_RANK=str(rank), **several) for rank in range(2)]
    for process in processes:
        _, complaints = process.communicate(timeout=240)
        assert process.returncode == 0, complaints
    one, two = (torch.load(path) for path in paths.values())
    assert one.keys() == two.keys() == {*train_objectives.SETUPS}
    for name, values in one.items():
        assert any(key.startswith("test_") for key in values)
        for key, value in values.items():
            torch.testing.assert_close(two[name][key], value, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_goes_on_from_a_checkpoint(before: int, after: int, alone: Path, tmp_path: Path):
    process = command(tmp_path, "checkpoint_every=0", world=before)
    wait(lambda: any(tmp_path.rglob("last.ckpt")), process)
    if before == 1:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    else:  # of two, the second alone
        os.kill(second(process), signal.SIGKILL)
        _, complaints = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "gat-pyg: Rank 1 of 2 ended or cannot be reached, so the others stop." in complaints
    assert not list(tmp_path.rglob("result.json"))
    ended(command(tmp_path, "checkpoint_every=0", "ckpt_path=last", world=after))
    assert len(list(tmp_path.glob("*_planted"))) == 1
    same(tmp_path, alone)


def test_a_rank_without_a_training_node_changes_nothing(tmp_path: Path):
    graph, generator = random(30, 30, 150), torch.Generator().manual_seed(0)
    masks = {"train_mask": [4], "val_mask": [1, 2, 3], "test_mask": list(range(10, 20))}
    arrays = {
        name: torch.zeros(30, dtype=torch.bool).index_fill(0, torch.tensor(nodes), True)
        for name, nodes in masks.items()
    }
    x = torch.randn(30, 5, generator=generator, dtype=torch.float64)
    np.savez(tmp_path / "graph.npz", x=x, edge_index=graph.index, y=1 - torch.eye(3).repeat(10, 1), **arrays)  # labels
    run = [
        "-m",
        "gat_pyg.run",
        "dataset=file",
        f"dataset.path={tmp_path / 'graph.npz'}",
        "loader=neighbor",
    ]
    run += ["loader.num_neighbors=[-1,-1]", "loader.batch_size=2", "model.dropout=0", "+trainer.precision=64-true"]
    for several in ([], ["trainer=ddp_cpu"]):
        ended(started(*run, *several, "training.max_epochs=6", f"outputs={tmp_path / str(len(several))}"))
    same(tmp_path / "1", tmp_path / "0")


@pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray")
def test_processes_of_ray_take_the_steps_of_one(alone: Path, tmp_path: Path):
    run = ["-m", "gat_pyg.run", "trainer=ray", f"outputs={tmp_path}"]
    shy = {"RAY_worker_niceness": "0", "RAY_memory_monitor_refresh_ms": "0"}  # else they give way to other processes
    process = started(*run, *EXACT, *STEPS, **shy)
    _, complaints = process.communicate(timeout=240)
    assert process.returncode == 0, complaints
    same(tmp_path, alone)
    assert not list(tmp_path.rglob(".ray"))


def test_two_machines_leave_one_folder(alone: Path, tmp_path: Path):
    launcher = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=0"]
    launcher += ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{29400 + os.getpid() % 1000}", "--rdzv-id=gat"]
    run = ["-m", "gat_pyg.run", *EXACT, *STEPS, SEGMENT, "trainer=ddp_cpu", "trainer.devices=1", "+trainer.num_nodes=2"]
    machines = [started(*launcher, *run, f"outputs={tmp_path}") for _ in range(2)]
    for machine in machines:
        _, complaints = machine.communicate(timeout=240)
        assert machine.returncode == 0, complaints
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1
    same(tmp_path, alone)


SLOW_TEST = """
import functools, pathlib, time
import gat_pyg.run
from gat_pyg import training
from gat_pyg.distributed import monitor, ranks
def waits(module, data, batch_idx):
    pathlib.Path(f"testing-{module.trainer.global_rank}").touch()
    time.sleep(100)  # as in a kernel that waits for the others
training.Inductive.test_step = waits
monitor.Beats = functools.partial(monitor.Beats, silent=4.0)
gat_pyg.run.main()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "as without a network"])
def test_who_is_lost_in_the_test_is_named_and_the_others_end(number: signal.Signals, tmp_path: Path):
    assert SILENT < 60
    (tmp_path / "slow.py").write_text(SLOW_TEST)
    run = ["slow.py", *EXACT, "model.hidden_channels=[4]", "training.batch_size=2", "training.max_epochs=1"]
    process = started(*run, "trainer=ddp_cpu", cwd=tmp_path)
    wait(lambda: len(list(tmp_path.glob("testing-*"))) == 2, process)
    other = second(process)
    os.kill(other, number)
    assert process.wait(timeout=60) == 1
    with suppress(ProcessLookupError):
        os.kill(other, signal.SIGCONT)  # it finds itself alone, and lets go of the pipe as it ends
    _, complaints = process.communicate(timeout=60)
    assert "Rank 1 of 2 ended or cannot be reached, so the others stop." in complaints


SMALL_DISK = """
set -e
mount -t tmpfs -o size=2m tmpfs "$1"
{run} checkpoint_every=0 trainer=ddp_cpu outputs="$1" &
until ls "$1"/*/last.ckpt; do kill -0 $!; sleep 0.01; done >&2
cat /dev/zero >"$1/fill" || true
wait $! || echo "status $?"
find "$1" -name '.*.part'
rm "$1/fill"
{run} checkpoint_every=0 ckpt_path=last outputs="$1" >&2
cp -r "$1" "$1.kept"
umount "$1"
cp -r "$1.kept/." "$1"
"""


@pytest.mark.skipif(subprocess.run(["unshare", "-rm", "true"]).returncode != 0, reason="mounts a small disk")
def test_a_full_disk_ends_all_and_loses_nothing(alone: Path, tmp_path: Path):
    disk = tmp_path / "disk"
    disk.mkdir()
    run = " ".join([sys.executable, "-m", "gat_pyg.run", *EXACT, *STEPS, SEGMENT])
    script = ["unshare", "-rm", "bash", "-c", SMALL_DISK.format(run=run), "bash", str(disk)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=240)
    said, complaints = process.stdout, process.stderr
    assert process.returncode == 0, complaints
    assert [line for line in said.splitlines() if not line.startswith("[Gloo]")] == ["status 1"]  # torch 2.10's Gloo
    assert "could not be written: the disk is full" in complaints
    assert "Rank 0 of 2 ended or cannot be reached" in complaints and "Traceback" not in complaints
    same(disk, alone)


def test_two_tasks_of_slurm_leave_one_folder(alone: Path, tmp_path: Path):
    job = {"JOB_ID": f"{20000 + os.getpid() % 10000}", "JOB_NAME": "gat", "NTASKS": "2", "NTASKS_PER_NODE": "2"}
    run = ["-m", "gat_pyg.run", *EXACT, *STEPS, "trainer=ddp_cpu", f"outputs={tmp_path}"]
    tasks = []
    for task in ("0", "1"):  # what srun tells each
        its = {**job, "PROCID": task, "LOCALID": task, "NODEID": "0", "NODELIST": "localhost"}
        tasks.append(started(*run, **{f"SLURM_{name}": value for name, value in its.items()}))
    for task in tasks:
        _, complaints = task.communicate(timeout=240)
        assert task.returncode == 0, complaints
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1
    same(tmp_path, alone)


def second(process: Any) -> int:
    """The process that the first one started."""
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[-1])


def wait(until: Callable[[], bool], process: Any, seconds: float = 120) -> None:
    start = time.perf_counter()
    while not until():
        assert process.poll() is None and time.perf_counter() - start < seconds, process.communicate()[1]
        time.sleep(0.01)


# Who is still there -------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "BEAT", 0.1)


def until_there_are(ended: list[Any], count: int) -> None:
    for _ in range(1200):
        if len(ended) == count:
            return
        time.sleep(0.05)
    pytest.fail(f"{ended}, expected {count} of them")


def test_whoever_is_silent_is_named_and_the_others_end(quick: None, capsys: pytest.CaptureFixture[str]):
    ended: list[tuple[int, int]] = []
    first = Beats("localhost", 0, 0, 3, silent=2.0, end=lambda status: ended.append((0, status)))
    others = [Beats("localhost", first.port, rank, 3, 2.0, lambda status: ended.append((1, status))) for rank in (1, 2)]
    time.sleep(2.5)
    assert not ended and first.lost(2.0) == others[0].lost(2.0) == []
    others[1].stop()  # as when it is killed
    until_there_are(ended, 2)
    assert sorted(ended) == [(0, 1), (1, 1)]
    assert first.lost(2.0) == [2]
    assert capsys.readouterr().err.count("Rank 2 of 3 ended or cannot be reached") == 2


def test_a_store_that_does_not_answer_is_the_silence_of_the_first(quick: None, monkeypatch: pytest.MonkeyPatch):
    ended: list[int] = []
    first = Beats("localhost", 0, 0, 2)
    other = Beats("localhost", first.port, 1, 2, silent=2.0, end=ended.append)
    monkeypatch.setattr(other, "_store", SimpleNamespace(add=lambda *_: time.sleep(60)))  # as without power there
    until_there_are(ended, 1)
    assert ended == [1] and other.lost(2.0) == [0]
    first.stop()


def test_sigterm_waits_for_no_other_process(monkeypatch: pytest.MonkeyPatch):
    def hangs(*arguments: object, **options: object) -> None:
        raise AssertionError("in a signal's handler this waits for the others")

    forwarded: list[int] = []
    strategy = SimpleNamespace(
        broadcast=lambda port: port, launcher=SimpleNamespace(kill=forwarded.append), root_device=torch.device("cpu")
    )
    trainer: Any = SimpleNamespace(world_size=2, global_rank=0, local_rank=0, strategy=strategy)
    trainer._accelerator_connector = SimpleNamespace(cluster_environment=None)
    trainer._signal_connector = _SignalConnector(trainer)
    monkeypatch.setattr(monitor, "Beats", lambda *_: SimpleNamespace(port=1))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "broadcast", hangs)
    RankMonitor().setup(trainer, None, "fit")  # type: ignore[arg-type]
    with signals.handled(exit_on_signal):
        trainer._signal_connector.register_signal_handlers()
        with pytest.raises(SystemExit, match="143"):
            signal.raise_signal(signal.SIGTERM)
    assert forwarded == [signal.SIGTERM]


# Each rank's share --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [4, 5, 11])
def test_a_step_has_the_same_graphs_over_any_number_of_ranks(world: int, batch_size: int):
    def steps(world: int) -> list[list[int]]:
        shares = [Shares(range(11), batch_size, rank, world, seed=3) for rank in range(world)]
        each = -(-batch_size // world)
        parts = [[list(share)[start : start + each] for start in range(0, len(list(share)), each)] for share in shares]
        assert {len(part) for part in parts} == {-(-11 // batch_size)}
        assert all(-(-len(share) // each) == len(parts[0]) for share in shares)
        together = [list(itertools.chain(*step)) for step in zip(*parts, strict=True)]
        return [sorted(index for index in step if index < 11) for step in together]

    assert steps(world) == steps(1)
    assert sorted(itertools.chain(*steps(world))) == list(range(11))


def test_who_has_no_graph_has_one_of_nobody():
    task = planted(graphs=14, nodes=40)
    data = TaskData(task, batch_size=3)
    data.trainer = Place(2, 3)
    *_, last = data.train_dataloader()  # of 10 graphs, the fourth step has one
    assert isinstance(last, Data) and last.num_nodes == 1 and last.y.isnan().all()
    assert last.x.shape[1:] == task.train[0].x.shape[1:]


def test_more_ranks_than_graphs_in_a_step_are_refused():
    data = TaskData(planted(graphs=14, nodes=40), batch_size=2)
    data.trainer = Place(0, 3)
    with pytest.raises(ValueError, match="batch_size is 2 graphs in a step over all processes, but there are 3"):
        data.train_dataloader()


class Place:
    def __init__(self, rank: int, world: int) -> None:
        self.global_rank, self.world_size = rank, world
