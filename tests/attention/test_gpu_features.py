"""The CUDA kernels of features, in Triton's interpreter (TRITON_INTERPRET=1) or on a GPU: sums, and dropout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="Triton is not installed")
tl = pytest.importorskip("triton.language")

from gat_pyg import philox as generator  # noqa: E402
from gat_pyg.features import SparseFeatures  # noqa: E402
from gat_pyg.features import gpu as features  # noqa: E402
from gat_pyg.features.dropout import dropout as feature_dropout  # noqa: E402
from gat_pyg.features.linear import linear  # noqa: E402
from gat_pyg.features.pattern import Pattern  # noqa: E402
from gat_pyg.kernels import device  # noqa: E402
from gat_pyg.philox import keyed  # noqa: E402
from tests.attention.comparisons import (  # noqa: E402
    Spy,
)
from tests.attention.test_gpu import DEVICE, HALF, SEEDS, _nan_as_on_a_gpu, _unwritten_is_nan, keep_mask, runs  # noqa: E402, F401
from tests.features.test_features import SIZES, bag_of_words  # noqa: E402
from tests.laws import assert_close  # noqa: E402

weekly = pytest.mark.weekly


def pattern_of(size: tuple[int, int, float]) -> tuple[Tensor, Pattern]:
    """A dense matrix, and the pattern of its non-zeros where the kernels run."""
    dense = bag_of_words(*size)
    return dense, Pattern.of(dense.to_sparse_csr().to(DEVICE))


def mask_of(pattern: Pattern, seed: int, p: float) -> Tensor:
    """k `[nnz]` of one model."""
    nnz = pattern.col.numel()
    return keep_mask(-(-nnz // 4), 4, p, seed=seed).flatten()[:nnz]


def matrix_of(pattern: Pattern, values: Tensor) -> Tensor:
    """The dense matrix `[rows, columns]` in float64."""
    matrix = torch.zeros(pattern.num_rows, pattern.num_cols, dtype=torch.float64)
    matrix[pattern.row.cpu().long(), pattern.col.cpu().long()] = values.double()
    return matrix


OF_SUMS = [  # columns of the weights, dropout, what the models share; slabs of one block, of a masked one, of several
    (7, 0.6, ""),
    (1, 0.0, "weight"),
    (64, 0.3, "values"),
    (300, 0.6, "seed"),
    (5, 1.0, "values seed"),
]


@runs
@pytest.mark.parametrize(
    "size", [SIZES[2], (2, 40, 0.9), *(pytest.param(size, marks=weekly) for size in (*SIZES, (9, 14, 0.3)))], ids=str
)
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=weekly)], ids=str)
def test_sums_over_non_zeros(size: tuple[int, int, float], back: bool, dtype: torch.dtype) -> None:
    """Of three models, each with the bits that it has alone. Of two rows with 36 non-zeros each has several blocks."""
    size = (size[1], size[0], size[2]) if back and size[0] else size
    _, pattern = pattern_of(size)
    nnz, generator = pattern.col.numel(), torch.Generator().manual_seed(1)
    for channels, p, shared in OF_SUMS:
        values = torch.randn(3, nnz, generator=generator).to(DEVICE, dtype)
        weight = torch.randn(3, size[0 if back else 1], channels, generator=generator).to(DEVICE, dtype)
        seeds = torch.tensor(SEEDS, device=DEVICE)
        values = values[:1].expand_as(values) if "values" in shared else values
        weight = weight[:1].expand_as(weight) if "weight" in shared else weight
        seeds = seeds[:1].expand_as(seeds) if "seed" in shared else seeds
        v, w, s = (
            t[0] if name in shared else t for name, t in (("values", values), ("weight", weight), ("seed", seeds))
        )
        out = features.weighted_rows(v, w, s if p else None, p, pattern, back)
        assert out is not None and out.dtype == dtype and out.shape == (3, size[1 if back else 0], channels)
        for model in range(3):
            keep = torch.ones(nnz) if p == 0 else torch.zeros(nnz) if p == 1 else mask_of(pattern, int(seeds[model]), p)
            matrix = matrix_of(pattern, values[model].cpu().double() * keep)
            expected = (matrix.t() if back else matrix) @ weight[model].cpu().double()
            assert_close(out[model].cpu(), expected.to(dtype), f"{size} {channels} dropout {p} {shared} model {model}")
        one = slice(1, 2)
        alone = features.weighted_rows(values[one], weight[one], seeds[one] if p else None, p, pattern, back)
        assert alone is not None and torch.equal(alone, out[one])


@runs
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("p", [0.6, (0.3, 0.6, 1.0)])  # of all models, of each: thresholds of 31 bits and more
def test_the_mask_of_sparse_features_bit_by_bit(back: bool, p: Any) -> None:
    """Times the identity every non-zero is a number of the result; the same bits come from the kernel for CPUs."""
    each = p if isinstance(p, tuple) else (p,) * 3
    p = torch.tensor(p, dtype=torch.float64, device=DEVICE) if isinstance(p, tuple) else p
    _, pattern = pattern_of((33, 129, 0.05))
    values = torch.ones(pattern.col.numel(), device=DEVICE)
    seeds = torch.tensor(SEEDS, device=DEVICE)
    one = torch.eye(33 if back else 129, device=DEVICE)
    out = features.weighted_rows(values, one, seeds, p, pattern, back)
    assert out is not None
    masks = [matrix_of(pattern, mask_of(pattern, *drawn)).float() for drawn in zip(SEEDS, each, strict=True)]
    assert torch.equal(out.cpu(), torch.stack([mask.t() if back else mask for mask in masks]))
    cpu = pytest.importorskip("gat_pyg.features.cpu")
    on_cpu = Pattern(pattern.rowptr.cpu(), pattern.col.cpu(), pattern.num_cols)
    p = p.cpu() if isinstance(p, Tensor) else p
    assert torch.equal(out.cpu(), cpu.weighted_rows(values.cpu(), one.cpu(), seeds.cpu(), p, on_cpu, back))


@runs
def test_sums_of_wide_ids_and_strided_operands_and_none_of_float64() -> None:
    _, pattern = pattern_of((33, 129, 0.05))
    wide = Pattern(pattern.rowptr.long(), pattern.col.long(), pattern.num_cols)
    values, seeds = torch.randn(pattern.col.numel(), device=DEVICE), torch.tensor(SEEDS, device=DEVICE)
    weight = torch.randn(3, 8, 129, device=DEVICE).transpose(1, 2)
    expected = features.weighted_rows(values, weight.contiguous(), seeds, 0.3, pattern, False)
    assert expected is not None and not weight.is_contiguous()
    for passed in (pattern, wide):
        strided = torch.stack([seeds, seeds + 1], 1)[:, 0]
        again = features.weighted_rows(values, weight, strided, 0.3, passed, False)
        assert again is not None and torch.equal(again, expected)
    assert features.weighted_rows(values.double(), weight, seeds, 0.3, pattern, False) is None
    assert features.weighted_rows(values, weight.double(), seeds, 0.3, pattern, True) is None


@pytest.fixture
def kernels_for_all(monkeypatch: pytest.MonkeyPatch) -> Spy:
    """The CUDA kernels serve every device, so that the interpreter runs what calls them; a count of the sums."""
    spy = Spy(features._weighted_rows_kernel)
    monkeypatch.setitem(device.FILES, "cpu", "gpu")
    monkeypatch.setattr(device, "REASONS", {})
    monkeypatch.setattr(features, "_weighted_rows_kernel", spy)
    return spy


@runs
@pytest.mark.parametrize("models", [1, 3])
def test_stacked_layers_take_sparse_features(models: int, kernels_for_all: Spy) -> None:
    """Results and gradients of a dense x with the same mask, for models of a stack, each with a mask of its own."""
    dense = bag_of_words(33, 129, 0.05, dtype=torch.float32).to(DEVICE)
    x, p = SparseFeatures(dense.to_sparse_csr()), torch.tensor([0.6, 0.3, 0.0][:models], device=DEVICE)
    keys = torch.tensor(SEEDS[:models], device=DEVICE)
    weight = torch.randn(models, 8, 129, device=DEVICE, requires_grad=True)

    def layer(weight: Tensor, key: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        with keyed(key):
            dropped = feature_dropout(x, p)
        assert isinstance(dropped, SparseFeatures) and dropped.seed is not None
        return linear(dropped, weight.t()), dropped.content

    out, content = torch.func.vmap(layer, randomness="different")(weight, keys, p)
    direction = torch.randn(models, 33, 8, device=DEVICE)
    (grad,) = torch.autograd.grad((out * direction).sum(), weight)
    assert kernels_for_all.launches == 2
    zeros = (content == 0).double().mean(1)
    assert all(abs(share - float(each)) < 0.15 for share, each in zip(zeros, p, strict=True)), zeros
    for model in range(models):
        matrix = matrix_of(x.pattern, content[model].cpu())
        assert_close(out[model].cpu(), (matrix @ weight[model].detach().cpu().double().t()).float())
        assert_close(grad[model].cpu(), (direction[model].cpu().double().t() @ matrix).float())


@runs
@pytest.mark.parametrize("size", [1, 63, 4100])
def test_dropout_of_features_is_that_of_four_heads(size: int) -> None:
    seeds = torch.tensor(SEEDS[:3], device=DEVICE)
    each = torch.tensor([0.3, 0.6, 1.0], dtype=torch.float64, device=DEVICE)
    for seed, p in ((seeds, each), (seeds, 0.6), (seeds[0], 0.3)):
        selected = features.keep(seed, size, p, torch.float32)
        names = torch.arange(-(-size // 4), device=DEVICE).flip(0)
        turned = features.keep(seed, 4 * len(names), p, torch.float32, names).view(*seed.shape, -1, 4).flip(-2)
        assert torch.equal(turned.flatten(-2)[..., :size], selected)
        drawn = zip(seed.view(-1), p.tolist() if isinstance(p, Tensor) else [p] * seed.numel(), strict=True)
        expected = [generator.keep_mask(one, -(-size // 4), 4, q).flatten()[:size] for one, q in drawn]
        assert torch.equal(selected.view(-1, size), torch.stack(expected))


@runs
@pytest.mark.parametrize("dtype", [torch.float32, *(pytest.param(half, marks=weekly) for half in HALF)], ids=str)
@pytest.mark.usefixtures("kernels_for_all")
def test_dropout_of_dense_features_draws_its_mask_again(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without storing it; x k, its gradient and its tangent are those by the stored mask, in a stack too."""
    stored = Spy(features._keep_kernel)
    monkeypatch.setattr(features, "_keep_kernel", stored)
    keys, p = torch.tensor(SEEDS, device=DEVICE), 0.6
    of_each = torch.full((3,), p, dtype=torch.float64, device=DEVICE)
    x, tangent = torch.randn(2, 3, 6, 7, dtype=dtype, device=DEVICE)

    def drop(x: Tensor, key: Tensor, p: float | Tensor = p) -> Tensor:
        with keyed(key):
            return feature_dropout(x, p)

    def check(answer: Tensor, x: Tensor, model: int) -> None:
        seed = generator.first_seeds(torch.tensor(SEEDS[model]))[1]
        keep = generator.keep_mask(seed, -(-x.numel() // 4), 4, p).flatten()[: x.numel()].view(x.shape)
        assert torch.equal(answer.cpu() == 0, (x.cpu().float() * keep) == 0)
        assert_close(answer.cpu(), (x.cpu().float() * keep).to(dtype))

    for passed in (x[0], x.mT[0], x[0][:0]):
        leaf = passed.clone().requires_grad_()
        out = drop(leaf, keys[0])
        (grad,) = torch.autograd.grad(out, leaf, tangent[0].reshape_as(passed) if len(passed) else passed, True)
        check(out, passed, 0)
        check(grad, tangent[0].reshape_as(passed) if len(passed) else passed, 0)
        assert grad.requires_grad is False
    check(torch.func.jvp(lambda x: drop(x, keys[0]), (x[0],), (tangent[0],))[1], tangent[0], 0)

    for mapped, of in ((0, x), (None, x[0]), (1, x.movedim(0, 1))):
        each = torch.func.vmap(drop, in_dims=(mapped, 0, 0))
        out, pull = torch.func.vjp(lambda x: each(x, keys, of_each), of)  # noqa: B023
        (grad,) = pull(tangent)
        for model in range(3):
            check(out[model], x[model] if mapped is not None else x[0], model)
            if mapped is not None:
                check(grad.select(mapped, model), tangent[model], model)
        if mapped is None:
            assert_close(grad, torch.stack([drop(tangent[model], keys[model]) for model in range(3)]).sum(0))
    twice = torch.func.vmap(torch.func.vmap(drop, in_dims=(0, 0, None)))(
        x[:2, None].expand(2, 2, 6, 7), keys[[0, 1, 1, 0]].view(2, 2), of_each[:2]
    )
    for row, column, model in ((0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0)):
        check(twice[row, column], x[row], model)
    assert stored.launches > 10 and not torch.equal(twice[0, 0], twice[0, 1])
