"""Batches of small graphs, cut from the arrays of all of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data
from torch_geometric.utils import cumsum

MOST = 1 << 30  # bytes of tensors up to which graphs are copied


class Collate:
    """Collate graphs by index: `collate([4, 7])` is `Batch.from_data_list([graphs[4], graphs[7]])`.

    PyG's function creates several tensors for each graph of a batch, which takes as long as a layer. This one
    concatenates all graphs once, and takes the rows of a batch by a few operations for any number of graphs. It copies
    the graphs, up to 1 GiB: changes of a graph do not count. It calls PyG's function for more graphs, and for those of
    another class than `Data`, without x, or with other values than tensors on a CPU and numbers.

    Args:
        graphs: at least one.
        exclude_keys: keys that the batches do not have.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> graphs = [Data(x=torch.ones(n, 4), edge_index=torch.tensor([[0], [1]])) for n in (2, 3, 4)]
        >>> loader = DataLoader(range(len(graphs)), batch_size=2, collate_fn=Collate(graphs))
        >>> [batch.edge_index.tolist() for batch in loader]
        [[[0, 2], [1, 3]], [[0], [1]]]
    """

    def __init__(self, graphs: Sequence[Data], exclude_keys: Collection[str] = ()) -> None:
        self.graphs, self._excluded = graphs, [*exclude_keys]

    @cached_property
    def _union(self) -> Batch | None:
        """All graphs as one batch; None where others cannot be cut from it."""
        stores = [{key: value for key, value in graph if key not in self._excluded} for graph in self.graphs]
        tensors = [value for store in stores for value in store.values() if isinstance(value, Tensor)]
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if size > MOST or any(store.keys() != stores[0].keys() for store in stores):
            return None
        if "x" not in stores[0] or any(type(graph) is not Data for graph in self.graphs):
            return None
        union = Batch.from_data_list([*self.graphs], exclude_keys=self._excluded)
        return union if all(_is_cut(key, union[key]) for key in stores[0]) else None

    @cached_property
    def _starts(self) -> tuple[Tensor, dict[str, int]]:
        """The first row of each graph, `[kinds, G + 1]`, for nodes and what else keys have rows of; each key's kind."""
        assert self._union is not None
        kinds, kind_of = [self._union.ptr], {}
        for key, slices in self._union._slice_dict.items():
            known = (kind for kind, other in enumerate(kinds) if torch.equal(slices, other))
            kind_of[key] = next(known, len(kinds))
            kinds += [slices] * (kind_of[key] == len(kinds))
        return torch.stack(kinds), kind_of

    def __call__(self, indices: Sequence[int]) -> Batch:
        """Return the graphs at these indices as a batch."""
        if self._union is None:
            return Batch.from_data_list([self.graphs[index] for index in indices], exclude_keys=self._excluded)
        ids, (table, kind_of) = torch.tensor(indices), self._starts
        starts = table.index_select(1, ids)
        sizes = table.index_select(1, ids + 1) - starts
        slices = cumsum(sizes, 1)
        shifts, totals = slices[:, :-1] - starts, slices[:, -1].tolist()

        def repeat(values: Tensor, kind: int) -> Tensor:
            return values.repeat_interleave(sizes[kind], output_size=totals[kind])

        rows = [torch.arange(total) - repeat(shifts[kind], kind) for kind, total in enumerate(totals)]
        batch, ptr, incs = Batch(_base_cls=Data), slices[0], {}
        for key, kind in kind_of.items():
            incs[key] = ptr[:-1] if _has_ids(key) else torch.zeros_like(ids)
            batch[key] = self._union[key].index_select(-1 if _has_ids(key) else 0, rows[kind])
            if _has_ids(key):
                batch[key] += repeat(shifts[0], kind)
        batch.batch, batch.ptr = repeat(torch.arange(len(ids)), 0), ptr
        batch._num_graphs, batch._inc_dict = len(ids), incs
        batch._slice_dict = {key: slices[kind] for key, kind in kind_of.items()}
        return batch


def _has_ids(key: str) -> bool:
    """Return True for a key of node ids, which PyG increments and concatenates along the last axis."""
    return "index" in key or key == "face"


def _is_cut(key: str, value: object) -> bool:
    if "batch" in key or key in ("ptr", "num_nodes") or type(value) is not Tensor or value.requires_grad:
        return False
    return value.is_cpu and value.layout == torch.strided and not value.is_nested
