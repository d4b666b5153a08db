"""Random: labels drawn as often as the training nodes have them, whatever the node.

The row is of Hamilton, Ying and Leskovec, Inductive Representation Learning on Large Graphs (NeurIPS 2017), whose text
does not tell how it was drawn. On PPI these draws are to be expected at 0.398 in micro-F1 where they report 0.396; the
fair coins in a script of theirs at 0.375. scikit-learn calls it `DummyClassifier(strategy="stratified")`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ..philox import uniform


class Chance(nn.Module):
    r"""A bias for each label, at which the cross-entropy is least, and in evaluation noise on top:

    .. math::
        z_{ik} = b_k + \log E_{i0} - \log E_{ik}, \qquad E \sim \mathrm{Exp}(1)

    So a label is drawn, z > 0, with probability sigmoid(b_k), and is the largest of all with probability
    softmax(b)_k. The draws follow from a seed that is drawn as the model is made and kept with its weights: a graph has
    the same logits each time, on every device. Training by the loss of all graphs at once finds the labels' shares.

    Args:
        out_channels: K, the number of classes or labels.

    Example:
        >>> model = Chance(7).eval()
        >>> torch.equal(model(torch.ones(3, 16)), model(torch.zeros(3, 16)))
        True
    """

    def __init__(self, out_channels: int) -> None:
        super().__init__()
        self.bias = Parameter(torch.zeros(out_channels))
        self.seed: Tensor
        self.register_buffer("seed", torch.randint(2**31, ()))

    def forward(self, x: Tensor) -> Tensor:
        """Logits `[N, K]` for x `[N, F]`, of which N alone counts."""
        if self.training:
            return self.bias.expand(x.size(0), -1)
        u = uniform(self.seed, x.size(0), 1 + self.bias.size(0)).clamp(min=2**-25)  # a multiple of 2^-24; no E is 0
        E = -(-u).log1p()
        return self.bias + (E[:, :1] / E[:, 1:]).log()
