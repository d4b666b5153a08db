"""The keys of graphs that are read, and a warning of the others."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from difflib import get_close_matches

import numpy as np
from torch import Tensor
from torch_geometric.data import Data

from ...tasks.checks import KEYS
from ...tasks.objective import MASKS

UNION = ("batch", "ptr")  # either shows that the arrays are those of several graphs
PAIRS = ("edge_label", "edge_label_index", "edge_label_attr")
READ = (*KEYS, *PAIRS, *UNION, "num_nodes")

USES = {  # what to do with other keys that have a meaning elsewhere
    **dict.fromkeys(("edge_weight", "weight", "weights", "edge_type"), "give it as edge_attr"),
    **dict.fromkeys(("node_type", "pos", "z", "feat", "features"), "append it to x"),
    **dict.fromkeys(("label", "labels", "target", "targets"), "give it as y"),
    **dict.fromkeys(("valid_mask", "validation_mask", "dev_mask"), "give it as val_mask"),
    **dict.fromkeys(MASKS, "the graphs come split"),
    "edge_label_attr": "only edge labels have it",
    **{f"{split}_{end}": f"give {key}_mask by torch_geometric.utils.index_to_mask"
       for split, key in {"train": "train", "val": "val", "valid": "val", "test": "test"}.items()
       for end in ("idx", "index", "id", "ids")},
}  # fmt: skip


def warn_of_unread(graphs: Sequence[Data], name: str, without: Collection[str] = ()) -> None:
    """Warn once of numeric keys that are not read, such as `edge_weight` or a mistyped key, with the remedy.

    Of the keys in `READ`, `edge_label_attr` is read for edge labels only, and those in `without` are not.
    """
    known = {*READ}.difference(without)
    if not any("edge_label" in data for data in graphs):
        known.discard("edge_label_attr")
    unread = {}
    for data in graphs:
        for key in data.keys():  # noqa: SIM118 (iterating over a Data yields pairs)
            if key in known or key in unread:
                continue
            value = data[key]
            is_array = isinstance(value, Tensor) or (isinstance(value, np.ndarray) and value.dtype.kind in "biuf")
            if is_array and value.ndim:
                unread[key] = _use(key)
    if unread:
        listed = ", ".join(f"{key} ({use})" if use else key for key, use in sorted(unread.items()))
        warnings.warn(f"{name}: keys that are not read: {listed}.", stacklevel=4)


def _use(key: str) -> str:
    similar = get_close_matches(key, READ, 1, 0.8)
    return USES.get(key) or (f"did you mean {similar[0]}?" if similar else "")
