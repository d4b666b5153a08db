"""The kernels under the transforms of torch.func: stacks of models, derivatives of derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("numba", reason="numba is not installed")

from gat_pyg import philox
from gat_pyg.attention import Additive, attend
from gat_pyg.graph.edges import Edges
from tests.attention.comparisons import EVERYWHERE, FOLDERS, Place, answer, direction_of, in_mode, modes_of
from tests.graphs import BIPARTITE, COMPLETE
from tests.laws import assert_close, edges_of
from tests.scores import ADDITIVE, CONSTANT, GATV2, GATV2_EDGES, SCORES, Tensors, call, leaves_of

weekly = pytest.mark.weekly


@pytest.mark.parametrize("backend", ["fused", "segment"])
@pytest.mark.parametrize("names", FOLDERS)
def test_vmap_and_grad(names: str, backend: str, place: Place) -> None:
    edges, direction = place.edges(BIPARTITE), direction_of(BIPARTITE, 3, 5).to(place.device, place.dtype)
    batch = [{k: v + n / 2 for k, v in place.to(leaves_of(BIPARTITE, 3, 5, names)).items()} for n in range(3)]
    stacked = {name: torch.stack([leaves[name] for leaves in batch]) for name in batch[0]}

    def loss(leaves: Tensors) -> Tensor:
        out = call(leaves, edges, backend)
        return (out * direction).sum()

    truths = [answer(leaves, edges, direction, "segment") for leaves in batch]
    out = torch.vmap(lambda leaves: call(leaves, edges, backend), randomness="different")(stacked)
    *_, last = stacked
    in_dims = {name: 0 if name == last else None for name in stacked}
    shared = {name: stacked[name] if name == last else leaf for name, leaf in batch[0].items()}
    mapped = torch.vmap(lambda leaves: call(leaves, edges, backend), (in_dims,), randomness="different")(shared)
    assert_close(mapped[2], call({**batch[0], last: batch[2][last]}, edges, backend), f"{names} {last} alone")
    grads = torch.vmap(torch.func.grad(loss), randomness="different")(stacked)
    for n, truth in enumerate(truths):
        alone = torch.func.grad(loss)(batch[n])
        assert_close(out[n], truth["out"], f"{names} {n}")
        for name, grad in alone.items():
            assert_close(grad, truth[name], f"{names} {n} {name} alone")
            assert_close(grads[name][n], truth[name], f"{names} {n} {name}")


@pytest.mark.parametrize(
    ("names", "speed"), [(names, speed) for names in (CONSTANT, *SCORES) for speed in modes_of(names)]
)
@EVERYWHERE
def test_a_stack_is_each_of_its_models_alone(
    names: str, speed: bool, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output and every gradient, with the dropout that follows from each model's own key and probability."""
    in_mode(monkeypatch, speed)
    edges, direction = place.edges(BIPARTITE), direction_of(BIPARTITE, 3, 5).to(place.device, place.dtype)
    leaves = place.to(leaves_of(BIPARTITE, 3, 5, names))
    stack = {k: torch.stack([v, v.flip(0), 2 * v]).requires_grad_() for k, v in leaves.items()}
    keys = torch.tensor([3, 2**40, -5], device=place.device)
    p = torch.tensor([0.5, 0.0, 0.6], dtype=torch.float64, device=place.device)

    def run(leaves: Tensors, key: Tensor, p: float | Tensor) -> Tensor:
        with philox.keyed(key):
            return call(leaves, edges, place.backend, dropout=p)

    together = torch.vmap(run)(stack, keys, p)
    together.backward(direction.expand_as(together))
    for m, key in enumerate(keys):
        own = {name: leaf.detach()[m].clone().requires_grad_() for name, leaf in stack.items()}
        alone = run(own, key, p[m])
        alone.backward(direction)
        assert_close(together[m], alone, f"{names} {m}")
        for name, leaf in own.items():
            assert leaf.grad is not None and stack[name].grad is not None
            assert_close(stack[name].grad[m], leaf.grad, f"{names} {m} {name}")


@pytest.mark.parametrize("names", FOLDERS)
def test_stacks_of_stacks(names: str, place: Place) -> None:
    edges, direction = place.edges(BIPARTITE), direction_of(BIPARTITE, 3, 5).to(place.device, place.dtype)
    leaves = place.to(leaves_of(BIPARTITE, 3, 5, names))
    grid = {k: torch.stack([v, v.flip(0), 2 * v, 3 * v, -v, v + 1]) for k, v in leaves.items()}

    def grads(leaves: Tensors) -> Tensors:
        def loss(leaves: Tensors) -> Tensor:
            out = call(leaves, edges)
            return (out * direction).sum()

        return torch.func.grad(loss)(leaves)

    flat = torch.vmap(grads)(grid)
    nested = torch.vmap(torch.vmap(grads), in_dims=1)({k: v.unflatten(0, (3, 2)) for k, v in grid.items()})
    for name, value in flat.items():
        assert_close(nested[name].transpose(0, 1).flatten(0, 1), value, f"{names} {name}")


def test_vmap_gives_each_its_own_mask(place: Place) -> None:
    edges, exact = place.edges(COMPLETE), {"device": place.device, "dtype": place.dtype}
    x = torch.eye(5, **exact)[:, None].repeat(1, 3, 1)  # shows each edge's coefficient
    weight = torch.randn(4, 5, 3, 5, **exact)

    def run(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        out = attend(x, Additive(), edges, dropout=0.5, backend="fused")
        return (out * weight).sum(), out

    torch.manual_seed(0)
    grads, outs = torch.vmap(torch.func.grad(run, has_aux=True), randomness="different")(x.expand(4, 5, 3, 5), weight)
    masks = 5 * outs != 0
    n = masks[0].numel()
    assert all(abs(mask.double().mean() - 0.5) < 4 * math.sqrt(0.25 / n) for mask in masks)
    for one in range(4):
        for other in range(one):
            agree = (masks[one] == masks[other]).double().mean()
            assert abs(agree - 0.5) < 4 * math.sqrt(0.25 / n), (one, other)
    # the backward pass has the masks of the forward pass: the output is linear in x
    assert_close((grads * x).sum((1, 2, 3)), (outs * weight).sum((1, 2, 3)))
    _, same = torch.vmap(run, randomness="same")(x.expand(4, 5, 3, 5), weight)
    assert (same == same[0]).all() and (same == 0).any()  # one seed, one mask
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(run)(x.expand(4, 5, 3, 5), weight)


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("names", FOLDERS)
def test_second_derivatives_of_a_stack_are_those_of_segment(names: str, dropout_p: float, place: Place) -> None:
    edges, leaves = place.edges(BIPARTITE), place.to(leaves_of(BIPARTITE, 3, 5, names))
    edges.wide, edges.transpose  # noqa: B018  # known before, see test_nothing_of_a_transform_is_remembered
    stack = {k: torch.stack([v, v.flip(0), v / 2]) for k, v in leaves.items()}

    def slope(backend: str) -> Callable[[Tensors], Tensor]:
        def loss(leaves: Tensors) -> Tensor:
            return call(leaves, edges, backend, dropout=dropout_p).square().sum()

        def size(leaves: Tensors) -> Tensor:
            return sum(grad.square().sum() for grad in torch.func.grad(loss)(leaves).values())

        return torch.func.grad(size)

    measured, truth = (torch.vmap(slope(b), randomness="different")(stack) for b in ("fused", "segment"))
    for name, value in measured.items():
        scale = truth[name].abs().max()  # of many products
        assert_close(value / scale, truth[name] / scale, f"{names} {name}")


@pytest.mark.parametrize("names", [ADDITIVE, GATV2])
def test_a_jacobian_is_of_one_forward_pass(names: str, place: Place) -> None:
    """Only the gradient of the output is a batch: there is one mask, of the one forward pass."""
    leaves, edges = place.to(leaves_of(BIPARTITE, 3, 5, names)), place.edges(BIPARTITE)
    fused_one, truth = (
        torch.func.jacrev(lambda x, b=b: call({**leaves, "x": x}, edges, b, dropout=0.5))(leaves["x"])
        for b in ("fused", "segment")
    )
    assert_close(fused_one, truth, names)


@pytest.mark.parametrize("backend", ["fused", "segment"])
@pytest.mark.parametrize("names", [ADDITIVE, GATV2_EDGES])
def test_nothing_of_a_transform_is_remembered(names: str, backend: str) -> None:
    """The caches of Edges are filled on first use, which may be within a derivative of a derivative."""
    leaves, direction = leaves_of(BIPARTITE, 3, 5, names), direction_of(BIPARTITE, 3, 5)

    def by_autograd(edges: Edges) -> Tensor:
        x = leaves["x"].clone().requires_grad_()
        out = call({**leaves, "x": x}, edges, backend)
        (grad,) = torch.autograd.grad((out * direction).sum() + out.square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)[0]

    def by_func(edges: Edges) -> Tensor:
        def loss(x: Tensor) -> Tensor:
            out = call({**leaves, "x": x}, edges, backend)
            return (out * direction).sum() + out.square().sum()

        return torch.func.grad(lambda x: torch.func.grad(loss)(x).square().sum())(leaves["x"])

    answers = []
    for twice in (by_autograd, by_func):
        edges = edges_of(BIPARTITE)
        answers += [twice(edges), twice(edges)]
    for measured in answers[1:]:
        assert_close(measured, answers[0])
