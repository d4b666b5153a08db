"""A graph in parts, one for each process: the same numbers as of one process with the whole graph."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn as pyg
from safetensors.torch import load_file
from torch import Tensor, nn
from torch_geometric.data import Data

from gat_pyg import GATv2Conv
from gat_pyg.attention.dropout import keyed
from gat_pyg.halo import Part, divided
from gat_pyg.models import GAT
from gat_pyg.results import Result, read

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
    options = {"edge_attr": data.edge_attr} if getattr(model, "supports_edge_attr", False) else {}
    with keyed(KEY):
        return model(data.x, data.edge_index, **options)


def gradients(model: nn.Module, out: Tensor, data: Data, num_labels: int) -> list[Tensor]:
    """Those of the mean loss over so many labels."""
    rows = data.train_mask
    loss = nn.functional.cross_entropy(out[rows], data.y[rows], reduction="sum") / num_labels
    return list(torch.autograd.grad(loss, list(model.parameters())))


def same_as_one(model: nn.Module, data: Data, part: Data) -> None:
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


def process(rank: int, world: int, store: str) -> None:
    """What each of the processes does."""
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60))
    data = graph(60, 400)
    for make in models().values():
        torch.manual_seed(0)
        same_as_one(make(), data, divided(data, rank, world)[0])
    # no edge and no label for who has the last nodes, none at all for who has no nodes
    data.edge_index, data.edge_attr = data.edge_index[:, data.edge_index.amax(0) < 20], None
    data.train_mask[20:] = False
    for owner in (torch.arange(60) * world // 60, torch.zeros(60, dtype=torch.long)):
        same_as_one(models()["text"](), data, Part.of(data.edge_index, owner, rank, world).take(data))
    dist.destroy_process_group()


@pytest.mark.skipif(sys.platform == "win32", reason="gloo rendezvous by a file")
@pytest.mark.parametrize("world", [1, 2, 3])
def test_parts_give_what_the_whole_gives(world: int, tmp_path: Path):
    context = get_context("forkserver")
    context.set_forkserver_preload(["gat_pyg.halo"])  # once for all of them
    store = str(tmp_path / "store")
    started = [context.Process(target=process, args=(rank, world, store), daemon=True) for rank in range(world)]
    for one in started:
        one.start()
    for one in started:
        one.join(200)
    assert [one.exitcode for one in started] == [0] * world


RUN = ("dataset=digits", "+trainer.precision=64-true", "training.max_epochs=25", "checkpoint_every=0")


def command(outputs: Path, *arguments: str, world: int = 1) -> list[str]:
    several = ("trainer=ddp_cpu", "trainer.strategy=halo", f"trainer.devices={world}")
    return [sys.executable, "-m", "gat_pyg.run", *RUN, *several, *arguments, f"outputs={outputs}"]


def left(outputs: Path) -> tuple[Result, dict[str, Tensor]]:
    (result,) = read(outputs / "results.jsonl")
    return result, load_file(Path(result.run_dir) / "model.safetensors")


@pytest.mark.skipif(sys.platform == "win32", reason="a signal ends the run")
def test_any_number_of_processes_trains_alike_and_goes_on_from_one_another(tmp_path: Path):
    alone, several = tmp_path / "alone", tmp_path / "several"
    subprocess.run(command(alone), check=True, capture_output=True)
    begun = subprocess.Popen(command(several, world=3), stderr=subprocess.PIPE, text=True)
    while not any(several.rglob("last.ckpt")):
        assert begun.poll() is None, begun.communicate()[1]
        time.sleep(0.01)
    begun.terminate()
    _, told = begun.communicate(timeout=60)
    assert begun.returncode == 143 and "1,797 nodes in 3 parts; " in told, told
    subprocess.run(command(several, "ckpt_path=last", world=2), check=True, capture_output=True)
    (one, weights), (other, its) = left(alone), left(several)
    assert (one.epochs, one.best_epoch, one.val, one.value) == (other.epochs, other.best_epoch, other.val, other.value)
    for name, value in weights.items():
        torch.testing.assert_close(its[name], value, rtol=0, atol=1e-10)


def test_a_model_without_layers_that_take_a_graph_is_refused():
    part = Part.of(torch.tensor([[0, 1], [1, 0]]), torch.tensor([0, 0]), 0, 1)
    backward, normed = pyg.SAGEConv(2, 2, flow="target_to_source"), pyg.GCN(2, 2, 2, norm="batch_norm")
    for model in (nn.Linear(2, 2), backward, normed, torch.compile(pyg.SAGEConv(2, 2))):
        refused = pytest.raises(ValueError, match=f"{type(model).__name__} cannot be trained over a graph in parts")
        with refused, part.joined(model, part.edge_index):
            pass


def test_who_owns_a_node_has_to_be_there():
    with pytest.raises(ValueError, match="owner names processes -1 to 0, expected 0 to 1"):
        Part.of(torch.tensor([[0], [1]]), torch.tensor([-1, 0]), 0, 2)
    with pytest.raises(ValueError, match="There are 61 processes and 60 nodes: each needs one"):
        divided(graph(60, 10), 0, 61)
