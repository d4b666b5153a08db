"""Random layers and calls with all options at once: PyG's layers in float64 are the oracle, else other backends."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.utils import add_self_loops, remove_self_loops

from gat_pyg import GATConv, GATv2Conv, TransformerConv, accelerate
from gat_pyg.conv import mechanisms
from tests.graphs import BIPARTITE, LOOPS, RANDOM, REPEATED, ZOO, Graph
from tests.laws import TOLERANCE, assert_close

F, H, C, D = 5, 3, 5, 3
LAYERS: dict[str, Any] = {"GATConv": GATConv, "GATv2Conv": GATv2Conv, "TransformerConv": TransformerConv}
FILLS: list[Any] = ["mean", "add", "min", "max", "mul", 2.0, torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)]
LOOPED = Graph("looped", torch.cat([RANDOM.index, torch.arange(40)[::3].expand(2, -1)], 1), 40, 40)
IDS = [torch.int64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


class Negative(nn.Module):
    """A mechanism of a user: no parameters, any score."""

    def forward(self, x_dst: Tensor, x_src: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        score = -(x_dst - x_src).square().sum(-1)
        return score if edge_attr is None else score + edge_attr.sum(-1, keepdim=True)


NAMES = [name for name in mechanisms.MECHANISMS if name != "additive"]
MECHANISMS: dict[str, Any] = {name: name for name in NAMES} | {"own": Negative()}
KINDS = [*LAYERS, *MECHANISMS]  # layers, and mechanisms of GATConv that PyG does not have
every_kind = pytest.mark.parametrize("kind", KINDS)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Draw:
    """A layer with options, the arguments of a call, and the same with PyG's layer."""

    def __init__(self, seed: int, kind: str, graph: Graph | None = None, **fixed: Any) -> None:
        pick = random.Random(f"{kind} {seed}").choice
        self.kind, self.seed = kind, seed
        self.name = kind if kind in LAYERS else "GATConv"
        self.graph: Graph = pick([*ZOO, LOOPED] if graph is None else [graph])
        is_square = self.graph.num_src == self.graph.num_dst
        self.bipartite = not is_square or pick([False, False, True])
        self.heads = pick([1, H, H] if graph is None else [H])  # kernels are compiled for each number
        self.edge_dim = None if kind == "constant" else pick([None, 1, D, D])
        self.has_edge_attr = self.edge_dim is not None and (self.name == "TransformerConv" or pick([True, True, False]))
        self.loops = self.name != "TransformerConv" and pick([True, True, False])
        self.fill = pick(FILLS if self.edge_dim == D else FILLS[:-1])
        self.weight = pick([None, (), (1,), (self.heads,)])
        self.edge_dropout = pick([0.0, 0.0, 0.4])
        self.batch = pick([0, 0, 0, 3])
        drops = self.name != "TransformerConv" and not self.edge_dropout and not self.batch
        self.dropout = pick([0.0, 0.5]) if drops else 0.0
        self.flat = self.edge_dim == 1 and pick([True, False])  # features [E]
        self.ids, self.contiguous = pick(IDS), pick([True, False])
        self.backend = pick(["auto", "segment", "reference"])
        self.flow = pick(["source_to_target", "target_to_source"]) if is_square else "source_to_target"
        self.options: dict[str, Any] = {"concat": pick([True, False]), "bias": pick([True, False])}
        if self.name == "TransformerConv":
            self.options |= {"beta": pick([True, False]), "root_weight": pick([True, False])}
        else:
            self.options |= {"residual": pick([True, False]), "negative_slope": pick([0.2, 0.0, 1.0])}
            self.options |= {"add_self_loops": self.loops, "fill_value": self.fill, "dropout": self.dropout}
        if self.name == "GATv2Conv":
            self.options["share_weights"] = pick([True, False])
        self.options |= {"heads": self.heads, "edge_dim": self.edge_dim, "flow": self.flow}
        declared = self.name == "GATConv" and self.flow == "source_to_target" and pick([True, True, False])
        size = pick([None, self.graph.num_src]), pick([None, self.graph.num_dst])  # None: as many as x has rows
        self.size = {"size": size} if declared else {}
        vars(self).update(fixed)

    def __str__(self) -> str:
        return f"{ ({**vars(self), **self.options, 'graph': str(self.graph)}) }"

    def layer(self, cls: Any, **options: Any) -> Any:
        torch.manual_seed(self.seed)
        return cls((F, F) if self.bipartite else F, C, **self.options, **options).double()

    def ours(self) -> Any:
        """Our layer, all of whose parameters differ from zero."""
        options = {} if self.kind in LAYERS else {"mechanism": MECHANISMS[self.kind]}
        conv = self.layer(LAYERS[self.name], edge_dropout=self.edge_dropout, backend=self.backend, **options)
        for value in conv.parameters():
            value.data = torch.randn(value.shape, dtype=torch.float64) / max(value.size(-1), 1) ** 0.5
        return conv

    def inputs(self) -> dict[str, Tensor]:
        """The tensors by name, each with a gradient."""
        graph, num_edges, many = self.graph, self.graph.index.size(1), (self.batch,) * bool(self.batch)
        tensors = {"x": normal(*many, graph.num_src, F, seed=self.seed)}
        if self.bipartite:
            tensors["x_dst"] = normal(*many, graph.num_dst, F, seed=self.seed + 1)
        if self.has_edge_attr:
            shape = () if self.flat else (self.edge_dim,)
            tensors["edge_attr"] = normal(num_edges, *shape, seed=self.seed + 2)
        if self.weight is not None:
            tensors["edge_weight"] = normal(num_edges, *self.weight, seed=self.seed + 3)
        return {name: tensor.requires_grad_() for name, tensor in tensors.items()}

    def index(self) -> Tensor:
        return self.graph.index.flip(0) if self.flow == "target_to_source" else self.graph.index

    def call(self, conv: Any, inputs: dict[str, Tensor], weights: bool = True) -> Any:
        """The output, the adjacency with loops and alpha; the output alone without `weights`."""
        x: Any = (inputs["x"], inputs["x_dst"]) if self.bipartite else inputs["x"]
        index = self.index().to(self.ids)
        index = index if self.contiguous else index.t().contiguous().t()
        torch.manual_seed(self.seed)
        options = {"edge_weight": inputs.get("edge_weight"), **self.size}
        edge_attr = inputs.get("edge_attr")
        if not weights:
            return conv(x, index, edge_attr, **options)
        out, (looped, alpha) = conv(x, index, edge_attr, return_attention_weights=True, **options)
        return out, looped.long(), alpha

    def by_pyg(self, theirs: Any, inputs: dict[str, Tensor], kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same by PyG's layer on the edges that are kept; a hook multiplies its messages by the weights."""
        index, num_edges = self.index(), self.graph.index.size(1)
        edge_attr, weight = inputs.get("edge_attr"), inputs.get("edge_weight")
        weight = normal(0, seed=0).new_ones(num_edges) if weight is None else weight
        if self.loops:
            _, weight = remove_self_loops(index, weight)
            index, edge_attr = remove_self_loops(index, edge_attr)
            largest, fewest = (by(self.graph.num_src, self.graph.num_dst) for by in (max, min))
            count = index.size(1) + fewest  # PyG reduces over all nodes
            index, edge_attr = add_self_loops(index, edge_attr, self.fill, num_nodes=largest)
            index, edge_attr = index[:, :count], None if edge_attr is None else edge_attr[:count]
            weight = torch.cat([weight, weight.new_ones(fewest, *weight.shape[1:])])
        weight = (weight if weight.dim() == 2 else weight[:, None]).expand(-1, self.heads)
        some = index[:, kept], None if edge_attr is None else edge_attr[kept]
        if self.flat and self.name == "TransformerConv":  # which does not take [E]
            some = some[0], some[1].unsqueeze(1)
        theirs.add_self_loops = False
        hook = theirs.register_message_forward_hook(lambda _, __, message: message * weight[kept].unsqueeze(-1))
        outs, alphas = [], []
        torch.manual_seed(self.seed)
        for one in range(self.batch) if self.batch else (slice(None),):
            x: Any = (inputs["x"][one], inputs["x_dst"][one]) if self.bipartite else inputs["x"][one]
            out, (_, alpha) = theirs(x, *some, return_attention_weights=True)
            outs.append(out)
            alpha = alpha.new_zeros(index.size(1), self.heads).index_add(0, kept.nonzero().squeeze(1), alpha)
            alphas.append(alpha * weight)
        hook.remove()
        return (torch.stack(outs) if self.batch else outs[0], index, torch.stack(alphas) if self.batch else alphas[0])


def gradients(out: Tensor, alpha: Tensor, inputs: dict[str, Tensor], conv: Any) -> dict[str, Tensor]:
    """The gradients of a number that depends on the output and on alpha, by the name of an input or parameter."""
    leaves = {**inputs, **dict(conv.named_parameters())}
    total = (out * normal(*out.shape, seed=7)).sum() + (alpha * normal(*alpha.shape, seed=8)).sum()
    grads = torch.autograd.grad(total, [*leaves.values()], allow_unused=True)
    pairs = zip(leaves.items(), grads, strict=True)
    return {name: torch.zeros_like(leaf) if grad is None else grad for (name, leaf), grad in pairs}


def kept_edges(looped: Tensor, alpha: Tensor, draw: Draw) -> Tensor:
    """The mask of the edges that edge dropout keeps; it drops no loop, and the same edges for every head and graph."""
    if draw.dropout:
        return torch.ones(looped.size(1), dtype=torch.bool)
    alpha = alpha if draw.batch else alpha[None]
    gone = (alpha == 0).all(2).all(0)
    assert torch.equal(gone, (alpha == 0).any(2).any(0)), "the heads or the graphs of a batch differ"
    assert not gone[looped[0] == looped[1]].any(), "a loop is dropped"
    assert draw.edge_dropout or not gone.any()
    return ~gone


def swapped(theirs: Any, ours: Any) -> Any:
    """A copy of PyG's layer that became ours, with our layer's other options."""
    layer = copy.deepcopy(theirs)
    assert accelerate(layer).swapped == {"": type(theirs).__name__}
    layer.edge_dropout, layer.backend = ours.edge_dropout, ours.backend
    return layer


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.usefixtures("one_mask")
def test_any_layer_and_call_give_what_pygs_do(kind: str) -> None:
    """Initial weights, checkpoints, output, attention and every gradient; also of PyG's layers after `accelerate`."""
    for seed in range(50):
        check(Draw(seed, kind))


def check(draw: Draw) -> None:
    """Compare a layer and a call with PyG's; half of the layers are PyG's after `accelerate`."""
    theirs, initial = draw.layer(getattr(pyg, draw.kind)), draw.layer(LAYERS[draw.kind])
    assert repr(initial) == repr(theirs)
    for (name, value), (same, expected) in zip(initial.state_dict().items(), theirs.state_dict().items(), strict=True):
        assert name == same and torch.equal(value, expected), f"{draw} {name}"
    ours, inputs = draw.ours(), draw.inputs()
    theirs.load_state_dict(ours.state_dict())
    if draw.seed % 2:
        ours = swapped(theirs, ours)
    out, looped, alpha = draw.call(ours, inputs)
    assert_close(draw.call(ours, inputs, weights=False), out, f"{draw} without alpha")
    expected = draw.by_pyg(theirs, inputs, kept_edges(looped, alpha, draw))
    assert torch.equal(looped, expected[1]), draw
    for name, one, other in zip(("out", "alpha"), (out, alpha), expected[::2], strict=True):
        assert_close(one, other, f"{draw} {name}")
    result = gradients(out, alpha, inputs, ours)
    for name, grad in gradients(expected[0], expected[2], inputs, theirs).items():
        scale = grad.abs().max().clamp(min=1.0) if grad.numel() else 1.0  # sums of many terms
        assert_close(result[name] / scale, grad / scale, f"{draw} gradient of {name}")
    with torch.no_grad():
        assert_close(draw.call(ours.eval(), inputs, weights=False), draw.call(ours, inputs)[0], f"{draw} eval")


@every_kind
@pytest.mark.usefixtures("one_mask")
def test_pygs_message_passing_gives_what_the_operation_does(kind: str) -> None:
    for seed in range(100, 125):
        draw = Draw(seed, kind)
        conv, results = draw.ours(), []
        for messages in (False, True):
            hook = conv.register_message_forward_hook(lambda *_: None) if messages else None
            inputs = draw.inputs()
            out, looped, alpha = draw.call(conv, inputs)
            results.append({"out": out, "alpha": alpha, "looped": looped.double()})
            results[-1] |= gradients(out, alpha, inputs, conv)
            if hook is not None:
                hook.remove()
        for name, value in results[1].items():
            assert_close(value, results[0][name], f"{draw} {name}")


@pytest.mark.weekly
@pytest.mark.kernels
@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_narrow_dtypes_are_float64_rounded(kind: str, dtype: torch.dtype) -> None:
    """The operation rounds no more than `segment` does."""
    for seed in range(200, 215):
        draw = Draw(seed, kind, backend="auto")
        conv, inputs = draw.ours(), draw.inputs()
        with torch.no_grad():
            for tensor in (*inputs.values(), *conv.parameters()):
                tensor.copy_(tensor.to(dtype))
        exact = draw.call(conv, inputs)
        narrow = conv.to(dtype)
        rounded = {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in inputs.items()}
        result = draw.call(narrow, rounded)
        narrow.backend = "segment"
        other = draw.call(narrow, rounded)
        grads = torch.autograd.grad(result[0].double().square().sum(), [*rounded.values()], allow_unused=True)
        assert all(grad is None or (grad.dtype == dtype and grad.isfinite().all()) for grad in grads), draw
        for one, two, true in zip(result[::2], other[::2], exact[::2], strict=True):
            assert one.dtype == dtype
            error, allowed = ((each.double() - true).norm() for each in (one, two))
            assert error <= 1.2 * allowed + TOLERANCE[dtype] * true.norm(), f"{draw} {error} {allowed}"


@every_kind
def test_derivatives_are_those_of_finite_differences(kind: str) -> None:
    seeds = (seed for seed in range(300, 400) if Draw(seed, kind).graph in (LOOPS, REPEATED, BIPARTITE))
    for seed in list(seeds)[:2]:
        draw = Draw(seed, kind, backend="auto")
        conv, inputs = draw.ours(), draw.inputs()

        def result(*values: Tensor, draw: Draw = draw, conv: Any = conv, names: Any = tuple(inputs)) -> Any:
            out, _, alpha = draw.call(conv, dict(zip(names, values, strict=True)))
            return out, alpha

        assert torch.autograd.gradcheck(result, tuple(inputs.values()), atol=1e-6, fast_mode=True), draw


@every_kind
def test_nodes_and_edges_have_no_order(kind: str) -> None:
    for seed in range(400, 415):
        draw = Draw(seed, kind)
        conv, inputs = draw.ours().eval(), draw.inputs()  # in training, another order drops other edges
        with torch.no_grad():
            out, _, alpha = draw.call(conv, inputs)
        generator, graph = torch.Generator().manual_seed(seed), draw.graph
        order = torch.randperm(graph.index.size(1), generator=generator)
        src, dst = (torch.randperm(n, generator=generator) for n in (graph.num_src, graph.num_dst))
        if draw.loops:  # those of a bipartite graph are between nodes with the same id
            fewest = min(graph.num_src, graph.num_dst)
            src, dst = torch.arange(graph.num_src), torch.arange(graph.num_dst)
            src[:fewest] = dst[:fewest] = torch.randperm(fewest, generator=generator)
        elif not draw.bipartite:
            dst = src
        nodes = -2 if draw.batch else 0
        renamed = dict(inputs)
        for name, value in inputs.items():
            if name.startswith("edge"):
                renamed[name] = value.index_select(0, order)
            else:
                renamed[name] = value.index_select(nodes, (dst if name == "x_dst" else src).argsort())
        index = torch.stack([src[graph.index[0]], dst[graph.index[1]]])[:, order]
        draw.graph = Graph(graph.name, index, graph.num_src, graph.num_dst)
        with torch.no_grad():
            other, _, weights = draw.call(conv, renamed)
        assert_close(other.index_select(nodes, dst), out, f"{draw}")
        assert_close(weights.sum(nodes), alpha.sum(nodes), f"{draw} alpha")
