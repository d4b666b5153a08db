"""Softmax attention over the neighbourhoods of a graph, behind one function and several backends."""

from .operation import attend as attend
from .operation import attend_edge_index as attend_edge_index
from .operation import attend_pairs as attend_pairs
