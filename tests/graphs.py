"""A zoo of graphs: the shapes that break things, small enough to check by hand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Graph:
    """An edge list [2, E] of (src, dst) between N_src and N_dst nodes."""

    name: str
    index: Tensor
    num_src: int
    num_dst: int

    def __str__(self) -> str:
        return self.name


def graph(name: str, edges: list[tuple[int, int]], num_src: int, num_dst: int | None = None) -> Graph:
    index = torch.tensor(edges, dtype=torch.long).reshape(-1, 2).t().contiguous()
    return Graph(name, index, num_src, num_src if num_dst is None else num_dst)


def union(*graphs: Graph) -> Graph:
    """The graphs side by side, the later ones' nodes numbered on."""
    parts, num_src, num_dst = [], 0, 0
    for part in graphs:
        parts.append(part.index + torch.tensor([[num_src], [num_dst]]))
        num_src, num_dst = num_src + part.num_src, num_dst + part.num_dst
    return Graph("+".join(g.name for g in graphs), torch.cat(parts, 1), num_src, num_dst)


def random(num_src: int, num_dst: int, num_edges: int, seed: int = 0) -> Graph:
    generator = torch.Generator().manual_seed(seed)
    src = torch.randint(num_src, (num_edges,), generator=generator)
    dst = torch.randint(num_dst, (num_edges,), generator=generator)
    return Graph(f"random{num_src}x{num_dst}", torch.stack([src, dst]), num_src, num_dst)


EMPTY = graph("empty", [], 0)
NO_EDGES = graph("no_edges", [], 4)
ONE_NODE = graph("one_node", [(0, 0)], 1)
ISOLATED = graph("isolated", [(0, 2), (4, 2), (2, 0)], 6)  # 1, 3 and 5 touch no edge
STAR_IN = graph("star_in", [(j, 0) for j in range(1, 9)], 9)
STAR_OUT = graph("star_out", [(0, i) for i in range(1, 9)], 9)
CHAIN = graph("chain", [(i, i + 1) for i in range(6)], 7)
COMPLETE = graph("complete", [(j, i) for j in range(5) for i in range(5)], 5)
LOOPS = graph("loops", [(0, 0), (1, 0), (2, 2), (2, 2), (0, 1)], 3)
REPEATED = graph("repeated", [(1, 0), (1, 0), (2, 0), (1, 0), (0, 2)], 3)
BIPARTITE = graph("bipartite", [(0, 1), (4, 1), (3, 0), (2, 1), (2, 0)], 5, 3)
WIDE = graph("wide", [(0, 4), (1, 4), (1, 0)], 2, 6)
BATCH = union(CHAIN, LOOPS, ISOLATED)
RANDOM = random(40, 40, 300)

SQUARE = [EMPTY, NO_EDGES, ONE_NODE, ISOLATED, STAR_IN, STAR_OUT, CHAIN, COMPLETE, LOOPS, REPEATED, BATCH, RANDOM]
ZOO = [*SQUARE, BIPARTITE, WIDE, random(30, 7, 200)]


def amazon_files(root: Path, name: str) -> None:
    """Write the raw file of a small graph where PyG's class Amazon finds it."""
    shchur_file(root / "Amazon" / name / "raw" / f"amazon_electronics_{name.lower()}.npz")


def shchur_file(path: Path) -> None:
    """Write the raw file of a small graph as of Shchur et al. (2018): a ring of 3 classes with 20 nodes each."""
    N, draw = 60, np.random.default_rng(0)
    stored: dict[str, Any] = {"labels": np.repeat(np.arange(3), 20)}
    for key, columns in (("attr", draw.permutation(N)), ("adj", (np.arange(N) + 1) % N)):  # CSR, one entry in each row
        csr = {
            "data": np.ones(N, np.float32),
            "indices": columns,
            "indptr": np.arange(N + 1),
            "shape": np.array([N, N]),
        }
        stored |= {f"{key}_{part}": values for part, values in csr.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **stored)
