"""Sparse features: the same as dense ones, results and gradients, for whatever is mapped over them."""

from __future__ import annotations

import copy
import gc
import math
import weakref

import pytest
import torch
from torch import Tensor

from gat_pyg.features import SparseFeatures
from gat_pyg.features.dropout import dropout
from gat_pyg.features.linear import Linear, linear
from gat_pyg.features.mask import mask_of
from gat_pyg.features.pattern import Pattern
from gat_pyg.philox import global_rows, keep_mask, keyed
from tests.laws import assert_close


def bag_of_words(rows: int = 7, columns: int = 5, density: float = 0.4, dtype: torch.dtype = torch.float64) -> Tensor:
    """A dense matrix with few non-zeros, of which one row and one column have none."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(rows, columns, generator=generator, dtype=torch.float64) + 0.5
    x[torch.rand(rows, columns, generator=generator) >= density] = 0
    x[rows // 2 :][:1], x[:, columns // 2] = 0, 0
    return x.to(dtype)


SIZES = [
    (7, 5, 0.4),
    (1, 1, 1.0),
    (0, 5, 0.5),
    (3, 1, 0.5),
    (33, 129, 0.05),
    (4, 6, 0.0),
]  # odd, none, wide, no non-zero


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sparse_is_dense(size: tuple[int, int, float], dtype: torch.dtype, device: str) -> None:
    dense = bag_of_words(*size, dtype=dtype).to(device)
    lin = Linear(size[1], 3).to(device, dtype)
    answers = []
    for x in (dense.clone(), dense.to_sparse_csr()):
        lin.zero_grad()
        out = lin(x.requires_grad_())
        (out * torch.arange(1.0, 1.0 + out.numel(), device=device).view_as(out).sin()).sum().backward()
        assert x.grad is not None and lin.weight.grad is not None and lin.bias.grad is not None
        answers.append((out, x.grad, lin.weight.grad.clone(), lin.bias.grad.clone()))
    for name, one, other in zip(("out", "x", "weight", "bias"), *answers, strict=True):
        if name == "x":  # at the non-zeros alone
            one, other = one * (dense != 0), other.to_dense()
        assert_close(other, one, f"{size} {name}")


def test_differentiable_any_number_of_times() -> None:
    x = SparseFeatures(bag_of_words().to_sparse_csr())
    values, weight = x.content.clone().requires_grad_(), torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    inputs = (values, weight)
    assert torch.autograd.gradcheck(lambda v, w: linear(SparseFeatures(x, v), w), inputs)
    assert torch.autograd.gradgradcheck(lambda v, w: linear(SparseFeatures(x, v), w), inputs)


@pytest.mark.parametrize("in_dims", [(0, None), (None, 0), (0, 0), (1, 2)], ids=str)
def test_mapped_over_values_and_weights(in_dims: tuple[int | None, int | None]) -> None:
    x = SparseFeatures(bag_of_words().to_sparse_csr())
    shapes = ((x.content.numel(),), (5, 3))
    full = [
        shape if dim is None else (*shape[:dim], 4, *shape[dim:]) for shape, dim in zip(shapes, in_dims, strict=True)
    ]
    values, weight = (torch.randn(shape, dtype=torch.float64) for shape in full)

    def law(values: Tensor, weight: Tensor) -> Tensor:
        return linear(SparseFeatures(x, values), weight).sin().sum()

    for f in (law, torch.func.grad(law), torch.func.grad(law, argnums=1)):
        mapped = torch.func.vmap(f, in_dims)(values, weight)
        one_by_one = [
            f(*(t if dim is None else t.select(dim, i) for t, dim in zip((values, weight), in_dims, strict=True)))
            for i in range(4)
        ]
        assert_close(mapped, torch.stack(one_by_one))


@pytest.mark.parametrize("size", [*SIZES, (40, 70, 0.9)], ids=str)  # more non-zeros than are drawn at a time
def test_kernel_and_torch_give_the_same(size: tuple[int, int, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """One matrix or several, dropped out alike, each way; several as each by itself."""
    dtype = torch.float64
    x = SparseFeatures(bag_of_words(*size, dtype=dtype).to_sparse_csr())
    for channels in (1, 7, 64, 70):
        weight = torch.randn(3, size[1], channels, dtype=dtype, requires_grad=True)
        back = torch.randn(3, size[0], channels, dtype=dtype)
        seeds = torch.tensor([3, 2**62 + 1, 5])

        def both(dropped: SparseFeatures, weight: Tensor, back: Tensor) -> list[Tensor]:
            out = linear(dropped, weight)
            return [out, *torch.autograd.grad(out, weight, back.expand_as(out))]

        def drawn(seed: Tensor) -> SparseFeatures:
            dropped = SparseFeatures(x)
            dropped.seed, dropped.p = seed, 0.6
            return dropped

        together = both(drawn(seeds), weight, back)
        for model, seed in enumerate(seeds):
            alone = both(drawn(seed), weight[model], back[model])
            for whole, one in zip(together, alone, strict=True):
                assert_close(whole[model], one)
            shared = both(drawn(seed), weight, back)
            assert all(torch.equal(whole[model], one[model]) for whole, one in zip(together, shared, strict=True))
        shared = both(drawn(seeds), weight[0], back)
        assert torch.equal(shared[0][0], together[0][0])
        assert_close(shared[0][2], both(drawn(seeds[2]), weight[0], back[2])[0])
        with monkeypatch.context() as patch:
            patch.setattr("gat_pyg.features.products._weighted_rows", lambda *_: None)
            for ours, theirs in zip(together, both(drawn(seeds), weight, back), strict=True):
                assert_close(ours, theirs)
        dense = torch.zeros(3, size[0] * size[1], dtype=dtype)
        at = torch.sparse_csr_tensor(x.pattern.rowptr, x.pattern.col, torch.ones_like(x.undropped), x.shape).to_dense()
        dense[:, at.flatten() != 0] = drawn(seeds).content
        assert_close(together[0], dense.view(3, *x.shape) @ weight)


def test_every_map_draws_its_own_dropout() -> None:
    x = SparseFeatures(torch.ones(20, 20).to_sparse_csr())
    drawn = torch.func.vmap(lambda _: dropout(x, 0.5).content, randomness="different")(torch.zeros(3))
    assert drawn.shape == (3, 400) and len({tuple(one.tolist()) for one in drawn}) == 3


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 4100])
def test_a_mask_is_that_of_attention(size: int, kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four heads; each of several models has the one that it has alone, however they are mapped over."""
    if not kernel:
        monkeypatch.setattr("gat_pyg.features.mask.missing_reason", lambda _: "none here")
    seeds, p = torch.tensor([[3, 2**62 + 1], [4, 5], [3, 6]]), torch.tensor([0.4, 1.0, 0.7], dtype=torch.float64)
    draws = [(seed, each) for row, each in zip(seeds, p.tolist(), strict=True) for seed in row]
    for dtype in (torch.float32, torch.float64):
        expected = torch.stack([keep_mask(s, -(-size // 4), 4, each, dtype).flatten()[:size] for s, each in draws])
        assert torch.equal(mask_of(seeds[0, 0], size, 0.4, dtype), expected[0])
        mapped = torch.vmap(torch.vmap(lambda seed, p: mask_of(seed, size, p, dtype), (0, None)))  # noqa: B023
        assert torch.equal(mapped(seeds, p).flatten(0, 1), expected)


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("width", [1, 4, 7])
def test_rows_of_a_whole_are_dropped_as_there(width: int, kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernel:
        monkeypatch.setattr("gat_pyg.features.mask.missing_reason", lambda _: "none here")
    x, rows = torch.ones(2, 50, width), torch.randperm(50)[:20]
    with keyed(torch.tensor(5)):
        whole = dropout(x, 0.5)
    for part in (rows, rows[:8]):
        with keyed(torch.tensor(5)), global_rows(rows, 50, (20, 8)):
            assert torch.equal(dropout(x[:, part], 0.5), whole[:, part])
    with global_rows(rows, 50, (20, 8)), pytest.raises(ValueError, match="x has 9 rows to drop out, expected"):
        dropout(x[:, :9], 0.5)


@pytest.mark.parametrize("sparse", [False, True])
def test_dropout_keeps_its_share_and_scales_it(sparse: bool) -> None:
    x, p, times = bag_of_words(), 0.6, 400
    nonzero = x[x != 0]
    arguments = x.to_sparse_csr() if sparse else x

    def drop(p: float) -> Tensor:
        dropped = dropout(arguments, p)
        return dropped.content if isinstance(dropped, SparseFeatures) else dropped[x != 0]

    drawn = torch.stack([drop(p) for _ in range(times)])
    assert drawn.ne(0).any(0).all()
    assert_close(drawn[drawn != 0], (nonzero / (1 - p)).expand_as(drawn)[drawn != 0])
    share = 4 * math.sqrt(p * (1 - p) / drawn.numel())  # four standard deviations
    assert abs((drawn != 0).double().mean().item() - (1 - p)) < share
    assert not drop(1.0).any()
    assert dropout(arguments, p, training=False) is arguments is dropout(arguments, 0.0)


@pytest.mark.parametrize("p", [-0.1, 1.2, float("nan")])
def test_dropout_outside_0_and_1_is_refused(p: float) -> None:
    with pytest.raises(ValueError, match=rf"dropout is {p}, expected a probability in \[0, 1\]\."):
        dropout(torch.ones(2, 3), p)


def test_a_pattern_is_made_once_and_never_stale() -> None:
    x = bag_of_words().to_sparse_csr()
    pattern = Pattern.of(x)
    assert Pattern.of(x) is pattern is dropout(x, 0.5).pattern  # type: ignore[attr-defined]
    assert pattern.transpose is pattern.transpose
    x.values().mul_(2)  # torch has one version for all three
    assert Pattern.of(x).col.equal(pattern.col) and SparseFeatures(x).content.equal(x.values())
    first = x.col_indices()[0].item()
    x.col_indices()[0] = 2 if first != 2 else 0
    assert Pattern.of(x) is not pattern and Pattern.of(x).col[0] != first
    gone = weakref.ref(Pattern.of(x))
    del x
    gc.collect()
    assert gone() is None


def test_made_in_inference_mode_it_serves_training() -> None:
    x, lin = bag_of_words().to_sparse_csr(), Linear(5, 3).double()
    with torch.inference_mode():
        lin(x)
        lin(bag_of_words().to_sparse_csr())
    lin(x).sum().backward()
    assert lin.weight.grad is not None and lin.weight.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_narrow_weights(dtype: torch.dtype) -> None:
    dense = bag_of_words(dtype=torch.float32)
    lin = Linear(5, 3)
    with torch.autocast("cpu", dtype):
        assert_close(lin(dense.to_sparse_csr()), lin(dense))
        twin = copy.deepcopy(lin).double()  # which is not rounded
        assert_close(twin(dense.double().to_sparse_csr()), twin(dense.double()))
    assert_close(lin.to(dtype)(dense.to(dtype).to_sparse_csr()), lin(dense.to(dtype)))


def test_lazy_and_bare() -> None:
    lin = Linear(-1, 3, bias=False)
    assert lin(bag_of_words(dtype=torch.float32).to_sparse_csr()).shape == (7, 3)
    assert lin.weight.shape == (3, 5)


def test_nothing_else_is_computed_with_them() -> None:
    x = SparseFeatures(bag_of_words().to_sparse_csr())
    assert repr(x) == f"SparseFeatures((7, 5), nnz={x.content.numel()})"
    assert (x.size(0), x.dim(), x.dtype, x.device.type) == (7, 2, torch.float64, "cpu")
    with pytest.raises(NotImplementedError, match=r"aten\.add\.Tensor of sparse features: only dropout and the layers"):
        x + 1
