"""The methods that the paper compares with, rows of its Tables 2 and 3: one per file, and none knows another.

Those that sum over neighbours by weights of the graph alone, PyG's `GCNConv` and `ChebConv`, do it as products with a
sparse matrix [N, N], made once for a graph: the sums then follow the projections to fewer features, and many models
stacked share one pass over it.
"""
