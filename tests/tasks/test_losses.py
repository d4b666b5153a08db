"""Losses with weights, label smoothing and focusing: against torch, by hand, and under vmap."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor
from torch.func import vmap
from torch_geometric.data import Data

from gat_pyg.data import Task
from gat_pyg.sweeps.messages import rare_line
from gat_pyg.tasks.links import LinkLabels
from gat_pyg.tasks.metrics import MACRO_F1, ROC_AUC
from gat_pyg.tasks.nodes import NodeLabels, NodeMultiLabels
from gat_pyg.tasks.objective import MASKS, Objective
from gat_pyg.tasks.targets import NodeTargets

WEIGHTS = (0.5, 2.0, 4.0)


def drawn(n: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of three columns in float64, classes, and labels; some of both are unknown."""
    draw = torch.Generator().manual_seed(n)
    out, y = 3 * torch.randn(n, 3, generator=draw, dtype=torch.float64), torch.randint(-1, 3, (n,), generator=draw)
    bits = torch.rand(n, 3, generator=draw).round()
    bits[::3, 1] = math.nan
    return out, y, bits


@pytest.mark.parametrize(("weights", "smoothing"), [*product((None, WEIGHTS), (0.0, 0.2))])
def test_a_loss_without_focusing_is_torchs_over_the_number_of_labels(weights: Any, smoothing: float):
    out, y, bits = drawn()
    w = None if weights is None else torch.tensor(weights, dtype=out.dtype)
    expected = F.cross_entropy(out, y, w, ignore_index=-1, label_smoothing=smoothing, reduction="sum") / (y >= 0).sum()
    objective: Objective = NodeLabels(3, class_weight=weights, label_smoothing=smoothing)
    torch.testing.assert_close(objective.loss(out, y), expected)
    known, true = ~bits.isnan(), (bits.to(out.dtype) * (1 - smoothing) + smoothing / 2)
    expected = F.binary_cross_entropy_with_logits(out, true.nan_to_num(), known * 1.0, pos_weight=w, reduction="sum")
    objective = NodeMultiLabels(3, pos_weight=weights, label_smoothing=smoothing)
    torch.testing.assert_close(objective.loss(out, bits), expected / known.sum())
    links = LinkLabels(3, pos_weight=weights and weights[0], label_smoothing=smoothing)
    expected = F.binary_cross_entropy_with_logits(out[:, 0], true[:, 0], pos_weight=None if w is None else w[0])
    torch.testing.assert_close(links.loss(out[:, 0], bits[:, 0].long()), expected)


@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_a_focal_loss_is_its_formula_and_a_label_is_one_of_two_classes(gamma: float):
    out, y, bits = drawn()
    expected = []
    for row, label in zip(out.tolist(), y.tolist(), strict=True):
        p = [math.exp(z) / sum(map(math.exp, row)) for z in row]
        losses = [-w * (1 - q) ** gamma * math.log(q) for w, q in zip(WEIGHTS, p, strict=True)]
        expected += [0.9 * losses[label] + 0.1 * sum(losses) / 3] if label >= 0 else []
    options: dict[str, Any] = {"label_smoothing": 0.1, "focal": gamma}
    loss = NodeLabels(3, class_weight=WEIGHTS, **options).loss(out, y)
    assert loss.item() == pytest.approx(sum(expected) / len(expected), rel=1e-12)
    classes = NodeLabels(2, class_weight=(1.0, 4.0), **options)
    two = classes.loss(F.pad(out[:, 2:], (1, 0)), bits[:, 2].long())
    torch.testing.assert_close(NodeMultiLabels(1, pos_weight=4.0, **options).loss(out[:, 2:], bits[:, 2:]), two)


def test_the_gradient_of_a_focal_loss_is_finite_where_labels_are_certain():
    for gamma, dtype in product((0.01, 0.5, 2.0), (torch.float32, torch.float64)):
        out = torch.tensor([[1e3, -1e3], [0.0, 0.0]], dtype=dtype, requires_grad=True)
        for kind, y in ((NodeLabels, torch.tensor([0, 1])), (NodeMultiLabels, torch.eye(2))):
            (grad,) = torch.autograd.grad(kind(2, focal=gamma).loss(out, y), out)
            assert grad.isfinite().all() and (grad[1] != 0).any()


def test_each_row_of_a_batch_of_numbers_is_its_own_objective():
    out, y, bits = drawn()
    outs, draw = torch.stack([out, out.flip(0), 2 * out]), torch.Generator().manual_seed(1)
    numbers = {"label_smoothing": torch.tensor([0.0, 0.1, 0.3]), "focal": torch.tensor([2.0, 0.0, 0.5])}
    weights = torch.rand(3, 3, generator=draw)
    cases: list[tuple[Objective, Tensor, Tensor, dict[str, Tensor]]] = [
        (NodeLabels(3), outs, y, {"class_weight": weights}),
        (NodeMultiLabels(3), outs, bits, {"pos_weight": weights}),
        (NodeMultiLabels(3), outs, bits, {"pos_weight": weights[:, 0]}),
        (LinkLabels(3), outs[..., 0], bits[:, 0].long(), {"pos_weight": weights[:, 0]}),
    ]
    for objective, each, labels, own in cases:
        options = {key: value.double() for key, value in {**numbers, **own}.items()}

        def statistics(out: Tensor, *values: Tensor, case: Any = (objective, labels, options)) -> Any:
            objective, labels, options = case
            return replace(objective, **dict(zip(options, values, strict=True))).train_statistics(out, labels)

        losses, sums = vmap(statistics)(each, *options.values())
        for row in range(3):
            plain = {key: value[row].tolist() for key, value in options.items()}
            loss, expected = replace(objective, **plain).train_statistics(each[row], labels)  # type: ignore[arg-type]
            torch.testing.assert_close((losses[row], sums[row]), (loss, expected), rtol=1e-13, atol=0)


def task_of(y: Tensor, objective: Objective, names: tuple[str, ...] | None = None) -> Task:
    """A task whose three splits have the same labels."""
    data = Data(torch.randn(3 * len(y), 2), torch.zeros(2, 0, dtype=torch.long), y=torch.cat([y, y, y]))
    for i, key in enumerate(MASKS):
        data[key] = torch.arange(3 * len(y)) // len(y) == i
    return Task("mine", [data], [data], [data], 2, objective, class_names=names)


def test_balanced_weights_are_those_of_scikit_learn_and_the_shares_of_the_training_labels():
    y = torch.tensor([0] * 6 + [1] * 3 + [2])
    objective = task_of(y, NodeLabels(3, class_weight="balanced")).objective
    assert isinstance(objective, NodeLabels)
    of_sklearn = compute_class_weight("balanced", classes=np.arange(3), y=y.numpy())
    assert objective.class_weight == pytest.approx(of_sklearn)
    bits = F.one_hot(y, 4).float()
    weighted = task_of(bits[:, 1:], NodeMultiLabels(3)).with_loss(pos_weight="balanced").objective
    assert isinstance(weighted, NodeMultiLabels) and weighted.pos_weight == pytest.approx((7 / 3, 9.0, 1.0))


def rare() -> Tensor:
    return torch.tensor([0] * 49 + [1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: task_of(rare(), NodeLabels(2), ("no", "yes")),
            "mine: class yes has 2 % of the training nodes. loss.class_weight=balanced, smaller weights or "
            "loss.focal=2 give rare classes more influence. Compare them by metric=macro_f1, which counts "
            "all classes alike.",
        ),
        (
            lambda: task_of(F.one_hot(rare() + rare().roll(1) * 2, 4)[:, :3].float(), NodeMultiLabels(3, MACRO_F1)),
            "mine: 2 of 3 labels are rare: label 1 has 2 % of the training nodes. loss.pos_weight=balanced, s",
        ),
        (lambda: task_of(1 - rare(), NodeLabels(2)), "mine: class 0 has 2 % of the training nodes."),
        (lambda: task_of(torch.arange(50), NodeLabels(50)), ""),  # as many of each
        (lambda: task_of(rare(), NodeLabels(2, ROC_AUC)), ""),
        (lambda: task_of(rare(), NodeLabels(2, class_weight="balanced")), ""),
        (lambda: task_of(rare(), NodeLabels(2, focal=2.0)), ""),
        (lambda: task_of(rare()[:, None].float(), NodeTargets(1)), ""),
    ],
)
def test_rare_classes_are_reported_unless_the_loss_or_the_score_is_for_them(make: Callable[[], Task], message: str):
    assert rare_line(make())[: len(message) or None] == message


@pytest.mark.parametrize(
    ("objective", "options", "message"),
    [
        (
            NodeLabels(3),
            {"class_weight": (1.0, 2.0)},
            r"class_weight is \(1\.0, 2\.0\), expected balanced or 3 numbers",
        ),
        (
            NodeLabels(3),
            {"class_weight": "even"},
            "class_weight is 'even', expected balanced or 3 numbers, one for eac",
        ),
        (NodeLabels(2), {"class_weight": (-1.0, 2.0)}, "expected finite numbers, at least 0, that are not all 0"),
        (NodeLabels(2), {"label_smoothing": 1.0}, r"label_smoothing is 1\.0, expected a number from 0 to below 1"),
        (NodeLabels(2), {"focal": -1.0}, r"focal is -1\.0, expected a finite number, at least 0"),
        (NodeMultiLabels(2), {"pos_weight": 0.0}, r"pos_weight is 0\.0, expected a finite number above 0"),
        (
            NodeMultiLabels(2),
            {"class_weight": 1.0},
            "does not fit 2 node labels, expected pos_weight, label_smooth",
        ),
        (LinkLabels(2), {"pos_weight": "balanced"}, "expected a number: the weight of a link. Training draws as many"),
        (NodeTargets(2), {"focal": 1.0}, "focal does not fit 2 node targets, expected error"),
        (NodeTargets(2), {"error": "l1"}, "error is 'l1', expected one of mse, mae, huber"),
    ],
)
def test_an_option_of_the_loss_that_does_not_fit_is_an_error(objective: Objective, options: Any, message: str):
    with pytest.raises(ValueError, match=message):
        objective.with_loss(**options)


def test_balanced_weights_need_training_labels():
    with pytest.raises(
        ValueError, match=r"A weight of the loss is balanced, which follows from the training labels\. U"
    ):
        NodeLabels(3, class_weight="balanced").loss(*drawn()[:2])
