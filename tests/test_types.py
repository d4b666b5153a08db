"""What a type checker sees of the package: `nox -s types` checks this file too, in which every `ignore` is needed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from typing_extensions import assert_type

import gat_pyg
from gat_pyg import GAT


def test_wrong_names_are_errors() -> None:
    with pytest.raises(AttributeError, match="module 'gat_pyg' has no attribute 'GATConvv'"):
        gat_pyg.GATConvv  # type: ignore[attr-defined]  # noqa: B018
    assert isinstance(gat_pyg.__version__, str)


def test_a_network_returns_a_tensor() -> None:
    x, edge_index = torch.ones(3, 4), torch.tensor([[0, 1], [1, 2]])
    assert_type(GAT(4, [2], 3, [1, 1]).forward(x, edge_index), Tensor)
