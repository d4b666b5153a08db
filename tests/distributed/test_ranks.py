"""Several processes that train one model: the steps, the stopping epoch and the scores of a single one."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch_geometric.data import Data

from gat_pyg.data import planted
from gat_pyg.distributed import monitor, ranks
from gat_pyg.distributed.monitor import RankMonitor
from gat_pyg.distributed.ranks import SILENT, Beats
from gat_pyg.training.loading import TaskData
from gat_pyg.training.shares import Shares
from tests.distributed import train_objectives
from tests.distributed.commands import assert_same_training, finish, started, trained, wait_until

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes are stopped by POSIX signals")

COMMAND = ("-m", "gat_pyg.run", "dataset=planted", "dataset.graphs=14", "dataset.nodes=20", "model=gat")
COMMAND += ("+trainer.precision=64-true", "training.batch_size=3", "training.lr=0.02", "training.patience=4")
COMMAND += ("training.max_epochs=40",)


def command(outputs: Path, *arguments: str, world: int = 1) -> Any:
    several = ("trainer=ddp_cpu", f"trainer.devices={world}") if world > 1 else ()
    return started(*COMMAND, *several, *arguments, f"outputs={outputs}")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The outputs of a training in one process, which the stopping rule ended."""
    outputs = tmp_path_factory.mktemp("alone")
    finish(command(outputs))
    assert 5 < trained(outputs)[0].epochs < 40
    return outputs


@pytest.mark.parametrize(
    ("before", "after"), [(2, 1), pytest.param(1, 3, marks=pytest.mark.weekly)]
)  # three: one more than there are graphs to validate on
def test_any_number_of_ranks_continues_from_a_checkpoint_as_one_process(
    before: int, after: int, alone: Path, tmp_path: Path
):
    process = command(tmp_path, "checkpoint_every=0", world=before)
    wait_until(lambda: any(tmp_path.rglob("last.ckpt")), process)
    if before == 1:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    else:  # the second alone, whose end leaves the first in a collective
        os.kill(second(process), signal.SIGKILL)
        assert "gat-pyg: Rank 1 of 2 ended or cannot be reached, so the others stop." in finish(process, status=1)
    assert not list(tmp_path.rglob("result.json"))
    finish(command(tmp_path, "checkpoint_every=0", "ckpt_path=last", world=after))
    assert len(list(tmp_path.glob("*_planted"))) == 1
    assert_same_training(tmp_path, alone)


def test_two_ranks_train_every_objective_in_batches_as_one_process(tmp_path: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    module, root = ("-m", train_objectives.__name__), Path(__file__).parents[2]
    paths = {1: tmp_path / "1.pt", 2: tmp_path / "2.pt"}
    several = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": "0"}
    processes = [started(*module, str(paths[1]), "1", cwd=root)]
    processes += [started(*module, str(paths[2]), "2", cwd=root, LOCAL_RANK=str(rank), **several) for rank in range(2)]
    for process in processes:
        _, stderr = process.communicate(timeout=240)
        assert process.returncode == 0, stderr
    one, two = (torch.load(path) for path in paths.values())
    assert one.keys() == two.keys() == {*train_objectives.SETUPS}
    for name, values in one.items():
        assert any(key.startswith("test_") for key in values)
        for key, value in values.items():
            torch.testing.assert_close(two[name][key], value, rtol=0, atol=1e-10)


def slurm(rank: int, port: int) -> dict[str, str]:
    """The variables that srun sets for one of two tasks."""
    job = {"JOB_ID": f"{20000 + port % 10000}", "JOB_NAME": "gat", "NTASKS": "2", "NTASKS_PER_NODE": "2"}
    task = {"PROCID": str(rank), "LOCALID": str(rank), "NODEID": "0", "NODELIST": "localhost"}
    return {f"SLURM_{name}": value for name, value in {**job, **task}.items()}


def torchrun(rank: int, port: int) -> dict[str, str]:
    """The variables that torchrun sets for the process of one of two machines."""
    job = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    job |= {"TORCHELASTIC_RUN_ID": "gat", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    return {**job, "RANK": str(rank), "LOCAL_RANK": "0", "GROUP_RANK": str(rank)}


def processes_of_torchrun(*run: str) -> list[Any]:
    """Start torchrun itself on two machines, whose processes import everything again."""
    launch = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=0"]
    launch += ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{29400 + os.getpid() % 1000}", "--rdzv-id=gat"]
    return [started(*launch, *run, "+model.backend=segment") for _ in range(2)]


@pytest.mark.parametrize(
    "launcher", [torchrun, *(pytest.param(each, marks=pytest.mark.weekly) for each in (slurm, None))]
)
def test_processes_of_a_launcher_leave_one_folder(launcher: Any, alone: Path, tmp_path: Path):
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # torchrun's
    machines = [] if launcher is slurm else ["trainer.devices=1", "+trainer.num_nodes=2"]
    run = (*COMMAND, "trainer=ddp_cpu", *machines, f"outputs={tmp_path}")
    if launcher is None:
        processes = processes_of_torchrun(*run)
    else:
        processes = [started(*run, **launcher(rank, store.port)) for rank in range(2)]
    for process in processes:
        _, stderr = process.communicate(timeout=240)
        assert process.returncode == 0, stderr
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1
    assert_same_training(tmp_path, alone)


# Lost ranks ---------------------------------------------------------------------------------------------------------

WAITING_TEST = """
import functools, pathlib, time
import gat_pyg.run
from gat_pyg import training
from gat_pyg.distributed import monitor
def wait(module, data, batch_idx):
    pathlib.Path(f"testing-{module.trainer.global_rank}").touch()
    time.sleep(100)  # as in a kernel that waits for the others
training.Inductive.test_step = wait
monitor.Beats = functools.partial(monitor.Beats, silent=6.0)  # Lightning looks for dead processes every 5 s
gat_pyg.run.main()
"""


def second(process: Any) -> int:
    """Return the id of the process that the first rank started."""
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[-1])


def test_a_rank_that_is_killed_or_does_not_answer_is_named_and_the_others_end(tmp_path: Path):
    assert SILENT < 60
    processes = {}
    for number in (signal.SIGKILL, signal.SIGSTOP):  # the second as without a network
        folder = tmp_path / number.name
        folder.mkdir()
        (folder / "waiting.py").write_text(WAITING_TEST)
        run = ["waiting.py", *COMMAND[2:], "model.hidden_channels=[4]", "training.max_epochs=1", "trainer=ddp_cpu"]
        processes[number] = started(*run, cwd=folder)
    lost = {}
    for number, process in processes.items():
        wait_until(lambda folder=tmp_path / number.name: len(list(folder.glob("testing-*"))) == 2, process)
        lost[number] = second(process)
        os.kill(lost[number], number)
    for number, process in processes.items():
        stderr = finish(process, status=1)
        with suppress(ProcessLookupError):
            os.kill(lost[number], signal.SIGKILL)
        assert "Rank 1 of 2 ended or cannot be reached, so the others stop." in stderr


@pytest.mark.skipif(sys.platform != "linux", reason="limits the files of another process")
def test_a_full_disk_ends_all_ranks_and_loses_nothing(alone: Path, tmp_path: Path):
    import resource

    process = command(tmp_path, "checkpoint_every=0", world=2)
    wait_until(lambda: any(tmp_path.rglob("last.ckpt")), process)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))  # for metrics.csv alone
    stderr = finish(process, status=1)
    assert "last.ckpt could not be written: it would exceed the limit on the size of a file" in stderr
    wait_until(lambda: "Rank 0 of 2 ended or cannot be reached" in process.communicate()[1])  # by the second one
    assert not list(tmp_path.rglob(".*.part"))
    finish(command(tmp_path, "ckpt_path=last", "checkpoint_every=0"))
    assert_same_training(tmp_path, alone)


def test_a_rank_without_heartbeats_is_named_and_the_others_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(ranks, "BEAT", 0.1)
    ended: list[tuple[int, int]] = []
    first = Beats("localhost", 0, 0, 3, silent=1.0, end=lambda status: ended.append((0, status)))
    others = [Beats("localhost", first.port, rank, 3, 1.0, lambda status: ended.append((1, status))) for rank in (1, 2)]
    time.sleep(1.5)
    assert not ended and first.lost(1.0) == others[0].lost(1.0) == []
    others[1].stop()  # as when it is killed
    wait_until(lambda: len(ended) == 2)
    assert sorted(ended) == [(0, 1), (1, 1)]
    assert first.lost(1.0) == [2]
    assert capsys.readouterr().err.count("Rank 2 of 3 ended or cannot be reached") == 2


def test_a_store_that_does_not_answer_means_that_the_first_rank_is_lost(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ranks, "BEAT", 0.1)
    ended: list[int] = []
    first = Beats("localhost", 0, 0, 2)
    other = Beats("localhost", first.port, 1, 2, silent=0.5, end=ended.append)
    monkeypatch.setattr(other, "_store", SimpleNamespace(add=lambda *_: time.sleep(60)))  # as after a power failure
    wait_until(lambda: len(ended) == 1)
    assert ended == [1] and other.lost(0.5) == [0]
    first.stop()


@pytest.mark.parametrize(("fn", "hook"), [("test", "on_test_start"), ("validate", "on_validation_start")])
def test_sigterm_ends_a_rank_without_a_collective_and_is_forwarded(fn: str, hook: str, monkeypatch: pytest.MonkeyPatch):
    forwarded: list[int] = []
    launched = [SimpleNamespace(send_signal=forwarded.append)]
    launcher = SimpleNamespace(procs=launched, kill=lambda number: None)
    strategy = SimpleNamespace(broadcast=lambda port: port, launcher=launcher, root_device=torch.device("cpu"))
    trainer: Any = SimpleNamespace(world_size=2, global_rank=0, local_rank=0, strategy=strategy)
    trainer.state, trainer._accelerator_connector = SimpleNamespace(fn=fn), SimpleNamespace(cluster_environment=None)
    connector = _SignalConnector(trainer)
    monkeypatch.setattr(monitor, "Beats", lambda *_: SimpleNamespace(port=1))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "broadcast", lambda *args, **options: pytest.fail("it waits for the others"))
    callback: Any = RankMonitor()
    callback.setup(trainer, None, fn)
    assert not launched  # Lightning's observer has nothing to observe
    connector.register_signal_handlers()
    try:
        getattr(callback, hook)(trainer, None)
        with pytest.raises(SystemExit, match="143"):
            signal.raise_signal(signal.SIGTERM)
    finally:
        connector.teardown()
    assert forwarded == [signal.SIGTERM]


# The share of a rank ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("batch_size", [4, 5, 11])
def test_a_step_has_the_same_graphs_over_any_number_of_ranks(world: int, batch_size: int):
    def steps(world: int) -> list[list[int]]:
        shares = [Shares(range(11), batch_size, rank, world, seed=3) for rank in range(world)]
        each = -(-batch_size // world)
        parts = [[list(share)[start : start + each] for start in range(0, len(list(share)), each)] for share in shares]
        assert {len(part) for part in parts} == {-(-11 // batch_size)}
        assert len({share.generator.initial_seed() for share in shares}) == world  # of the workers' draws
        assert all(-(-len(share) // each) == len(parts[0]) for share in shares)
        together = [list(itertools.chain(*step)) for step in zip(*parts, strict=True)]
        return [sorted(index for index in step if index < 11) for step in together]

    assert steps(world) == steps(1)
    assert sorted(itertools.chain(*steps(world))) == list(range(11))


def task_data(batch_size: int, rank: int) -> TaskData:
    data = TaskData(planted(graphs=14, nodes=40), batch_size)
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    data.trainer = SimpleNamespace(global_rank=rank, world_size=3, strategy=strategy)  # type: ignore[assignment]
    return data


def test_a_rank_without_a_graph_has_one_node_without_a_label():
    *_, last = task_data(batch_size=3, rank=2).train_dataloader()  # the fourth step has one of the ten graphs
    assert isinstance(last, Data) and last.num_nodes == 1 and last.y.isnan().all()
    assert last.x.shape[1:] == planted(graphs=14, nodes=40).train[0].x.shape[1:]


def test_more_ranks_than_graphs_in_a_step_are_refused():
    with pytest.raises(ValueError, match="batch_size is 2 graphs in a step over all processes, but there are 3"):
        task_data(batch_size=2, rank=0).train_dataloader()
