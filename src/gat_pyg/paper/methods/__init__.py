"""The methods that the paper compares with, rows of its Tables 2 and 3: one per file, without imports of each other.

Methods whose weights depend only on the graph, as PyG's `GCNConv` and `ChebConv`, multiply by a sparse matrix [N, N]
that is built once per graph. So the sums over neighbours come after the projection to fewer features, and stacked
models share one pass over the matrix.
"""
