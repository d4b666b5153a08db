"""One graph in one step of several processes: each has the rows of its own nodes and fetches those of its halo."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
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
from ..graph.partition import partition
from ..philox import global_rows


@dataclass(frozen=True, eq=False)
class Part:
    r"""The share that one of W processes has of a graph whose nodes are divided among them.

    Its own nodes are the destinations that it computes. An edge into one of them is its edge, too; where the edge comes
    from a node of another process, that node is in the halo, whose rows it fetches before each layer. The softmax of a
    destination is over edges that are all here, so that nothing else is communicated: a layer of W processes moves
    `F * sum of halo` numbers forward and, after the first, as many backward.

    Attributes:
        nodes: `[n]`, its own nodes, ascending.
        halo: `[h]`, nodes of others with an edge into one of its own, by whose they are.
        edge_index: `[2, E']`, src in `[nodes, halo]` and dst in `nodes` by their places there, in the graph's order.
        edges: `[E']`, the place of each edge in the graph.
        looped: `[E'']`, the same in the graph with self-loops added, as `GATConv` adds them.
        send: `[s]`, places in `nodes` of the rows that others fetch, by who.
        sent, fetched: the number of rows to and from each process.
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
        """The part of process `rank`: `owner` `[N]` is the rank of each node.

        Needs the whole edge list `[2, E]`, which may be mapped from a file, and no communication. Cost: O(E) time, and
        about 24 bytes for each edge of the whole graph while it is made.

        Raises:
            ValueError: if `owner` names a process that there is not.
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
        wanted = (owner[dst[out]] * owner.numel() + src[out]).unique()  # by rank, then node, as their halo is
        asker, wanted = wanted // max(owner.numel(), 1), wanted % max(owner.numel(), 1)

        loops = src == dst
        before = loops.cumsum(0)
        kept = edges[~loops[edges]]
        looped = torch.cat([kept - before[kept], edge_index.size(1) - int(loops.sum()) + nodes])
        return cls(
            nodes,
            halo,
            torch.stack([local[own_src], local[own_dst]]),
            edges,
            looped,
            local[wanted],
            asker.bincount(minlength=world).tolist(),
            owner[halo].bincount(minlength=world).tolist(),
            owner.numel(),
        )

    def take(self, data: Data) -> Data:
        """This process's part of a graph's data: rows of its nodes, its edges, and itself as `part`."""
        taken = Data(data.x[self.nodes], self.edge_index, y=data.y[self.nodes], part=self)
        taken.edge_attr = None if data.edge_attr is None else data.edge_attr[self.edges]
        for split in ("train", "val", "test"):
            taken[f"{split}_mask"] = data[f"{split}_mask"][self.nodes]
        return taken

    def to(self, *args: Any, **kwargs: Any) -> Part:
        """The same with its ids on a device: what `Data.to` calls."""
        ids = {own.name: getattr(self, own.name) for own in fields(self)}
        return replace(self, **{name: ids[name].to(*args, **kwargs) for name in ids if isinstance(ids[name], Tensor)})

    def fetch(self, x: Tensor) -> Tensor:
        """`[n, F]` of the own nodes to `[n + h, F]`, with the rows of the halo; differentiable once."""
        rows: Tensor = _Fetch.apply(x, self)  # type: ignore[no-untyped-call]
        return torch.cat([x, rows])

    @contextmanager
    def joined(self, model: nn.Module, edge_index: Tensor) -> Iterator[None]:
        """Within it, `model(x [n, F], edge_index)` gives the rows of `nodes` of what it would give for the whole graph.

        Before each layer the halo's rows are fetched; dropout, where it follows from a seed that all processes share,
        drops what it would drop there. All processes have to call the model alike.

        Raises:
            ValueError: as `layers_of`.
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
        """The arguments of a layer with the halo: of one x for both ends where it takes that, else of x for each."""
        given = inspect.signature(layer.forward).bind(*args, **kwargs)
        x = given.arguments["x"]
        whole = self.fetch(x)
        if getattr(layer, "accepts_size", False):
            given.arguments.update(x=whole, size=(whole.size(0), x.size(0)))
        else:
            given.arguments["x"] = whole, x
        return given.args, given.kwargs


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a model that take a graph.

    Raises:
        ValueError: if there is none, one sends from target to source, the model is compiled, or it normalises over the
            nodes of a process, which are not all.
    """
    layers = [m for m in model.modules() if isinstance(m, MessagePassing) or getattr(m, "accepts_size", False)]
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and not isinstance(m, nn.SyncBatchNorm)]
    backward = any(getattr(layer, "flow", "source_to_target") != "source_to_target" for layer in layers)
    if not layers or norms or backward or hasattr(model, "_orig_mod"):
        raise ValueError(
            f"{type(model).__name__} cannot be trained over a graph in parts: that needs layers of MessagePassing "
            "which go from source to target, no BatchNorm but torch's SyncBatchNorm, and a model that is not compiled. "
            "Train it by one process."
        )
    return layers


class _Fetch(torch.autograd.Function):
    """Rows of the halo from those who have them; back, the gradients to where the rows came from."""

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
    made = rows.new_empty(sum(received), rows.size(1))
    dist.all_to_all_single(made, rows, received, sent)
    return made


def divided(data: Data, rank: int, world: int, device: torch.device | str = "cpu") -> tuple[Data, int]:
    """The part of process `rank` of a graph, and how many rows all fetch before a layer.

    The first process divides the nodes so that few edges run between parts, see `partition`, and broadcasts it, by
    `device`. The parts are of one size, but for some percent; each process needs the whole graph in reach, and copies
    its part.

    Raises:
        ValueError: if there are more processes than nodes.
    """
    N = data.x.size(0)
    if world > N:
        raise ValueError(f"There are {world} processes and {N} nodes: each needs one. Start at most {N} processes.")
    owner = partition(data.edge_index, N, world) if rank == 0 else torch.empty(N, dtype=torch.long)
    if world > 1:
        owner = owner.to(device)
        dist.broadcast(owner, 0)
    part = Part.of(data.edge_index, owner, rank, world)
    fetched = torch.tensor(part.halo.numel(), device=device)
    if world > 1:
        dist.all_reduce(fetched)
    return part.take(data), int(fetched)


class HaloStrategy(DDPStrategy):
    """Lightning's DDP where the one graph of a task is divided among the processes: `Trainer(strategy="halo")`.

    A step is that of one process with the whole graph; `gat_pyg.training` does what there is to do.
    """

    strategy_name = "halo"


StrategyRegistry.register("halo", HaloStrategy, "the nodes of one graph divided among the processes")
