"""ICA: iterative classification by features and by the neighbours' predicted classes (Lu & Getoor, ICML 2003)."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.utils import scatter

from ._regression import fit_logistic


class ICA(nn.Module):
    r"""The iterative classification algorithm of "Link-based Classification".

    Two logistic regressions, of a node's features and of the count of its neighbours in each class (count-link there),
    whose probabilities are multiplied. The features alone give first classes; then, `num_iterations` times,

    .. math::
        y_i = \arg\max_k \; P(k \mid x_i) \, P\Big(k \mid \sum_{j \in \mathcal{N}_i} \mathrm{onehot}(y_j)\Big)

    where labelled nodes keep their labels. The classifier of counts is fitted to the counts of the first classes.

    The original distinguishes in-links from out-links, and updates the nodes one after the other. Here links have no
    direction and all nodes are updated at once, so that nothing is random. The paper does not state the strengths of
    the L2 terms: here, those with the best validation accuracy are selected.

    Args:
        in_channels: F, the number of input features.
        out_channels: K, the number of classes.
        num_nodes: N, needed only to load a state dict; `fit` sets it otherwise.
        num_iterations: the number of updates of all nodes.
        strengths: the inverse strengths of L2 to choose from, for the features and for the counts.

    Example:
        >>> data = Data(torch.eye(3), torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]), y=torch.tensor([0, 0, 1]))
        >>> data.train_mask, data.val_mask = torch.tensor([[True, False, True], [False, True, False]])
        >>> model = ICA(in_channels=3, out_channels=2)
        >>> model.fit(data)
        >>> model(data.x, data.edge_index).argmax(1).tolist()
        [0, 0, 1]
    """

    labels: Tensor  # [N, K], one-hot where known, else zeros

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        num_nodes: int = 0,
        num_iterations: int = 10,
        strengths: Sequence[Sequence[float]] = ((1.0, 10.0, 100.0, 1000.0), (0.01, 0.1, 1.0, 10.0)),
    ) -> None:
        super().__init__()
        self.num_iterations = num_iterations
        self.strengths = strengths
        self.by_features = nn.Linear(in_channels, out_channels)
        self.by_links = nn.Linear(out_channels, out_channels)
        self.register_buffer("labels", torch.zeros(num_nodes, out_channels))

    @torch.no_grad()
    def fit(self, data: Data) -> None:
        """Fit both classifiers on the training nodes, with the strengths that do best on the validation nodes.

        Raises:
            ValueError: if nodes have many labels.
            ImportError: if scikit-learn is not installed.
        """
        if data.y.dim() != 1:
            raise ValueError(f"y has shape {tuple(data.y.shape)}, expected (N,): ICA gives each node one class.")
        known = torch.where(data.train_mask, data.y, self.labels.size(1))
        self.labels = F.one_hot(known, self.labels.size(1) + 1)[:, :-1].float()
        train, y = data.train_mask, data.y[data.train_mask]
        best, state = -1, self.state_dict()
        by_features, by_links = self.strengths
        for of_features in by_features:
            fit_logistic(self.by_features, data.x[train], y, of_features)
            counts = _counts(self._settled(self.by_features(data.x)), data.edge_index)
            for of_links in by_links:
                fit_logistic(self.by_links, counts[train], y, of_links)
                right = int((self(data.x, data.edge_index).argmax(1) == data.y)[data.val_mask].sum())
                if right > best:
                    best, state = right, copy.deepcopy(self.state_dict())
        self.load_state_dict(state)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return log probabilities `[N, K]`, up to a constant per node, for x `[N, F]` and the fitted graph's edges."""
        out: Tensor = self.by_features(x).log_softmax(1)
        of_features = out
        for _ in range(self.num_iterations):
            counts = _counts(self._settled(out), edge_index)
            out = of_features + self.by_links(counts).log_softmax(1)
        return out

    def _settled(self, out: Tensor) -> Tensor:
        """Return one-hot classes `[N, K]`: the known labels, else the most probable classes."""
        known = self.labels.any(1, keepdim=True)
        return torch.where(known, self.labels, F.one_hot(out.argmax(1), out.size(1)).to(out.dtype))


def _counts(classes: Tensor, edge_index: Tensor) -> Tensor:
    counts: Tensor = scatter(classes[edge_index[0]], edge_index[1], dim_size=classes.size(0))
    return counts  # [N, K]
