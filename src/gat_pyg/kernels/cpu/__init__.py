"""Building blocks of the CPU kernels, which Numba compiles."""
