"""Logistic regression: a linear layer fitted by scikit-learn."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...files import needs


@torch.no_grad()
def fit_logistic(lin: nn.Linear, x: Tensor, y: Tensor, strength: float) -> None:
    """Fit a layer so that `softmax(lin(x))` equals scikit-learn's `LogisticRegression`; the result is deterministic.

    A class without examples gets a bias of -1e9, so that it is never predicted.

    Args:
        lin: a layer `[K, D]`.
        x: the examples `[M, D]`.
        y: their classes `[M]`.
        strength: the inverse strength of L2, which acts on the weights alone.

    Raises:
        ImportError: if scikit-learn is not installed.
        ValueError: if all examples are of one class.

    Example:
        >>> lin = nn.Linear(2, 3)
        >>> fit_logistic(lin, torch.eye(2), torch.tensor([2, 0]), strength=1.0)
        >>> lin(torch.eye(2)).argmax(1)
        tensor([2, 0])
    """
    model = needs("sklearn.linear_model", "baselines").LogisticRegression(C=strength, max_iter=1000)
    model.fit(*(each.cpu().clone().numpy() for each in (x, y)))
    weight, bias = (torch.from_numpy(value).to(lin.weight) for value in (model.coef_, model.intercept_))
    if len(bias) == 1:  # with two classes, the log odds of the second
        weight, bias = torch.cat([-weight, weight]) / 2, torch.cat([-bias, bias]) / 2
    lin.weight.zero_()[model.classes_] = weight
    lin.bias.fill_(-1e9)[model.classes_] = bias
