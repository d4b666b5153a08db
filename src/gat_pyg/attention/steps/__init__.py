"""Steps that the kernels of all scores share."""
