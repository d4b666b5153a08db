"""Softmax attention over the neighbourhoods of a graph, behind one function and several backends."""

from .additive import Additive as Additive
from .operation import attend as attend
from .pair import Dot as Dot
from .pair import GATv2 as GATv2
