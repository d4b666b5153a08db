"""A graph in parts, one for each process: the same numbers as of one process with the whole graph."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn as pyg
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.data import Data

from gat_pyg import GATv2Conv
from gat_pyg.distributed.halo import Part, divided
from gat_pyg.experiments.result import Result, read
from gat_pyg.models import GAT
from gat_pyg.philox import keyed
from tests.processes import python, start_server, without_kernels

KEY = torch.tensor(2**40 + 5)


class V2(nn.Module):
    """Layers that take features for each end, one of them PyG's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GATv2Conv(10, 4, heads=2, dropout=0.4, residual=True), pyg.SAGEConv(8, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


def models() -> dict[str, Callable[[], nn.Module]]:
    text = {"in_channels": 10, "hidden_channels": [4, 4], "out_channels": 4, "heads": [2, 2, 2], "dropout": 0.6}
    return {
        "text": lambda: GAT(**text, residual=[True, False, True]),
        "no loops": lambda: GAT(**text, add_self_loops=False),
        "segment": lambda: GAT(**text, backend="segment"),
        "authors": lambda: GAT(**text, residual=[True, True, False], reproduction=True),
        "constant": lambda: GAT(**text, mechanism="constant"),
        "dot": lambda: GAT(**text, mechanism="dot"),
        "gatv2": lambda: GAT(**text, mechanism="gatv2"),
        "edge features": lambda: GAT(**text, edge_dim=2),
        "others": V2,
    }


def graph(num_nodes: int, num_edges: int, features: int = 10) -> Data:
    """A graph with loops and repeated edges, some nodes without one."""
    torch.manual_seed(1)
    data = Data(torch.randn(num_nodes, features), torch.randint(0, num_nodes * 9 // 10, (2, num_edges)))
    data.edge_attr = torch.randn(num_edges, 2)
    data.y = torch.randint(0, 4, (num_nodes,))
    for split in ("train", "val", "test"):
        data[f"{split}_mask"] = torch.rand(num_nodes) < 0.3
    return data


def given(model: nn.Module, data: Data) -> Tensor:
    """What a model gives in training mode."""
    takes = getattr(getattr(model, "module", model), "supports_edge_attr", False)
    options = {"edge_attr": data.edge_attr} if takes else {}
    with keyed(KEY.to(data.x.device)):
        return model(data.x, data.edge_index, **options)


def gradients(model: nn.Module, out: Tensor, data: Data, num_labels: int) -> list[Tensor]:
    """Those of the mean loss over so many labels."""
    rows = data.train_mask
    loss = nn.functional.cross_entropy(out[rows], data.y[rows], reduction="sum") / num_labels
    return list(torch.autograd.grad(loss, list(model.parameters())))


def same_as_one(model: nn.Module, data: Data, part: Data) -> None:
    """The rows and the summed gradients of the parts are those of the whole graph, without DDP and with it."""
    labels = int(data.train_mask.sum())
    expected = given(model, data)
    its = gradients(model, expected, data, labels)
    with part.part.joined(model, part.edge_index):
        out, again = given(model, part), given(model, part)
    grads = gradients(model, out, part, labels)  # behind it, as in a training
    assert torch.equal(out, again)
    torch.testing.assert_close(out, expected[part.part.nodes], rtol=0, atol=1e-10)
    for grad, one in zip(grads, its, strict=True):
        whole = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole)
        torch.testing.assert_close(whole, one, rtol=0, atol=1e-10)

    # a bucket for each weight: its sum begins in the midst of the exchanges of the backward pass, on all alike
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-6)
    for _ in range(2):  # in the second step DDP has put its buckets in the order of the first
        ddp.zero_grad()
        with part.part.joined(model, part.edge_index):
            out = given(ddp, part)
        rows = part.train_mask
        loss = nn.functional.cross_entropy(out[rows], part.y[rows], reduction="sum") / labels
        (loss * dist.get_world_size()).backward()
        for parameter, one in zip(model.parameters(), its, strict=True):
            torch.testing.assert_close(parameter.grad, one, rtol=0, atol=1e-10)


def process(rank: int, world: int, store: str, backend: str) -> None:
    """What each of the processes does; only two of them compile the kernels, which costs each the whole time."""
    if world != 2:
        without_kernels("two processes have them")
    torch.set_default_dtype(torch.float64)
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(backend, f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60))
    data = graph(60, 400)
    whole = data.clone().to(device)
    for make in models().values():
        torch.manual_seed(0)
        same_as_one(make().to(device), whole, divided(data, rank, world, device)[0].to(device))
    # no edge and no label for who has the last nodes, none at all for who has no nodes
    data.edge_index, data.edge_attr = data.edge_index[:, data.edge_index.amax(0) < 20], None
    data.train_mask[20:] = False
    for owner in (torch.arange(60) * world // 60, torch.zeros(60, dtype=torch.long)):
        part = Part.of(data.edge_index, owner, rank, world).take(data).to(device)
        same_as_one(models()["text"]().to(device), data.clone().to(device), part)
    dist.destroy_process_group()


@pytest.mark.skipif(sys.platform == "win32", reason="gloo rendezvous by a file")
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_parts_give_what_the_whole_gives(world: int, backend: str, tmp_path: Path):
    if backend == "nccl" and torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    start_server()
    context = get_context("forkserver")
    store = str(tmp_path / "store")
    started = [
        context.Process(target=process, args=(rank, world, store, backend), daemon=True) for rank in range(world)
    ]
    for one in started:
        one.start()
    for one in started:
        one.join(200)
    assert [one.exitcode for one in started] == [0] * world


class EachRowOnce(TorchDispatchMode):
    """No addition of rows meets another in the same row, where the order of a GPU's atomic additions would matter."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.ops.aten.scatter_add_.default, torch.ops.aten.index_put_.default)
        if func is torch.ops.aten.index_add_.default:
            rows = args[2]
            assert rows.unique().numel() == rows.numel()
            self.seen += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_gradients_of_fetched_rows_are_added_in_one_order(world: int, monkeypatch: pytest.MonkeyPatch):
    data = graph(60, 900)
    part = Part.of(data.edge_index, torch.arange(60) % world, 0, world)
    assert world < 3 or part.send.unique().numel() < part.send.numel()  # several fetch the same row
    monkeypatch.setattr(dist, "all_to_all_single", lambda made, rows, *_: made.normal_(generator=generator))
    generator, x = torch.Generator(), torch.randn(len(part.nodes), 3, requires_grad=True)
    found = []
    for _ in range(2):
        with EachRowOnce() as mode:
            generator.manual_seed(0)
            found += torch.autograd.grad(part.fetch(x)[len(x) :].sum(), x)
        assert mode.seen == world
    assert torch.equal(*found)
    if world > 1:
        fetched = torch.zeros(len(part.halo), 3).normal_(generator=generator.manual_seed(0))
        back = torch.zeros(len(part.send), 3).normal_(generator=generator)
        assert fetched.numel() and torch.equal(found[0], torch.zeros_like(x).index_add_(0, part.send, back))


RUN = ("dataset=digits", "+trainer.precision=64-true", "training.max_epochs=25", "checkpoint_every=0")


def command(outputs: Path, *arguments: str, world: int = 1) -> Any:
    several = ("trainer=ddp_cpu", "trainer.strategy=halo", f"trainer.devices={world}")
    return python("-m", "gat_pyg.run", *RUN, *several, *arguments, f"outputs={outputs}")


def ended(process: Any) -> None:
    _, complaints = process.communicate(timeout=240)
    assert process.returncode == 0, complaints


def left(outputs: Path) -> tuple[Result, dict[str, Tensor]]:
    (result,) = read(outputs / "results.jsonl")
    return result, load_file(Path(result.run_dir) / "model.safetensors")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_train_as_one_does(tmp_path: Path):
    for world in (1, 2):
        gpus = ("trainer=ddp", "trainer.strategy=halo", f"trainer.devices={world}", "training.cuda_graphs=false")
        run = [sys.executable, "-m", "gat_pyg.run", *RUN, *gpus, f"outputs={tmp_path / str(world)}"]
        subprocess.run(run, check=True, capture_output=True)
    (one, weights), (other, its) = left(tmp_path / "1"), left(tmp_path / "2")
    assert (one.epochs, one.best_epoch, one.val, one.value) == (other.epochs, other.best_epoch, other.val, other.value)
    for name, value in weights.items():
        torch.testing.assert_close(its[name], value, rtol=0, atol=1e-10)


@pytest.mark.skipif(sys.platform == "win32", reason="a signal ends the run")
def test_any_number_of_processes_trains_alike_and_goes_on_from_one_another(tmp_path: Path):
    alone, several = tmp_path / "alone", tmp_path / "several"
    ended(command(alone))
    begun = command(several, world=3)
    while not any(several.rglob("last.ckpt")):
        assert begun.poll() is None, begun.communicate()[1]
        time.sleep(0.01)
    begun.terminate()
    _, told = begun.communicate(timeout=60)
    assert begun.returncode == 143 and "1,797 nodes in 3 parts; " in told, told
    ended(command(several, "ckpt_path=last", world=2))
    (one, weights), (other, its) = left(alone), left(several)
    assert (one.epochs, one.best_epoch, one.val, one.value) == (other.epochs, other.best_epoch, other.val, other.value)
    for name, value in weights.items():
        torch.testing.assert_close(its[name], value, rtol=0, atol=1e-10)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_graph_on_a_gpu_has_the_parts_of_one_on_a_cpu():
    edge_index, owner = graph(60, 400).edge_index, torch.arange(60) % 3
    here, there = (Part.of(index, owner, 1, 3).to("cpu") for index in (edge_index, edge_index.cuda()))
    for field in fields(Part):
        one, other = getattr(here, field.name), getattr(there, field.name)
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


def test_a_model_without_layers_that_take_a_graph_is_refused():
    part = Part.of(torch.tensor([[0, 1], [1, 0]]), torch.tensor([0, 0]), 0, 1)
    backward, normed = pyg.SAGEConv(2, 2, flow="target_to_source"), pyg.GCN(2, 2, 2, norm="batch_norm")
    for model in (nn.Linear(2, 2), backward, normed, torch.compile(pyg.SAGEConv(2, 2))):
        refused = pytest.raises(ValueError, match=f"{type(model).__name__} cannot be trained on a graph in parts")
        with refused, part.joined(model, part.edge_index):
            pass


def test_who_owns_a_node_has_to_be_there():
    with pytest.raises(ValueError, match="owner names processes -1 to 0, expected 0 to 1"):
        Part.of(torch.tensor([[0], [1]]), torch.tensor([-1, 0]), 0, 2)
    with pytest.raises(ValueError, match="61 processes cannot divide 60 nodes: each needs one"):
        divided(graph(60, 10), 0, 61)
