"""The paper's stopping rule is the loop of the authors' code."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor, nn

from gat_pyg.tasks.nodes import NodeLabels
from gat_pyg.training import PaperStopping
from tests.training.loaders import pytestmark, trainer  # noqa: F401 (marks of this file)


def oracle(epochs: list[tuple[float, float]], patience: int) -> tuple[int, int]:
    """The loop of the authors' code: (epochs run, best epoch)."""
    vacc_mx, vlss_mn, curr_step, best = 0.0, float("inf"), 0, 0
    for epoch, (vacc, vlss) in enumerate(epochs, start=1):
        if vacc >= vacc_mx or vlss <= vlss_mn:
            if vacc >= vacc_mx and vlss <= vlss_mn:
                best = epoch
            vacc_mx = max((vacc, vacc_mx))
            vlss_mn = min((vlss, vlss_mn))
            curr_step = 0
        else:
            curr_step += 1
            if curr_step == patience:
                return epoch, best
    return len(epochs), best


anytime = settings(deadline=None)  # a busy machine may stop between two examples
few = st.integers(0, 4).map(float)  # few values, so that ties come often
epochs_of = st.lists(st.tuples(few, few), min_size=1, max_size=40)


@anytime
@given(epochs_of, st.integers(1, 5))
def test_the_rule_is_the_authors_rule(epochs: list[tuple[float, float]], patience: int):
    rule = PaperStopping(patience)
    for score, loss in epochs:
        rule.update(score, loss)
        if rule.left <= 0:
            break
    assert (rule.epoch, rule.best_epoch) == oracle(epochs, patience)


@anytime
@given(epochs_of, st.integers(1, 5), st.integers(0, 40))
def test_the_rule_continues_from_its_state(epochs: list[tuple[float, float]], patience: int, cut: int):
    whole, before, after = (PaperStopping(patience) for _ in range(3))
    for score, loss in epochs:
        whole.update(score, loss)
    for score, loss in epochs[:cut]:
        before.update(score, loss)
    after.load_state_dict(before.state_dict())
    for score, loss in epochs[cut:]:
        after.update(score, loss)
    assert str(after.state_dict()) == str(whole.state_dict())


@anytime
@given(epochs_of, st.sampled_from(["accuracy", "loss"]))
def test_a_single_criterion_looks_at_one_and_keeps_the_last_best(epochs: list[tuple[float, float]], criterion: Any):
    rule, column = PaperStopping(100, criterion), 0 if criterion == "accuracy" else 1
    for score, loss in epochs:
        rule.update(score, loss)
    values = [epoch[column] for epoch in epochs]
    best = max(values) if criterion == "accuracy" else min(values)
    assert rule.best_epoch == max(i for i, value in enumerate(values, start=1) if value == best)
    assert rule.wait == len(epochs) - rule.best_epoch


@anytime
@given(epochs_of)
def test_the_strict_rule_keeps_the_first_of_the_best_scores_with_the_least_loss(epochs: list[tuple[float, float]]):
    rule = PaperStopping(100, "strict")
    for score, loss in epochs:
        rule.update(score, loss)
    best = max((score, -loss) for score, loss in epochs)
    assert rule.best_epoch == 1 + [(score, -loss) for score, loss in epochs].index(best)
    assert rule.wait == len(epochs) - rule.best_epoch  # a constant score does not reset the patience


@anytime
@given(
    st.lists(st.tuples(*2 * [st.sampled_from([0.0, 1.0, math.nan, math.inf, -math.inf])]), max_size=20),
    st.sampled_from(["both", "accuracy", "strict", "loss"]),
)
def test_epochs_that_are_not_finite_only_use_up_patience(epochs: list[tuple[float, float]], criterion: Any):
    rule, finite_epochs = PaperStopping(100, criterion), PaperStopping(100, criterion)
    for epoch in epochs:
        before = rule.wait
        is_best = rule.update(*epoch)
        if all(map(math.isfinite, epoch)):
            assert is_best == finite_epochs.update(*epoch)
        else:
            assert not is_best and rule.wait == before + 1
    assert (rule.best_score, rule.best_loss) == (finite_epochs.best_score, finite_epochs.best_loss)


class Scripted(BoringModel):
    """Its weight is the number of the epoch, its validation the epoch's entry of a list."""

    objective = NodeLabels(1)

    def __init__(self, epochs: list[tuple[float, float]]) -> None:
        super().__init__()
        self.epochs = epochs
        self.weight = nn.Parameter(torch.zeros(()))

    def on_train_epoch_end(self) -> None: ...

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.weight.fill_(self.current_epoch + 1)
        return 0 * self.layer(batch).sum()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        score, loss = self.epochs[self.current_epoch]
        self.log_dict({"val_loss": loss, "val_accuracy": score})

    def on_validation_epoch_end(self) -> None: ...


SCRIPT = [(1.0, 3.0), (2.0, 2.0), (1.0, 1.0), (2.0, 1.0), (3.0, 1.5), (2.0, 1.5), (2.0, 1.5), (9.0, 0.0)]


@pytest.mark.parametrize(("patience", "limit", "epochs", "best"), [(2, 8, 7, 4), (100, 3, 3, 2)])
def test_training_stops_by_the_rule_with_the_best_weights(patience: int, limit: int, epochs: int, best: int):
    module, rule = Scripted(SCRIPT), PaperStopping(patience)
    fitted = trainer(rule, epochs=limit, limit_train_batches=1, limit_val_batches=1)
    fitted.fit(module)
    assert (rule.epoch, rule.best_epoch) == oracle(SCRIPT[:limit], patience) == (epochs, best)
    assert fitted.current_epoch == epochs and module.weight.item() == best
    assert (rule.kept_score, rule.kept_loss) == SCRIPT[best - 1]


class Diverging(Scripted):
    """`Scripted` whose weights are NaN from some epoch on."""

    def __init__(self, epochs: list[tuple[float, float]], last: int) -> None:
        super().__init__(epochs)
        self.last = last
        self.register_buffer("mask", torch.tensor(-torch.inf))  # no parameter, so it may be infinite

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.current_epoch + 1 > self.last:
            with torch.no_grad():
                self.weight.fill_(torch.nan)
        return loss


@pytest.mark.parametrize(("last", "stops"), [(3, 4), (9, 8)])
def test_training_stops_once_the_weights_are_not_finite(last: int, stops: int):
    module, rule = Diverging([*SCRIPT[:3], *[(1.0, math.nan)] * 9], last), PaperStopping(patience=5)
    fitted = trainer(rule, epochs=12, limit_train_batches=1, limit_val_batches=1)
    message = r"Training diverged: its weights are not finite after epoch 4\. It stops with the weights of epoch 2\."
    with pytest.warns(UserWarning, match=message) if last == 3 else nullcontext():
        fitted.fit(module)
    assert (fitted.current_epoch, rule.best_epoch, rule.left) == (stops, 2, 0)  # by patience where they are finite
    assert module.weight.item() == 2.0


def test_a_training_without_a_finite_epoch_warns():
    fitted = trainer(PaperStopping(), epochs=2, limit_train_batches=1, limit_val_batches=1)
    with pytest.warns(UserWarning, match="The validation loss or score was not finite in any of 2 epochs"):
        fitted.fit(Scripted([(1.0, math.nan)] * 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"patience": 0}, "patience is 0, expected at least 1"),
        ({"criterion": "f1"}, "criterion is 'f1', expected one of both, accuracy, strict, loss"),
        ({"score": "val_auc"}, r"needs val_loss and val_auc, but the module logged .*val_accuracy"),
    ],
)
def test_impossible_rules_are_errors(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        trainer(PaperStopping(**arguments), limit_train_batches=1, limit_val_batches=1).fit(Scripted(SCRIPT))
