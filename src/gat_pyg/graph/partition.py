"""Partition of the nodes into parts of similar size with few edges between them."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch_geometric.index import index2ptr
from torch_geometric.utils import remove_self_loops, to_undirected

Method = Literal["auto", "metis", "ranges"]
LARGE = 2_000_000  # edges; METIS takes seconds for more
WITH_METIS = find_spec("pymetis") is not None


def partition(edge_index: Tensor, num_nodes: int, num_parts: int, method: Method = "auto") -> Tensor:
    """Return the part of each node, `[N]` int64 in 0 to num_parts - 1; no part is empty. The result is deterministic.

    `"metis"` minimises the number of edges between parts (Karypis and Kumar, SIAM J. Sci. Comput. 1998); the sizes of
    parts with hundreds of nodes differ by a few percent. Edge directions, loops and repeated edges are ignored. It
    needs pymetis, the extra `metis`. `"ranges"` ignores the edges: each part is a range of node ids, and the sizes
    differ by one at most. `"auto"` is METIS if pymetis is installed (`WITH_METIS`), else ranges.

    Args:
        edge_index: `[2, E]`, src and dst.
        num_nodes: number of nodes N.
        num_parts: number of parts, from 1 to N.
        method: `"auto"`, `"metis"` or `"ranges"`.

    Raises:
        ValueError: for another number of parts, or another method.
        ImportError: if `method` is "metis" and pymetis is not installed.

    Cost: METIS takes O(E) time on one core and about 300 bytes per edge; ranges take 8 bytes per node.

    Example:
        >>> partition(torch.tensor([[0, 1, 3], [1, 2, 4]]), num_nodes=5, num_parts=2, method="ranges")
        tensor([0, 0, 0, 1, 1])
    """
    if not 1 <= num_parts <= num_nodes:
        raise ValueError(
            f"num_parts is {num_parts}, expected 1 to {num_nodes}, the number of nodes: none may be empty."
        )
    if method not in get_args(Method):
        raise ValueError(f"method is {method!r}, expected one of {', '.join(get_args(Method))}.")
    if method == "metis" and not WITH_METIS:
        raise ImportError("METIS needs pymetis. Run: python -m pip install 'gat_pyg[metis]'. Or use method='ranges'.")
    if method == "ranges" or num_parts == 1 or not WITH_METIS:
        return torch.arange(num_nodes, device=edge_index.device) * num_parts // num_nodes
    return _metis(edge_index.cpu(), num_nodes, num_parts).to(edge_index.device)


def _metis(edge_index: Tensor, N: int, num_parts: int) -> Tensor:
    loopless, _ = remove_self_loops(edge_index.long())
    src, dst = to_undirected(loopless, num_nodes=N)  # sorted by src
    part = torch.from_numpy(_apart(index2ptr(src, N).numpy(), dst.contiguous().numpy(), num_parts))
    sizes = part.bincount(minlength=num_parts)
    for empty in (sizes == 0).nonzero().flatten().tolist():  # METIS may leave some if parts have only a few nodes
        largest = int(sizes.argmax())
        part[(part == largest).nonzero()[-1]] = empty
        sizes[largest], sizes[empty] = sizes[largest] - 1, 1
    return part


def _apart(rowptr: np.ndarray, col: np.ndarray, num_parts: int) -> np.ndarray:
    """Run METIS; for a large graph in a process of its own, since it blocks all threads of its process."""
    if col.size < LARGE:
        return _parts(rowptr, col, num_parts)
    with TemporaryDirectory() as folder:
        graph, parts = Path(folder, "graph.npz"), Path(folder, "parts.npy")
        np.savez(graph, rowptr=rowptr, col=col)
        subprocess.run([sys.executable, "-m", __name__, graph, parts, str(num_parts)], check=True)
        return np.asarray(np.load(parts))


def _parts(rowptr: np.ndarray, col: np.ndarray, num_parts: int) -> np.ndarray:
    import pymetis

    _, parts = pymetis.part_graph(num_parts, pymetis.CSRAdjacency(rowptr, col), options=pymetis.Options(seed=0))
    return np.array(parts, dtype=np.int64)


def edge_cut(edge_index: Tensor, part: Tensor) -> float:
    """Return the share of the edges `[2, E]` that connect two parts: 0 to 1, and 0 if there is no edge.

    Example:
        >>> edge_cut(torch.tensor([[0, 1, 2], [1, 2, 3]]), torch.tensor([0, 0, 1, 1]))
        0.3333333333333333
    """
    src, dst = part[edge_index]
    return float((src != dst).sum()) / max(edge_index.size(1), 1)


if __name__ == "__main__":  # see _apart
    with np.load(sys.argv[1]) as arrays:
        np.save(sys.argv[2], _parts(arrays["rowptr"], arrays["col"], int(sys.argv[3])))
