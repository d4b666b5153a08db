"""A graph in parts, one for each process: the outputs, gradients and trainings of one process with the whole graph."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.data import Data

from gat_pyg import GATConv, GATv2Conv
from gat_pyg.distributed import halo
from gat_pyg.distributed.halo import Part, divided
from gat_pyg.models import GAT
from gat_pyg.philox import keyed
from tests.distributed.commands import assert_same_training, finish, started, wait_until
from tests.processes import start_server, without_kernels

KEY = torch.tensor(2**40 + 5)
BLOCKS: dict[str, Any] = {
    "pre_linear": True,
    "norm": nn.LayerNorm,
    "norm_first": True,
    "feed_forward": 1,
    "input_dropout": 0.2,
}


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
        "authors": lambda: GAT(**text, residual=[True, True, False], reproduction=True),
        "constant": lambda: GAT(**text, mechanism="constant"),
        "dot": lambda: GAT(**text, mechanism="dot"),
        "gatv2": lambda: GAT(**text, mechanism="gatv2"),
        "edge features": lambda: GAT(**text, edge_dim=2),
        "blocks": lambda: GAT(**text, **BLOCKS),
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


def output(model: nn.Module, data: Data) -> Tensor:
    """Return a model's output in training mode."""
    takes = getattr(getattr(model, "module", model), "supports_edge_attr", False)
    options = {"edge_attr": data.edge_attr} if takes else {}
    with keyed(KEY.to(data.x.device)):
        return model(data.x, data.edge_index, **options)


def gradients(model: nn.Module, out: Tensor, data: Data, num_labels: int) -> list[Tensor]:
    """Return the gradients of the mean loss over so many labels."""
    rows = data.train_mask
    loss = nn.functional.cross_entropy(out[rows], data.y[rows], reduction="sum") / num_labels
    return list(torch.autograd.grad(loss, list(model.parameters())))


def assert_same_as_whole(model: nn.Module, data: Data, part: Data, with_ddp: bool = True) -> None:
    """Check the rows and the summed gradients of the parts against the whole graph, without DDP or with it, too."""
    labels = int(data.train_mask.sum())
    expected = output(model, data)
    expected_grads = gradients(model, expected, data, labels)
    with part.part.joined(model, part.edge_index):
        out, again = output(model, part), output(model, part)
    grads = gradients(model, out, part, labels)  # outside of the context, as in a training
    assert torch.equal(out, again)
    torch.testing.assert_close(out, expected[part.part.nodes], rtol=0, atol=1e-10)
    for grad, total in zip(grads, expected_grads, strict=True):
        summed = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed)
        torch.testing.assert_close(summed, total, rtol=0, atol=1e-10)

    if not with_ddp:
        return
    # a bucket for each weight: its sum begins between the exchanges of the backward pass, in the same place on all
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-6)
    for _ in range(2):  # in the second step DDP has sorted its buckets by the first
        ddp.zero_grad()
        with part.part.joined(model, part.edge_index):
            out = output(ddp, part)
        rows = part.train_mask
        loss = nn.functional.cross_entropy(out[rows], part.y[rows], reduction="sum") / labels
        (loss * dist.get_world_size()).backward()
        for parameter, total in zip(model.parameters(), expected_grads, strict=True):
            torch.testing.assert_close(parameter.grad, total, rtol=0, atol=1e-10)


def compare(rank: int, world: int, store: str, backend: str, names: Sequence[str]) -> None:
    """Compare models on a graph in `world` parts, then one of them on a graph without edges for some."""
    device = torch.device("cpu") if backend == "gloo" else torch.device("cuda", rank)
    dist.init_process_group(backend, f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60))
    data = graph(60, 400)
    whole = data.clone().to(device)
    part = divided(data, rank, world, device)[0].to(device)
    for name in names:
        torch.manual_seed(0)
        assert_same_as_whole(models()[name]().to(device), whole, part, with_ddp=name in ("text", "others"))
    # one process has no edge and no label, then one no node at all
    data.edge_index, data.edge_attr = data.edge_index[:, data.edge_index.amax(0) < 20], None
    data.train_mask[20:] = False
    for owner in (torch.arange(60) * world // 60, torch.zeros(60, dtype=torch.long)):
        part = Part.of(data.edge_index, owner, rank, world).take(data).to(device)
        assert_same_as_whole(models()["text"]().to(device), data.clone().to(device), part)
    dist.destroy_process_group()


def process(rank: int, worlds: Sequence[int], store: str, backend: str) -> None:
    without_kernels("tested in one process, below")
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    for world in worlds:
        if rank < world:
            compare(rank, world, f"{store}-{world}", backend, [*models()] if world == worlds[0] else ["text"])


@pytest.mark.skipif(sys.platform == "win32", reason="gloo rendezvous by a file")
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_graph_in_parts_has_the_outputs_and_gradients_of_the_whole(backend: str, tmp_path: Path):
    worlds = [world for world in (3, 2) if backend == "gloo" or world <= torch.cuda.device_count()]
    if not worlds:
        pytest.skip("needs two GPUs")
    start_server()
    arguments = (worlds, str(tmp_path / "store"), backend)
    context = get_context("forkserver")
    processes = [context.Process(target=process, args=(rank, *arguments), daemon=True) for rank in range(worlds[0])]
    for each in processes:
        each.start()
    for each in processes:
        each.join(200)
    assert [each.exitcode for each in processes] == [0] * worlds[0]


@pytest.mark.kernels
@pytest.mark.parametrize("layer", ["additive", "dot", pytest.param("gatv2", marks=pytest.mark.weekly)])
def test_the_kernels_drop_the_same_edges_and_features_in_a_part_as_in_the_whole(
    layer: str, monkeypatch: pytest.MonkeyPatch
):
    data = graph(60, 400)
    data.x = data.x.double()
    options: Any = {"heads": 3, "dropout": 0.5}  # whose kernels other tests compile
    model = GATv2Conv(10, 5, **options) if layer == "gatv2" else GATConv(10, 5, mechanism=layer, **options)
    whole = output(model.double(), data)
    total = torch.autograd.grad(whole.square().sum(), [*model.parameters()])
    for rank in range(2):
        part = Part.of(data.edge_index, torch.arange(60) % 2, rank, 2).take(data)
        monkeypatch.setattr(halo, "_exchanged", lambda *_, halo=part.part.halo: data.x[halo])
        with part.part.joined(model, part.edge_index):
            out = output(model, part)
        torch.testing.assert_close(out, whole[part.part.nodes])
        grads = torch.autograd.grad(out.square().sum(), [*model.parameters()])
        total = [one - grad for one, grad in zip(total, grads, strict=True)]
    for rest in total:
        torch.testing.assert_close(rest, torch.zeros_like(rest), rtol=0, atol=1e-10)


class EachRowOnce(TorchDispatchMode):
    """Assert that an addition of rows has each row once: on a GPU, the order of atomic additions would matter."""

    def __init__(self) -> None:
        super().__init__()
        self.additions = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.ops.aten.scatter_add_.default, torch.ops.aten.index_put_.default)
        if func is torch.ops.aten.index_add_.default:
            rows = args[2]
            assert rows.unique().numel() == rows.numel()
            self.additions += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_gradients_of_fetched_rows_are_added_in_one_order(world: int, monkeypatch: pytest.MonkeyPatch):
    data = graph(60, 900)
    part = Part.of(data.edge_index, torch.arange(60) % world, 0, world)
    assert world < 3 or part.send.unique().numel() < part.send.numel()  # several fetch the same row
    monkeypatch.setattr(dist, "all_to_all_single", lambda result, rows, *_: result.normal_(generator=generator))
    generator, x = torch.Generator(), torch.randn(len(part.nodes), 3, requires_grad=True)
    grads: list[Tensor] = []
    for _ in range(2):
        with EachRowOnce() as mode:
            generator.manual_seed(0)
            grads += torch.autograd.grad(part.fetch(x)[len(x) :].sum(), x)
        assert mode.additions == world
    assert torch.equal(*grads)
    if world > 1:
        fetched = torch.zeros(len(part.halo), 3).normal_(generator=generator.manual_seed(0))
        back = torch.zeros(len(part.send), 3).normal_(generator=generator)
        assert fetched.numel() and torch.equal(grads[0], torch.zeros_like(x).index_add_(0, part.send, back))


RUN = ("-m", "gat_pyg.run", "dataset=digits", "+trainer.precision=64-true", "training.max_epochs=10")
RUN += ("checkpoint_every=0",)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_train_as_one_does(tmp_path: Path):
    for world in (1, 2):
        gpus = ("trainer=ddp", "trainer.strategy=halo", f"trainer.devices={world}", "training.cuda_graphs=false")
        run = [sys.executable, *RUN, *gpus, f"outputs={tmp_path / str(world)}"]
        subprocess.run(run, check=True, capture_output=True)
    assert_same_training(tmp_path / "2", tmp_path / "1")


@pytest.mark.skipif(sys.platform == "win32", reason="a signal ends the run")
def test_any_number_of_processes_trains_alike_and_continues_from_one_another(tmp_path: Path):
    def command(world: int, outputs: Path, *arguments: str) -> Any:
        halo = ("trainer=ddp_cpu", "trainer.strategy=halo", f"trainer.devices={world}")
        return started(*RUN, *halo, *arguments, f"outputs={outputs}")

    alone, several = tmp_path / "alone", tmp_path / "several"
    process = command(3, several)
    wait_until(lambda: any(several.rglob("last.ckpt")), process)
    process.terminate()
    assert "1,797 nodes in 3 parts; " in finish(process, status=143)
    finish(command(2, several, "ckpt_path=last"), command(1, alone))
    assert_same_training(several, alone)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_graph_on_a_gpu_has_the_same_parts_as_on_a_cpu():
    edge_index, owner = graph(60, 400).edge_index, torch.arange(60) % 3
    here, there = (Part.of(index, owner, 1, 3).to("cpu") for index in (edge_index, edge_index.cuda()))
    for field in fields(Part):
        one, other = getattr(here, field.name), getattr(there, field.name)
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


def test_a_model_that_cannot_be_trained_in_parts_is_refused():
    part = Part.of(torch.tensor([[0, 1], [1, 0]]), torch.tensor([0, 0]), 0, 1)
    backward, normed = pyg.SAGEConv(2, 2, flow="target_to_source"), pyg.GCN(2, 2, 2, norm="batch_norm")
    for model in (nn.Linear(2, 2), backward, normed, torch.compile(pyg.SAGEConv(2, 2))):
        refused = pytest.raises(ValueError, match=f"{type(model).__name__} cannot be trained on a graph in parts")
        with refused, part.joined(model, part.edge_index):
            pass


def test_owners_and_processes_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="owner names processes -1 to 0, expected 0 to 1"):
        Part.of(torch.tensor([[0], [1]]), torch.tensor([-1, 0]), 0, 2)
    with pytest.raises(ValueError, match="61 processes cannot divide 60 nodes: each needs one"):
        divided(graph(60, 10), 0, 61)
