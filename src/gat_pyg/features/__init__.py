"""Sparse node features and linear maps of them."""

from .sparse import SparseFeatures as SparseFeatures
