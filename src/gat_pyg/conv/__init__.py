"""Layers with PyG's arguments, call, parameter names and results, computed by `gat_pyg.attention`."""

from .dgl import from_dgl as from_dgl
from .gat import GATConv as GATConv
from .gatv2 import GATv2Conv as GATv2Conv
from .mechanisms import CosineSimilarity as CosineSimilarity
from .mechanisms import DotProduct as DotProduct
from .mechanisms import DynamicAttention as DynamicAttention
from .swap import Swapped as Swapped
from .swap import accelerate as accelerate
from .swap import restore as restore
from .transformer import TransformerConv as TransformerConv
