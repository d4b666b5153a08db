"""Random: labels drawn with their frequencies among the training nodes, independently of the node.

The row is from Hamilton, Ying and Leskovec, Inductive Representation Learning on Large Graphs (NeurIPS 2017), whose
text does not describe the method. On PPI, its expected micro-F1 is 0.398, and the paper reports 0.396. A fair coin, as
in one of their scripts, has 0.375. In scikit-learn it is `DummyClassifier(strategy="stratified")`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ...philox import uniform


class Chance(nn.Module):
    r"""A learnt bias for each label, with noise in evaluation:

    .. math::
        z_{ik} = b_k + \log E_{i0} - \log E_{ik}, \qquad E \sim \mathrm{Exp}(1)

    So a label is predicted (z > 0) with probability sigmoid(b_k), and has the largest logit with probability
    softmax(b)_k. The noise depends on a seed that is drawn with the initial weights and saved with them: a graph has
    the same logits every time, on every device. Training minimises the cross-entropy, at which sigmoid(b) or softmax(b)
    are the frequencies of the labels.

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
        """Return logits `[N, K]` for x `[N, F]`; only N matters."""
        if self.training:
            return self.bias.expand(x.size(0), -1)
        u = uniform(self.seed, x.size(0), 1 + self.bias.size(0)).clamp(min=2**-25)  # a multiple of 2^-24; no E is 0
        E = -(-u).log1p()
        return self.bias + (E[:, :1] / E[:, 1:]).log()
