"""`Score`: everything that a backend needs to know about an attention mechanism.

A score has operands (tensors) and options (numbers). It computes e_ij of every edge in plain torch, from which the
backends "reference" and "segment" continue, and it names the folder of its kernels, which "fused" runs. A new mechanism
is a subclass; no backend has to be changed for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..graph.adjacency import EdgeList
from ..graph.edges import Edges


class Operation(NamedTuple):
    """A call of `gat_pyg.attention.attend` as the kernels take it: its arguments, and a seed if there is dropout."""

    x: Tensor
    score: Any
    edges: Any  # `Edges`; for a compiler an `EdgeList`
    edge_weight: Tensor | None = None
    seed: Tensor | None = None
    dropout: float | Tensor = 0.0


SCORES: dict[str, type[Score]] = {}  # name of a class -> the class, for operators, whose arguments are plain values


class Score:
    """A mechanism's score e_ij and its operands for one call of `gat_pyg.attention.attend`.

    A subclass is a dataclass: its fields are the operands and the options, by these names. With several models on one
    graph, every operand has one more axis in front.

    Attributes:
        shapes: the shape of each operand by name, in the letters "N_src", "N_dst", "E" (`Edges.num_rows`), "H", "C" and
            "D", the number of features of an edge. An operand may be None if its field allows it.
        options: the names of the options.
        kernels: the folder in `gat_pyg.attention` with the kernels, in `cpu.py` and `gpu.py`; "" if there is none.
        saved: the shapes of the results, besides the output and the log-sum-exp, that the kernels save for the backward
            pass when they save the output.
    """

    shapes: ClassVar[dict[str, tuple[str, ...]]]
    options: ClassVar[tuple[str, ...]] = ()
    kernels: ClassVar[str] = ""
    saved: ClassVar[tuple[tuple[str, ...], ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        SCORES[cls.__name__] = cls

    def per_edge(self, x: Tensor, edges: Edges) -> Tensor:
        """Return e_ij `[E, H]` of all edges, grouped by dst, in float32 or wider; differentiable any number of times.

        Args:
            x: `[N_src, H, C]`, the features that are attended to.
            edges: the neighbourhoods.
        """
        raise NotImplementedError

    def per_edge_exported(self, x: Tensor, edges: Any) -> Tensor:
        """Return `per_edge` in an exported program, which runs each operator on its own: with fewer temporaries."""
        return self.per_edge(x, edges)

    def saves_output(self, x: Tensor, edges: Edges | EdgeList, scored: bool) -> bool:
        """Return True if the kernels' backward pass reads the output; `scored`: if a score may need a gradient."""
        return True

    @property
    def edge_values(self) -> tuple[Tensor, Tensor] | None:
        """u `[E, D]` and W_e `[H, C, D]` where x_j + W_e u_ij is attended to; None where x_j is."""
        return None

    @property
    def operands(self) -> tuple[Tensor | None, ...]:
        """The operands in the order of `shapes`."""
        return tuple([getattr(self, name) for name in self.shapes])  # faster than a generator

    @property
    def values(self) -> tuple[float, ...]:
        """The values of the options."""
        return tuple(getattr(self, name) for name in self.options)

    @classmethod
    def of(cls, operands: Sequence[Tensor | None], values: Sequence[float]) -> Score:
        """The score of these operands and option values."""
        fields = dict(zip(cls.shapes, operands, strict=True)) | dict(zip(cls.options, values, strict=True))
        return cls(**fields)

    def check(self, x: Tensor, edges: Edges) -> None:
        """Raise ValueError for an operand whose shape does not fit x and the edges."""
        _, heads, channels = x.shape
        sizes = {"N_src": edges.num_src, "N_dst": edges.num_dst, "E": edges.num_rows, "H": heads, "C": channels}
        of_edges = [name for name, letters in self.shapes.items() if letters[-1] == "D"]
        missing = [name for name in of_edges if getattr(self, name) is None]
        if missing and missing != of_edges:
            raise ValueError(f"{' and '.join(missing)} is None, but {' and '.join(of_edges)} go together.")
        for name, operand, letters in zip(self.shapes, self.operands, self.shapes.values(), strict=True):
            if operand is None:
                continue
            if letters[-1] == "D" and operand.dim():
                sizes.setdefault("D", operand.size(-1))
            expected = tuple(sizes.get(letter, letter) for letter in letters)
            if operand.shape != expected:
                raise ValueError(f"{name} has shape {tuple(operand.shape)}, expected {expected}.")


def widened(tensor: Tensor) -> Tensor:
    """Return the tensor in float32 or wider."""
    if tensor.dtype in (torch.float32, torch.float64):  # in an exported program, each call below is a node
        return tensor
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def ends(x_dst: Tensor, x: Tensor, edges: Edges) -> tuple[Tensor, Tensor]:
    """Return x_i and x_j of every edge, `[E, H, C]` each, grouped by dst, in float32 or wider."""
    src, dst = edges.wide
    return widened(x_dst).index_select(0, dst), widened(x).index_select(0, src)
