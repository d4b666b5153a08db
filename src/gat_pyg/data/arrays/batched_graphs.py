"""Many graphs from the arrays of their disjoint union, in the layout of PyG's `Batch`."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from ...tasks.checks import check_edge_index, check_edge_index_shape, check_present
from ...tasks.objective import MASKS


def graphs_of(union: Data, task: str | None, name: str) -> list[Data]:
    """Divide a union of G graphs, in which `batch` `[N]` is the graph of each node, or `ptr` `[G + 1]` its first node.

    `x` is `[N, F]`. `edge_index` `[2, E]` and `edge_label_index` hold node ids of the union, in any order of the edges.
    `y` has a row for each graph, node or edge: by `task`, else by its length, in the order nodes, graphs, edges. The
    masks `[G]` or `[G, S]` are of graphs, and each graph gets its row.

    Raises:
        ValueError: if batch or ptr are no division of the nodes, an edge links two graphs, or an array has a length
            that fits nothing.

    Example:
        >>> edge_index, batch = torch.tensor([[0, 1], [0, 2]]), torch.tensor([0, 1, 1])
        >>> union = Data(torch.eye(3), edge_index, y=torch.tensor([5, 7]), batch=batch)
        >>> graphs_of(union, None, "mine")[1].edge_index
        tensor([[0],
                [1]])
    """
    for label in (union.y, union.get("edge_label")):
        if label is not None:
            check_present(copy.copy(union).update({"y": label}), name)
    ptr = pointers(union, name)
    sizes = ptr.diff()
    batch = torch.arange(len(sizes)).repeat_interleave(sizes)
    N, G = len(batch), len(sizes)
    graphs = [Data() for _ in range(G)]
    _fill(graphs, "x", union.x.split(sizes.tolist()))
    edges = _divided(union.edge_index, batch, ptr, name)
    _fill(graphs, "edge_index", [edges_of for edges_of, _ in edges])
    rows = {"edge": [index for _, index in edges], "node": torch.arange(N).split(sizes.tolist())}
    rows["graph"] = torch.arange(G).split(1)
    E = union.edge_index.size(1)
    if union.edge_attr is not None:
        _fill(graphs, "edge_attr", _rows(union.edge_attr, rows["edge"], E, f"{name}: edge_attr", "edges"))
    if "edge_label" in union:
        pairs = (
            edges
            if "edge_label_index" not in union
            else _divided(union.edge_label_index, batch, ptr, f"{name}, edge_label_index")
        )
        M = sum(len(index) for _, index in pairs)
        _fill(graphs, "edge_label_index", [pairs_of for pairs_of, _ in pairs])
        for key in {"edge_label", "edge_label_attr"} & set(union.keys()):
            _fill(graphs, key, _rows(union[key], [i for _, i in pairs], M, f"{name}: {key}", "pairs"))
    if "graph_attr" in union:
        _fill(graphs, "graph_attr", _rows(union.graph_attr, rows["graph"], G, f"{name}: graph_attr", "graphs"))
    if union.y is not None:
        item = _item(union.y, {"node": N, "graph": G, "edge": E}, task, name)
        key = "edge_label" if item == "edge" and "edge_label" not in union else "y"
        _fill(graphs, key, [union.y[index] for index in rows[item]])
    for key in MASKS:
        if key in union:
            _fill(graphs, key, _rows(torch.as_tensor(union[key]), rows["graph"], G, f"{name}: {key}", "graphs"))
    return graphs


def pointers(union: Data, name: str) -> Tensor:
    """Return the first node of each graph, and the number of nodes, `[G + 1]`, on the CPU.

    Raises:
        ValueError: if batch or ptr are no division of the nodes.
    """
    batch, ptr = union.get("batch"), union.get("ptr")
    for key, values in (("batch", batch), ("ptr", ptr)):
        if values is None:
            continue
        is_dense = values.layout == torch.strided and not (values.is_quantized or values.is_meta)
        if values.dim() != 1 or values.is_floating_point() or values.is_complex() or not is_dense:
            raise ValueError(
                f"{name}: {key} is {values.dtype} of shape {tuple(values.shape)}, expected whole numbers: (N,) for "
                "batch, (G + 1,) for ptr."
            )
    if not isinstance(union.x, Tensor) or not union.x.dim():
        raise ValueError(f"{name}: x is missing, expected features [N, F] of the nodes of all graphs.")
    N = union.x.size(0)
    if ptr is None:
        batch = torch.as_tensor(batch).long().cpu()
        if len(batch) != N:
            raise ValueError(f"{name}: batch has {len(batch)} numbers, but x has {N} rows, expected the same.")
        step = torch.cat([batch[:1] + 1, batch.diff()])  # 1 where a graph begins
        if wrong := ((step < 0) | (step > 1)).nonzero().flatten().tolist():
            before = int(batch[wrong[0] - 1]) if wrong[0] else -1
            raise ValueError(
                f"{name}: batch is {int(batch[wrong[0]])} at node {wrong[0]} after {before}, expected the numbers of "
                "the graphs 0, 1, ... in order, without gaps. Sort the nodes by graph."
            )
        starts = step.nonzero().flatten()
        return torch.cat([starts, torch.tensor([N])])
    ptr = torch.as_tensor(ptr).long().cpu()
    if len(ptr) < 2 or ptr[0] != 0 or ptr[-1] != N or (ptr.diff() < 1).any():
        raise ValueError(
            f"{name}: ptr is not a division of the {N} nodes, expected 0, the first node of each further graph in "
            f"increasing order, and {N}."
        )
    if batch is not None and not torch.equal(
        batch.long().cpu(), torch.arange(len(ptr) - 1).repeat_interleave(ptr.diff())
    ):
        raise ValueError(f"{name}: batch and ptr differ. Leave one of them out.")
    return ptr


def _divided(pairs: Tensor, batch: Tensor, ptr: Tensor, where: str) -> list[tuple[Tensor, Tensor]]:
    """Return for each graph its pairs of nodes, with ids from 0, and their indices in the union."""
    check_edge_index_shape(pairs, where)
    check_edge_index(pairs, len(batch), where)
    src, dst = batch[pairs.long()]
    if wrong := (src != dst).nonzero().flatten().tolist():
        first = wrong[0]
        raise ValueError(
            f"{where}: pair {first}, ({int(pairs[0, first])}, {int(pairs[1, first])}), links graph {int(src[first])} "
            f"and graph {int(dst[first])}, expected both ends in one graph. Ids are those of all nodes, as in a "
            "Batch of PyG."
        )
    index = src.sort(stable=True).indices.split(src.bincount(minlength=len(ptr) - 1).tolist())
    return [(pairs[:, rows] - start, rows) for rows, start in zip(index, ptr.tolist(), strict=False)]


def _rows(values: Tensor, rows: Any, count: int, where: str, items: str) -> list[Tensor]:
    """Return the rows of each graph."""
    if not values.dim() or len(values) != count:
        raise ValueError(f"{where} has shape {tuple(values.shape)}, expected a row for each of the {count} {items}.")
    return [values[index] for index in rows]


def _fill(graphs: list[Data], key: str, values: Any) -> None:
    for graph, value in zip(graphs, values, strict=True):
        graph[key] = value


def _item(y: Tensor, counts: dict[str, int], task: str | None, name: str) -> str:
    """Return the item that y has a row for: that of the task, else the first that fits."""
    chosen = str(task).partition("_")[0]
    possible = {chosen: counts[chosen]} if chosen in counts else counts
    for item, count in possible.items():
        if y.dim() and len(y) == count:
            return item
    expected = " or ".join(f"{count} {item}s" for item, count in possible.items())
    raise ValueError(f"{name}: y has shape {tuple(y.shape)}, expected a row for each of the {expected}.")
