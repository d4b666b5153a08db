"""Graph Attention Networks (Veličković et al., ICLR 2018) for PyTorch Geometric."""
