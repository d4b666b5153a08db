"""Layers with PyG's arguments, call, parameter names and results, computed by `gat_pyg.attention`."""

from .gat import GATConv as GATConv
from .gatv2 import GATv2Conv as GATv2Conv
from .mechanisms import CosineSimilarity as CosineSimilarity
from .mechanisms import DotProduct as DotProduct
from .mechanisms import DynamicAttention as DynamicAttention
from .transformer import TransformerConv as TransformerConv
