"""The collectives of processes with a GPU each meet what nccl requires; meta tensors stand for those on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

from gat_pyg.distributed import halo, monitor
from gat_pyg.distributed.halo import HaloStrategy, Part, divided
from gat_pyg.distributed.monitor import RankMonitor
from gat_pyg.tasks import nodes
from gat_pyg.tasks.nodes import NodeLabels, NodeMultiLabels
from gat_pyg.training import Inductive, Resumable, Supervised, Transductive
from tests.distributed.test_halo import graph

CHECKED = ("all_reduce", "broadcast", "barrier", "broadcast_object_list", "all_to_all_single")
OTHERS = ("all_gather", "all_to_all", "gather", "irecv", "isend", "recv", "reduce", "scatter", "send")  # or begin so


class Nccl:
    """Replaces torch.distributed in one process: records each collective, and asserts what nccl requires."""

    def __init__(self, rank: int, world: int, patch: pytest.MonkeyPatch) -> None:
        self.rank, self.world, self.device = rank, world, torch.device("meta")
        self.calls: list[tuple[Any, ...]] = []
        self.sent: list[tuple[list[int], list[int]]] = []
        for name in {name for name in vars(dist) if name.startswith(OTHERS)}:
            patch.setattr(dist, name, lambda *args, name=name, **kwargs: pytest.fail(f"{name} has no check here"))
        for name in CHECKED:
            patch.setattr(dist, name, getattr(self, name))
        facts = {"is_initialized": True, "get_backend": "nccl", "get_world_size": world, "get_rank": rank}
        for name, value in facts.items():
            patch.setattr(dist, name, lambda *args, value=value: value)

    def _check(self, tensor: Tensor) -> None:
        assert tensor.device == self.device, f"rank {self.rank} has a tensor on {tensor.device}"
        assert tensor.layout is torch.strided and tensor.is_contiguous(), tensor

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False):
        self._check(tensor)
        self.calls.append(("all_reduce", op, tensor.dtype, tensor.shape))

    def broadcast(self, tensor: Tensor, src: int = 0, group: Any = None, async_op: bool = False):
        assert tensor.is_cpu if group == "gloo" else self._check(tensor) is None
        self.calls.append(("broadcast", src, tensor.dtype, tensor.shape))

    def barrier(self, group: Any = None, async_op: bool = False, device_ids: list[int] | None = None):
        assert device_ids in (None, [self.rank])  # by None it is the GPU that the process group was bound to
        self.calls.append(("barrier",))

    def broadcast_object_list(self, objects: list[Any], src: int = 0, group: Any = None, device: Any = None):
        assert device in (None, self.device)  # by None it is the current GPU
        self.calls.append(("broadcast_object_list", src, len(objects)))

    def all_to_all_single(self, output: Tensor, input: Tensor, received: list[int], sent: list[int]):
        self._check(output)
        self._check(input)
        assert output.dtype == input.dtype and output.shape[1:] == input.shape[1:]
        assert (output.size(0), input.size(0)) == (sum(received), sum(sent))
        assert len(received) == len(sent) == self.world
        assert {type(size) for size in (*received, *sent)} == {int}  # on a GPU they would be waited for
        self.calls.append(("all_to_all_single", input.dtype, input.shape[1:]))
        self.sent.append((sent, received))


def agree(ranks: Sequence[Nccl]) -> None:
    """All ranks call the same collectives in one order, and each receives what the others send; else nccl hangs."""
    assert all(rank.calls == ranks[0].calls for rank in ranks)
    for exchange in zip(*(rank.sent for rank in ranks), strict=True):
        for sender, (sent, _) in enumerate(exchange):
            assert sent == [received[sender] for _, received in exchange]


Ranks = Callable[[int], Iterator[Nccl]]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """Run the ranks one after the other, then compare their collectives. Values read from a GPU are 0."""

    def each(world: int) -> Iterator[Nccl]:
        finished = []
        for rank in range(world):
            with monkeypatch.context() as patch:
                for name, zero in {"__int__": lambda self: 0, "tolist": lambda self: [0] * self.numel()}.items():
                    read = getattr(Tensor, name)
                    patch.setattr(
                        Tensor, name, lambda self, read=read, zero=zero: (zero if self.is_meta else read)(self)
                    )
                finished.append(Nccl(rank, world, patch))
                yield finished[-1]
        agree(finished)

    generators: list[Any] = []
    yield lambda world: generators.append(each(world)) or generators[-1]  # type: ignore[func-returns-value]
    for generator in generators:
        generator.close()  # of a test that failed


OWNERS: dict[str, Callable[[int], Tensor]] = {
    "ranges": lambda world: torch.arange(60) * world // 60,
    "scattered": lambda world: torch.arange(60) % world,
    "no nodes but for the first": lambda world: torch.zeros(60, dtype=torch.long),
}


class Sum(MessagePassing):
    """A layer without a kernel, which would need values."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inner, outer))

    def forward(self, x: tuple[Tensor, Tensor], edge_index: Tensor) -> Tensor:
        (src, dst), (x_src, x_dst) = edge_index, x
        return (x_dst + torch.zeros_like(x_dst).index_add(0, dst, x_src.index_select(0, src))) @ self.weight


class Net(nn.Module):
    """Three layers: gradients go back to others from the last two."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Sum(*sizes) for sizes in ((10, 8), (8, 6), (6, 4)))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, edge_index)
        return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_rows_of_the_halo_and_their_gradients_go_from_gpu_to_gpu(
    world: int, owner: str, dtype: torch.dtype, ranks: Ranks
):
    data = graph(60, 400)
    data.edge_index = data.edge_index[:, data.edge_index.amax(0) < 50]  # none for who has the last nodes
    for rank in ranks(world):
        part = Part.of(data.edge_index, OWNERS[owner](world), rank.rank, world).take(data).to(rank.device)
        part.x, model = part.x.to(dtype), Net().to(rank.device, dtype)
        with part.part.joined(model, part.edge_index):
            out = model(part.x, part.edge_index)
        assert (out.device, out.dtype, out.shape) == (rank.device, dtype, (len(part.y), 4))
        torch.autograd.grad(out.sum(), list(model.parameters()))
        widths = [10, 8, 6, 6, 8]  # three layers forward, and back all but the data's
        assert rank.calls == [("all_to_all_single", dtype, (width,)) for width in widths]
        forward, backward = rank.sent[:3], rank.sent[3:]
        assert backward == [(received, sent) for sent, received in forward[:0:-1]]
        torch.autograd.grad(part.part.fetch(part.x.requires_grad_()).sum(), part.x)  # expanded: one number for all


def test_the_owners_of_the_nodes_are_broadcast_by_gloo(ranks: Ranks, monkeypatch: pytest.MonkeyPatch):
    data, owner, to = graph(60, 400), torch.arange(60) // 30, Tensor.to

    def back(self: Tensor, *args: Any) -> Tensor:
        """Copy to the CPU what meta tensors have no values for."""
        return owner if self.is_meta and torch.device(*args).type == "cpu" else to(self, *args)

    monkeypatch.setattr(halo, "partition", lambda *_: owner)
    for rank in ranks(2):
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "to", back)
            patch.setattr(Tensor, "cpu", lambda self: back(self, "cpu"))
            patch.setattr(dist, "new_group", lambda timeout, backend: backend)
            patch.setattr(torch, "empty", lambda *size, **_: owner.clone())  # as received
            part, _ = divided(data, rank.rank, 2, rank.device)
        assert part.part.nodes.tolist() == (owner == rank.rank).nonzero().view(-1).tolist()
        fetched = ("all_reduce", dist.ReduceOp.SUM, torch.int64, ())
        assert rank.calls == [("broadcast", 0, torch.int64, (60,)), fetched]


def trainer_of(rank: Any, strategy: type[DDPStrategy]) -> Any:
    """The part of a process's trainer that a module and the callbacks use."""
    environment = LightningEnvironment()
    environment.local_rank = lambda: rank.rank  # type: ignore[method-assign]
    devices = [torch.device("cpu")] * rank.world
    devices[rank.rank] = rank.device
    ddp = strategy(accelerator=CUDAAccelerator(), parallel_devices=devices, cluster_environment=environment)
    state = {"world_size": rank.world, "global_rank": rank.rank, "local_rank": rank.rank, "strategy": ddp}
    state |= {"state": SimpleNamespace(fn="fit"), "sanity_checking": False, "loggers": [], "callback_metrics": {}}
    return SimpleNamespace(
        **state, accumulate_grad_batches=1, lr_scheduler_configs=[], precision="32-true", current_epoch=0
    )


class Rows(nn.Module):
    """Logits of nodes by themselves."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weights = nn.Linear(10, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.weights(x)


@pytest.mark.parametrize("strategy", [DDPStrategy, HaloStrategy])
@pytest.mark.parametrize("setup", [Inductive, Transductive])
@pytest.mark.parametrize("multilabel", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_losses_and_scores_are_pooled_on_the_gpu(
    strategy: type[DDPStrategy],
    setup: type[Supervised],
    multilabel: bool,
    dtype: torch.dtype,
    ranks: Ranks,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(nodes, "mask_to_index", lambda mask: torch.arange(3, device=mask.device))
    for rank in ranks(2):
        data = graph(12, 30).to(rank.device)
        data.x = data.x.to(dtype)
        data.y = data.y if not multilabel else torch.ones(12, 4, device=rank.device)
        module = setup(Rows(4), NodeMultiLabels(4) if multilabel else NodeLabels(4)).to(rank.device, dtype)
        module._trainer = trainer_of(rank, strategy)
        loss = module.training_step(data, 0)
        assert loss.device == rank.device and loss.requires_grad
        with torch.no_grad():
            module.validation_step(data, 0)
        module.on_validation_epoch_end()
        assert {*module.trainer.callback_metrics} >= {"train_loss", "val_loss"}
        wide = torch.promote_types(dtype, torch.float32)
        counts = 5 if multilabel else 3  # loss, labels and those that are right; or TP, FP, FN
        pooled = [(wide, (2,)), (torch.float64, (counts,))]
        sums = [("all_reduce", dist.ReduceOp.SUM, *each) for each in [(wide, ()), *pooled]]
        assert rank.calls == [sums[0], ("barrier",), sums[1], ("barrier",), sums[2]]


@pytest.mark.parametrize("strategy", [DDPStrategy, HaloStrategy])
def test_the_processes_agree_on_a_checkpoint_by_their_gpus(strategy: type[DDPStrategy], ranks: Ranks):
    for rank in ranks(3):
        resumable = Resumable(None)
        for hook in (resumable.on_train_epoch_end, resumable.on_train_end):
            hook(trainer_of(rank, strategy), None)  # type: ignore[arg-type]
        assert rank.calls == [("barrier",), ("all_reduce", dist.ReduceOp.MAX, torch.int64, (2,))] * 2


def test_the_port_of_the_beats_is_broadcast_once(ranks: Ranks, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(monitor, "Beats", lambda *_: SimpleNamespace(port=1))
    for rank in ranks(2):
        RankMonitor().setup(trainer_of(rank, HaloStrategy), None, "fit")  # type: ignore[arg-type]
        assert rank.calls == [("broadcast_object_list", 0, 1)]
