"""The checks of a graph, each with its error."""

from __future__ import annotations

import torch
from torch import Tensor

_ID_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_edge_index(edge_index: Tensor) -> None:
    """Check the dtype and shape of an edge list; no id is read, so there is no device sync.

    Raises:
        ValueError: if the ids are not integers or the shape is not `(2, E)`.
    """
    if edge_index.dtype not in _ID_DTYPES:  # torch has few operations for uint16, uint32 and uint64
        raise ValueError(
            f"edge_index has dtype {edge_index.dtype}, expected integers, signed or uint8. "
            f"Did you mean edge_index.long()?"
        )
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        hint = " Did you mean edge_index.t()?" if edge_index.dim() == 2 and edge_index.size(1) == 2 else ""
        raise ValueError(f"edge_index has shape {tuple(edge_index.shape)}, expected (2, E).{hint}")


def check_ids(facts: dict[str, int], side: str, num_nodes: int) -> None:
    """Check the lowest and the highest id of one side.

    Raises:
        IndexError: if an id is outside `[0, N)`.
    """
    if not facts["edges"]:
        return
    low, high = facts[f"lowest {side}"], facts[f"highest {side}"]
    if low < 0:
        raise IndexError(f"edge_index holds the {side} id {low}, expected ids of at least 0. Was it padded with -1?")
    if high >= num_nodes:
        raise IndexError(
            f"edge_index holds the {side} id {high}, but there are {num_nodes} {side} nodes (0 to {num_nodes - 1}). "
            f"Give x one row for every node, or pass size=(num_src, num_dst)."
        )


def check_rowptr(facts: dict[str, int], num_edges: int) -> None:
    """Check the pointer of a CSR matrix.

    Raises:
        ValueError: if it does not rise from 0 to E.
    """
    falls, first, last = facts["falls"], facts["first"], facts["last"]
    if falls or first != 0 or last != num_edges:
        fault = "falls" if falls else f"begins at {first}" if first else f"ends at {last}"
        raise ValueError(f"the adjacency's rowptr {fault}, expected 0 to {num_edges} without a fall.")


def check_matrix(shape: tuple[int, ...], num_src: int, num_dst: int, flow: str) -> None:
    """Check the shape of an adjacency matrix, whose rows are dst.

    Raises:
        ValueError: if it is not `[N_dst, N_src]`, or the flow is "target_to_source".
    """
    if flow == "target_to_source":
        raise ValueError(
            "a sparse adjacency holds dst by src, flow='target_to_source' is for edge lists. Pass adj.t()."
        )
    if shape != (num_dst, num_src):
        raise ValueError(
            f"the adjacency has shape {shape}, expected (N_dst, N_src) = {(num_dst, num_src)}. Did you mean adj.t()?"
        )
