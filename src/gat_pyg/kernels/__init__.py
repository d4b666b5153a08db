"""Building blocks of the CPU and CUDA kernels: rows, chunks, threads, vectors, dropout masks. No attention here."""
