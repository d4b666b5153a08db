"""One graph divided among processes: each stores the rows of its own nodes and fetches those of its halo."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

from ..graph.adjacency import set_dropout_ids
from ..graph.layers import accepts_size, graph_norms, is_reversed
from ..graph.partition import partition
from ..philox import global_rows
from ..tasks.model import uncompiled


@dataclass(frozen=True, eq=False)
class Part:
    r"""One process's part of a graph whose nodes are divided among W processes.

    A process computes its own nodes, and stores all edges into them. If such an edge starts at a node of another
    process, that node belongs to the halo, and the process fetches its row before each layer. All edges of a softmax
    are stored in one process, so nothing else is communicated: the forward pass of a layer moves `F * h` elements,
    summed over the processes, and so does the backward pass of every layer but the first.

    Attributes:
        nodes: `[n]`, its own nodes, ascending.
        halo: `[h]`, nodes of other processes with an edge into one of its own, sorted by process.
        edge_index: `[2, E']`, src as indices into `[nodes, halo]`, dst as indices into `nodes`, in the graph's order.
        edges: `[E']`, the index of each edge in the graph.
        looped: `[E'']`, the same in the graph with self-loops added, as `GATConv` adds them.
        send: `[s]`, indices into `nodes` of the rows that other processes fetch, sorted by process.
        sent, fetched: the number of rows sent to and fetched from each process.
        num_nodes: N of the graph.

    Example:
        >>> edge_index = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
        >>> part = Part.of(edge_index, owner=torch.tensor([0, 0, 1, 1]), rank=0, world=2)
        >>> part.nodes.tolist(), part.halo.tolist(), part.edge_index.tolist(), part.edges.tolist()
        ([0, 1], [3], [[0, 2], [1, 0]], [0, 3])
    """

    nodes: Tensor
    halo: Tensor
    edge_index: Tensor
    edges: Tensor
    looped: Tensor
    send: Tensor
    sent: list[int]
    fetched: list[int]
    num_nodes: int

    @classmethod
    def of(cls, edge_index: Tensor, owner: Tensor, rank: int, world: int) -> Part:
        """Build the part of process `rank`; `owner` `[N]` is the rank of each node.

        Needs the whole edge list `[2, E]`, which may be memory-mapped, and no communication. Cost: O(E) time, and
        about 24 bytes of temporary memory for each edge of the whole graph.

        Raises:
            ValueError: if `owner` holds a rank outside of 0 to `world` - 1.
        """
        if owner.numel() and not 0 <= int(owner.min()) <= int(owner.max()) < world:
            raise ValueError(
                f"owner names processes {int(owner.min())} to {int(owner.max())}, expected 0 to {world - 1}."
            )
        owner = owner.to(edge_index.device)
        src, dst = edge_index
        nodes, edges = (owner == rank).nonzero().view(-1), (owner[dst] == rank).nonzero().view(-1)
        own_src, own_dst = src[edges], dst[edges]
        halo = own_src[owner[own_src] != rank].unique()
        halo = halo[torch.sort(owner[halo], stable=True).indices]
        local = torch.full_like(owner, -1)
        order = torch.arange(nodes.numel() + halo.numel(), device=owner.device)
        local[nodes], local[halo] = order.split([nodes.numel(), halo.numel()])

        out = ((owner[src] == rank) & (owner[dst] != rank)).nonzero().view(-1)  # edges into others' nodes
        keys = (owner[dst[out]] * owner.numel() + src[out]).unique()  # sorted by rank, then node, as halos are
        receiver, requested = keys // max(owner.numel(), 1), keys % max(owner.numel(), 1)

        loops = src == dst
        before = loops.cumsum(0)
        loopless = edges[~loops[edges]]
        looped = torch.cat([loopless - before[loopless], edge_index.size(1) - int(loops.sum()) + nodes])
        return cls(
            nodes,
            halo,
            torch.stack([local[own_src], local[own_dst]]),
            edges,
            looped,
            local[requested],
            receiver.bincount(minlength=world).tolist(),
            owner[halo].bincount(minlength=world).tolist(),
            owner.numel(),
        )

    def take(self, data: Data) -> Data:
        """Return this process's part of a graph's data: the rows of its nodes, its edges, and `part`, this object."""
        own = Data(data.x[self.nodes], self.edge_index, y=data.y[self.nodes], part=self)
        own.edge_attr = None if data.edge_attr is None else data.edge_attr[self.edges]
        for split in ("train", "val", "test"):
            own[f"{split}_mask"] = data[f"{split}_mask"][self.nodes]
        return own

    def to(self, *args: Any, **kwargs: Any) -> Part:
        """Return a copy with its ids on a device; `Data.to` calls this."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {
            name: value.to(*args, **kwargs) for name, value in values.items() if isinstance(value, Tensor)
        }
        return replace(self, **moved)

    def fetch(self, x: Tensor) -> Tensor:
        """Append the rows of the halo to those of the own nodes: `[n, F]` to `[n + h, F]`; differentiable once."""
        rows: Tensor = _Fetch.apply(x, self)  # type: ignore[no-untyped-call]
        return torch.cat([x, rows])

    @contextmanager
    def joined(self, model: nn.Module, edge_index: Tensor) -> Iterator[None]:
        """Context manager: `model(x, edge_index)` with x `[n, F]` returns the rows of `nodes` of the full output.

        Before each layer the rows of the halo are fetched. Dropout with a seed that all processes share uses the mask
        of the whole graph. All processes must call the model in the same way.

        Raises:
            ValueError: as in `layers_of`.
        """
        layers = layers_of(model)
        set_dropout_ids(edge_index, self.edges, self.looped)
        rows = torch.cat([self.nodes, self.halo])
        with ExitStack() as stack:
            for layer in layers:
                handle = layer.register_forward_pre_hook(self._with_halo, with_kwargs=True)
                stack.callback(handle.remove)
            stack.enter_context(global_rows(rows, self.num_nodes, (self.nodes.numel(), rows.numel())))
            yield

    def _with_halo(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return a layer's arguments with the halo: x with `size` if the layer accepts it, else (x_src, x_dst)."""
        bound = inspect.signature(layer.forward).bind(*args, **kwargs)
        x = bound.arguments["x"]
        x_src = self.fetch(x)
        if accepts_size(layer):
            bound.arguments.update(x=x_src, size=(x_src.size(0), x.size(0)))
        else:
            bound.arguments["x"] = x_src, x
        return bound.args, bound.kwargs


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model that take a graph.

    Raises:
        ValueError: if there is none, one of them sends from target to source, the model is compiled, it reads the
            degrees of neighbours (`symmetric_norm`), or it has a norm over all nodes or a batch norm that is not
            synchronised over the processes.
    """
    layers = [m for m in model.modules() if isinstance(m, MessagePassing) or accepts_size(m)]
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and not isinstance(m, nn.SyncBatchNorm)]
    backward = any(map(is_reversed, layers))
    degrees = any(getattr(m, "symmetric_norm", False) for m in model.modules())
    if not layers or norms or graph_norms(model) or backward or degrees or uncompiled(model) is not model:
        raise ValueError(
            f"{type(model).__name__} cannot be trained on a graph in parts, which needs MessagePassing layers from "
            "source to target, no norm over all nodes, no BatchNorm except torch's SyncBatchNorm, no symmetric_norm, "
            "and a model that is not compiled. Train it in one process."
        )
    return layers


class _Fetch(torch.autograd.Function):
    """Fetch the rows of the halo; in the backward pass, send their gradients to the nodes' own processes."""

    @staticmethod
    def forward(x: Tensor, part: Part) -> Tensor:
        return _exchanged(x.index_select(0, part.send), part.sent, part.fetched)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Part], output: Tensor) -> None:
        x, ctx.part = inputs
        ctx.rows = x.size(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        part = ctx.part
        back = _exchanged(grad.contiguous(), part.fetched, part.sent)
        total = grad.new_zeros(ctx.rows, grad.size(1))
        # One process at a time: each fetches a row once, so no two atomic additions of a GPU hit the same element.
        for rows, grads in zip(part.send.split(part.sent), back.split(part.sent), strict=True):
            total.index_add_(0, rows, grads)
        return total, None


def _exchanged(rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
    if len(sent) == 1:
        return rows
    result = rows.new_empty(sum(received), rows.size(1))
    dist.all_to_all_single(result, rows, received, sent)
    return result


def divided(data: Data, rank: int, world: int, device: torch.device | str = "cpu") -> tuple[Data, int]:
    """Return one process's part of a graph, and the number of rows that all processes fetch before a layer.

    The first process divides the nodes into parts with few edges between them (see `partition`) and broadcasts the
    result, for which the others wait up to a day. The sizes of the parts differ by a few percent. Each process needs
    access to the whole graph, and copies its part.

    Raises:
        ValueError: if there are more processes than nodes.
    """
    N = data.x.size(0)
    if world > N:
        raise ValueError(f"{world} processes cannot divide {N} nodes: each needs one. Start at most {N} processes.")
    owner = partition(data.edge_index, N, world) if rank == 0 else torch.empty(N, dtype=torch.long)
    if world > 1:  # by gloo: NCCL would end all processes after ten minutes
        dist.broadcast(owner, 0, group=dist.new_group(timeout=timedelta(days=1), backend="gloo"))
    part = Part.of(data.edge_index, owner, rank, world)
    fetched = torch.tensor(part.halo.numel(), device=device)
    if world > 1:
        dist.all_reduce(fetched)
    return part.take(data), int(fetched)


class HaloStrategy(DDPStrategy):
    """Lightning's DDP with a task's single graph divided among the processes: `Trainer(strategy="halo")`.

    The steps are those of a single process with the whole graph. The data module and the modules of `gat_pyg.training`
    recognise this strategy.
    """

    strategy_name = "halo"


StrategyRegistry.register("halo", HaloStrategy, "the nodes of one graph divided among the processes")
