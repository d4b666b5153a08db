"""Splits of nodes and graphs into training, validation and test."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch_geometric.data import Data

from ..tasks.objective import MASKS, any_known

# Splits -------------------------------------------------------------------------------------------------------------


def _draw_masks(data: Data, K: int, per_class: int, val: int, test: int, seed: int, name: str) -> None:
    """Give ``data`` the masks it lacks, drawn among the labelled nodes that no mask of its own holds."""
    order = torch.randperm(len(data.y), generator=torch.Generator().manual_seed(seed))
    free = any_known(data.y)
    for key in MASKS:
        if key in data:
            free &= ~data[key]
    for key, size in zip(MASKS, (per_class * K, val, test), strict=True):
        if key in data:
            continue
        order = order[free[order]]
        if key == "train_mask" and data.y.dim() == 1:
            labels = [order[data.y[order] == label][:per_class] for label in range(K)]
            few = [f"{label} ({len(nodes)})" for label, nodes in enumerate(labels) if len(nodes) != per_class]
            if few:
                raise ValueError(
                    f"{name}: per_class={per_class} asks for more labelled nodes than there are in class "
                    f"{', '.join(few[:5])}. Choose a smaller per_class (split.per_class in the command), or give "
                    "train_mask."
                )
            chosen = torch.cat(labels)
        else:
            chosen = order[:size]
            if len(chosen) != size:
                raise ValueError(
                    f"{name}: {key} asks for {size} nodes, but only {len(chosen)} labelled ones are left. "
                    f"Choose smaller per_class, val and test (split.* in the command), or give {key}."
                )
        data[key] = torch.zeros_like(free)
        data[key][chosen] = True
        free[chosen] = False


def _draw_graphs(graphs: list[Data], val: int, test: int, seed: int, name: str) -> list[list[Data]]:
    """Whole graphs for training, validation and test; those for training keep their order."""
    if val + test >= len(graphs) or min(val, test) < 1:
        raise ValueError(
            f"{name} has {len(graphs)} graphs, of which val={val} and test={test} are to be drawn and at least one be "
            "left for training. Choose val and test (split.* in the command) as numbers of graphs, or give three sets."
        )
    order = torch.randperm(len(graphs), generator=torch.Generator().manual_seed(seed)).tolist()
    held = [sorted(order[:val]), sorted(order[val : val + test])]
    return [[graphs[i] for i in part] for part in (sorted(order[val + test :]), *held)]


def _ogb_masks(data: Data, index: Mapping[str, Tensor]) -> None:
    """The split that comes with a data set of OGB, as masks."""
    for key, part in zip(MASKS, ("train", "valid", "test"), strict=True):
        data[key] = torch.zeros(len(data.y), dtype=torch.bool).index_fill_(0, index[part], True) & any_known(data.y)
