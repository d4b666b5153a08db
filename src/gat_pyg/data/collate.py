"""Batches of small graphs, cut from the arrays of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data
from torch_geometric.utils import cumsum

MOST = 1 << 30  # bytes of tensors up to which graphs are copied


class Collate:
    """Collate graphs by index: `collate([4, 7])` is `Batch.from_data_list([graphs[4], graphs[7]])`.

    PyG's function creates several tensors for each graph of a batch, which takes as long as a layer. This class
    concatenates all graphs at the first call, and selects the rows of a batch by a few operations for any number of
    graphs. The copy has at most 1 GiB, in each worker process of a `DataLoader`; later changes of a graph do not reach
    it. Larger data are collated by PyG's function, and so are graphs of another class than `Data`, without x, with
    different keys, dtypes or widths, with `num_nodes` or a key that contains "batch", or with values that are neither
    tensors on a CPU nor numbers.

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

    def __init__(self, graphs: Sequence[Data], exclude_keys: Sequence[str] = ()) -> None:
        self.graphs, self._excluded = graphs, [*exclude_keys]

    @cached_property
    def _union(self) -> Batch | None:
        """All graphs as one batch; None if batches cannot be cut from it."""
        stores = [{key: value for key, value in graph if key not in self._excluded} for graph in self.graphs]
        tensors = [value for store in stores for value in store.values() if isinstance(value, Tensor)]
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        forms = [{key: _form(key, value) for key, value in store.items()} for store in stores]
        if size > MOST or any(form != forms[0] for form in forms):
            return None
        if "x" not in stores[0] or any(type(graph) is not Data for graph in self.graphs):
            return None
        union = Batch.from_data_list([*self.graphs], exclude_keys=self._excluded)
        return union if all(_is_cut(key, union[key]) for key in stores[0]) else None

    @cached_property
    def _starts(self) -> tuple[Tensor, dict[str, int]]:
        """The pointers of the rows of all graphs, `[kinds, G + 1]`, those of nodes first; and the kind of each key."""
        assert self._union is not None
        kinds, kind_of = [self._union.ptr], {}
        for key, slices in self._union._slice_dict.items():
            same = (kind for kind, other in enumerate(kinds) if torch.equal(slices, other))
            kind_of[key] = next(same, len(kinds))
            if kind_of[key] == len(kinds):
                kinds.append(slices)
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


def _form(key: str, value: object) -> tuple[object, ...]:
    """Return what values must have in common to be concatenated as they are: dtype and all sizes but that of rows."""
    if not isinstance(value, Tensor):
        return (type(value),)
    return value.dtype, value.dim(), value.shape[:-1] if _has_ids(key) else value.shape[1:]


def _is_cut(key: str, value: object) -> bool:
    """Return True if the rows of a batch can be selected from this value of all graphs."""
    if "batch" in key or key in ("ptr", "num_nodes") or type(value) is not Tensor or value.requires_grad:
        return False
    return value.is_cpu and value.layout == torch.strided and not value.is_nested
