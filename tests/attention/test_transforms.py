"""torch.func and forward-mode derivatives: whatever can be done with PyG's layers can be done with ours."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch_geometric import EdgeIndex
from torch_geometric.utils import add_self_loops, dropout_edge

from gat_pyg import GATConv, GATv2Conv
from gat_pyg.attention import Additive, attend, fused
from gat_pyg.features import SparseFeatures
from gat_pyg.features.linear import linear
from gat_pyg.graph.adjacency import neighbourhoods
from gat_pyg.graph.edges import Edges
from gat_pyg.graph.remembered import remembered
from tests.conv.test_conv import pair
from tests.graphs import BIPARTITE, LOOPS, RANDOM
from tests.laws import assert_close, edges_of
from tests.scores import ADDITIVE, CONSTANT, SCORES, call, leaves_of

pytestmark = pytest.mark.usefixtures("float64")

LAYERS = {"GATConv": GATConv, "GATv2Conv": GATv2Conv}
both_layers = pytest.mark.parametrize("name", LAYERS)
every_operand = pytest.mark.parametrize("names", [CONSTANT, "x score_src score_dst", *SCORES])


def like(tree: Any, seed: int = 1) -> Any:
    """Random tensors of the same shapes: a direction."""
    generator = torch.Generator().manual_seed(seed)
    return torch.utils._pytree.tree_map(lambda t: torch.randn(t.shape, generator=generator, dtype=t.dtype), tree)


def assert_trees_close(found: Any, expected: Any, case: str) -> None:
    found, expected = (torch.utils._pytree.tree_leaves_with_path(tree) for tree in (found, expected))
    assert len(found) == len(expected) > 0
    for (path, a), (_, b) in zip(found, expected, strict=True):
        assert_close(a, b, f"{case} {path}")


# A graph made in forward --------------------------------------------------------------------------------------------

MADE: dict[str, Callable[[Tensor, int], Tensor]] = {
    "loops": lambda index, n: add_self_loops(index, num_nodes=n)[0],
    "dropped": lambda index, n: dropout_edge(index, p=0.5)[0],
    "slice": lambda index, n: index[:, ::2],
    "int32": lambda index, n: index[:, ::2].int(),
    "COO": lambda index, n: torch.sparse_coo_tensor(index.flip(0), torch.ones(300), (n, n)).coalesce(),
}


class Making(nn.Module):
    """A model that makes its edges in forward."""

    def __init__(self, conv: nn.Module, make: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.conv, self.make = conv, make

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        torch.manual_seed(0)
        return self.conv(x, self.make(edge_index, len(x)))


@pytest.mark.parametrize(("made", "loops"), [(made, n % 2 == 0) for n, made in enumerate(MADE)] + [("loops", False)])
@both_layers
def test_a_graph_made_within_a_transform(name: str, made: str, loops: bool) -> None:
    x, index = torch.randn(40, 5), RANDOM.index.clone()
    answers = []
    for layer in pair(name, 5, 5, heads=3, add_self_loops=loops):
        model = Making(layer, MADE[made])
        if made == "int32" and layer.__module__.startswith("torch_geometric"):
            model.make = MADE["slice"]  # its gradient for int32 is wrong, see test_conv
        parameters = {k: v.detach() for k, v in model.named_parameters()}

        def out(p: Any, x: Tensor, model: nn.Module = model) -> Tensor:
            return functional_call(model, p, (x, index)).sin()

        def loss(p: Any, x: Tensor) -> Tensor:
            return out(p, x).sum()

        twice = grad(lambda p, x, loss=loss: grad(loss, argnums=1)(p, x).square().sum(), argnums=1)
        answers.append([grad(loss, argnums=(0, 1))(parameters, x), jacrev(out)(parameters, x), twice(parameters, x)])
    assert_trees_close(answers[1], answers[0], f"{name} {made} {loops}")


@both_layers
def test_an_edge_index_made_within_a_transform(name: str) -> None:
    """PyG's layer raises an error there."""
    conv, x, index = LAYERS[name](5, 5, heads=3), torch.randn(40, 5), RANDOM.index.sort(dim=1).values
    options: Any
    for options in ({}, {"sort_order": "col"}):
        results = grad(lambda x, o=options: conv(x, EdgeIndex(index + 0, sparse_size=(40, 40), **o)).sin().sum())(x)
        assert_close(results, grad(lambda x: conv(x, index).sin().sum())(x))


def test_a_graph_from_outside_is_remembered_within_a_transform() -> None:
    index = RANDOM.index.clone()
    edges = neighbourhoods(index, 40, 40)
    seen: list[Edges] = []

    def loss(x: Tensor, index: Tensor) -> Tensor:
        seen.append(neighbourhoods(index, 40, 40))
        return attend(x, Additive(), seen[-1], backend="segment").sum()

    grad(loss)(torch.randn(40, 3, 5), index)
    grad(lambda index, x: loss(x, index), argnums=1)(index.double().long(), torch.randn(40, 3, 5))
    assert seen[0] is edges and seen[1] is not edges


def test_edges_and_whatever_is_made_of_a_graph_within_a_transform() -> None:
    x = torch.randn(BIPARTITE.num_src, 3, 5)

    @remembered
    def doubled(edge_index: Tensor) -> list[Tensor]:
        return [2 * edge_index]

    def loss(x: Tensor) -> Tensor:
        index = BIPARTITE.index + 0
        assert torch.equal(doubled(index)[0], 2 * BIPARTITE.index)
        assert doubled(index) is doubled(index)
        edges = edges_of(BIPARTITE)
        made = Edges.from_index(index, BIPARTITE.num_src, BIPARTITE.num_dst)
        again = Edges.from_csr(edges.rowptr + 0, edges.src + 0, BIPARTITE.num_src)
        outs = [attend(x, Additive(), each, backend="segment").square().sum() for each in (edges, made, again)]
        return outs[0] + 10 * outs[1] + 100 * outs[2]

    def plain(x: Tensor) -> Tensor:
        return 111 * attend(x, Additive(), edges_of(BIPARTITE), backend="segment").square().sum()

    assert_close(grad(loss)(x), grad(plain)(x))


@pytest.mark.parametrize("loops", [True, False])
@both_layers
def test_vmap_over_edge_lists_is_refused(name: str, loops: bool) -> None:
    conv, x, indices = LAYERS[name](5, 4, add_self_loops=loops), torch.randn(40, 5), RANDOM.index.expand(3, 2, 300)
    with pytest.raises(NotImplementedError, match="vmap maps over features and parameters, not over the graph"):
        vmap(lambda index: conv(x, index))(indices)
    with pytest.raises(NotImplementedError, match="torch_geometric.data.Batch"):
        vmap(lambda index: grad(lambda x: conv(x, index + 0).sum())(x))(indices)
    with pytest.raises(NotImplementedError, match="not over the graph"):
        vmap(lambda index: attend(x[:, None], Additive(), Edges.from_index(index, 40, 40)))(indices)


# Forward mode -------------------------------------------------------------------------------------------------------

OPTIONS = [{}, {"heads": 2, "edge_dim": 3}, {"heads": 2, "concat": False, "residual": True, "add_self_loops": False}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@both_layers
def test_forward_mode_of_the_layers(name: str, options: dict[str, Any]) -> None:
    edge_attr = torch.randn(LOOPS.index.size(1), 3) if "edge_dim" in options else None
    x = torch.randn(LOOPS.num_src, 5)
    answers = []
    for layer in pair(name, 5, 4, **options):
        parameters = {k: v.detach() for k, v in layer.named_parameters()}

        def out(p: Any, x: Tensor, layer: nn.Module = layer) -> Tensor:
            return functional_call(layer, p, (x, LOOPS.index, edge_attr))

        def loss(p: Any, x: Tensor) -> Tensor:
            return out(p, x).sin().sum()

        with forward_ad.dual_level():
            dual = torch.utils._pytree.tree_map(forward_ad.make_dual, parameters, like(parameters))
            by_dual = tuple(forward_ad.unpack_dual(out(dual, forward_ad.make_dual(x, like(x)))))
        answers.append(
            {
                "jvp": jvp(out, (parameters, x), (like(parameters), like(x))),
                "forward_ad": by_dual,
                "jacfwd": jacfwd(out, argnums=(0, 1))(parameters, x),
                "hessian": hessian(loss, argnums=(0, 1))(parameters, x),
                "reverse over forward": jacrev(jacfwd(loss, argnums=1), argnums=1)(parameters, x),
                "forward over forward": jacfwd(jacfwd(loss, argnums=1), argnums=1)(parameters, x),
            }
        )
    assert_trees_close(answers[1], answers[0], f"{name} {options}")


@pytest.mark.parametrize("backend", ["fused", "segment", "reference"])
@every_operand
def test_forward_mode_of_the_operation(names: str, backend: str) -> None:
    """J v from forward mode is J v from two reverse passes, with the same mask."""
    leaves, edges = leaves_of(BIPARTITE, 3, 5, names), edges_of(BIPARTITE)

    def out(leaves: Any) -> Tensor:
        return call(leaves, edges, backend, dropout=0.5)

    primal, pull = vjp(out, leaves)
    _, push = vjp(lambda u: pull(u)[0], torch.zeros_like(primal))
    results = jvp(out, (leaves,), (like(leaves),))
    assert_trees_close(results, (primal, push(like(leaves))[0]), f"{names} {backend}")


@pytest.mark.parametrize("backend", ["fused", "segment"])
@every_operand
def test_forward_mode_of_a_recorded_backward(names: str, backend: str) -> None:
    """The tangent of a gradient of which the forward pass ran before forward mode began."""
    leaves, edges = leaves_of(BIPARTITE, 3, 5, names), edges_of(BIPARTITE)
    results, expected = [], []
    for answers, by in ((results, backend), (expected, "reference")):
        out, pull = vjp(lambda leaves, by=by: call(leaves, edges, by, dropout=0.5), leaves)
        u = torch.ones_like(out)
        answers.append(jvp(pull, (u,), (like(u),)))
        leaf = {k: v.clone().requires_grad_() for k, v in leaves.items()}
        out = call(leaf, edges, by, dropout=0.5)
        with forward_ad.dual_level():
            grads = torch.autograd.grad(out, list(leaf.values()), forward_ad.make_dual(u, like(u)), create_graph=True)
            answers.append([forward_ad.unpack_dual(g).tangent for g in grads])
        with forward_ad.dual_level():
            grads = torch.autograd.grad(out, list(leaf.values()), forward_ad.make_dual(u, like(u)))
            answers.append([forward_ad.unpack_dual(g).tangent for g in grads])
    assert_trees_close(results, expected, f"{names} {backend}")


@every_operand
def test_forward_mode_of_several_models(names: str) -> None:
    edges = edges_of(BIPARTITE)
    batch = [{k: v + n for k, v in leaves_of(BIPARTITE, 3, 5, names).items()} for n in range(3)]
    stacked = {k: torch.stack([leaves[k] for leaves in batch]) for k in batch[0]}

    def push(leaves: Any, tangents: Any) -> Any:
        return jvp(lambda leaves: call(leaves, edges, dropout=0.5), (leaves,), (tangents,))

    def each(leaves: Any) -> Tensor:
        return vmap(lambda leaves: call(leaves, edges, dropout=0.5), randomness="same")(leaves)

    inside = vmap(push, randomness="same")(stacked, like(stacked))
    outside = jvp(each, (stacked,), (like(stacked),))
    for n, leaves in enumerate(batch):
        alone = push(leaves, {k: v[n] for k, v in like(stacked).items()})
        assert_trees_close([t[n] for t in inside], list(alone), f"{names} {n} inside")
        assert_trees_close([t[n] for t in outside], list(alone), f"{names} {n} outside")


def test_only_forward_mode_leaves_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves, edges = leaves_of(BIPARTITE, 3, 5, ADDITIVE), edges_of(BIPARTITE)
    monkeypatch.setattr(fused, "_by_segments", None)
    call(leaves, edges)
    grad(lambda leaves: call(leaves, edges).sum())(leaves)
    with pytest.raises(TypeError, match="not callable"):
        jvp(lambda leaves: call(leaves, edges), (leaves,), (leaves,))


@both_layers
def test_forward_mode_compiled(name: str) -> None:
    layer, x = LAYERS[name](5, 5, heads=3), torch.randn(LOOPS.num_src, 5)

    def push(x: Tensor, v: Tensor) -> Any:
        return jvp(lambda x: layer(x, LOOPS.index), (x,), (v,))

    torch._dynamo.reset()
    results = torch.compile(push, backend="aot_eager")(x, like(x))
    assert_trees_close(results, push(x, like(x)), name)


def test_forward_mode_of_sparse_features() -> None:
    x = torch.randn(6, 5).relu()
    sparse = SparseFeatures(x.to_sparse_csr())
    conv, weight = GATConv(5, 5, heads=3), torch.randn(5, 3)
    parameters = {k: v.detach() for k, v in conv.named_parameters()}
    index = RANDOM.index % 6
    results, expected = (
        {
            "layer": jvp(lambda p, x=x: functional_call(conv, p, (x, index)), (parameters,), (like(parameters),)),
            "hessian": hessian(lambda p, x=x: functional_call(conv, p, (x, index)).sin().sum())(parameters),
        }
        for x in (sparse, x)
    )
    assert_trees_close(results, expected, "parameters")
    row, col = sparse.pattern.row.long(), sparse.pattern.col.long()

    def of_values(product: Callable[..., Tensor]) -> Any:
        both = (sparse.undropped, weight), (like(sparse.undropped), like(weight, 2))
        twice = hessian(lambda v, w: product(v, w).sin().sum(), argnums=(0, 1))
        return jvp(product, *both), twice(*both[0])

    by_sums = of_values(lambda v, w: linear(SparseFeatures(sparse, v), w))
    by_matrix = of_values(lambda v, w: torch.zeros(6, 5).index_put((row, col), v) @ w)
    assert_trees_close(by_sums, by_matrix, "values")
    seeds = torch.tensor([3, 4])

    def several(v: Tensor, w: Tensor) -> Tensor:
        dropped = copy.copy(SparseFeatures(sparse, v))
        dropped.seed, dropped.p = seeds, 0.5
        return linear(dropped, w)

    both = (sparse.undropped, torch.randn(2, 5, 3)), (like(sparse.undropped), like(torch.zeros(2, 5, 3), 2))
    primal, pull = vjp(several, *both[0])
    _, push = vjp(pull, torch.zeros_like(primal))
    assert_trees_close(jvp(several, *both), (primal, push(both[1])[0]), "dropout")


def test_forward_mode_with_returned_attention() -> None:
    theirs, ours = pair("GATConv", 5, 5, heads=3)
    x = torch.randn(40, 5)
    results, expected = (
        jvp(lambda x, c=conv: c(x, RANDOM.index, return_attention_weights=True)[1][1], (x,), (like(x),))
        for conv in (ours, theirs)
    )
    assert_trees_close(results, expected, "alpha")
