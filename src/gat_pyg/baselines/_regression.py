"""Logistic regression: a linear layer fitted by scikit-learn."""

from __future__ import annotations

import torch
from torch import Tensor, nn


@torch.no_grad()
def regress(lin: nn.Linear, x: Tensor, y: Tensor, strength: float) -> None:
    """Make `softmax(lin(x))` the probabilities of scikit-learn's `LogisticRegression`; nothing is random.

    A class of the layer that no example has is given a bias of -1e9, so that it is never told.

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
        >>> regress(lin, torch.eye(2), torch.tensor([2, 0]), strength=1.0)
        >>> lin(torch.eye(2)).argmax(1)
        tensor([2, 0])
    """
    try:
        from sklearn.linear_model import LogisticRegression
    except ImportError as error:
        raise ImportError(
            "this method needs scikit-learn's logistic regression. Run: python -m pip install 'gat_pyg[baselines]'."
        ) from error
    found = LogisticRegression(C=strength, max_iter=1000).fit(x.cpu().numpy(), y.cpu().numpy())
    weight, bias = (torch.from_numpy(value).to(lin.weight) for value in (found.coef_, found.intercept_))
    if len(bias) == 1:  # of two classes, the log odds of the second
        weight, bias = torch.cat([-weight, weight]) / 2, torch.cat([-bias, bias]) / 2
    lin.weight.zero_()[found.classes_] = weight
    lin.bias.fill_(-1e9)[found.classes_] = bias
