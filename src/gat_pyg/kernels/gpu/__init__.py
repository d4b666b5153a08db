"""Building blocks of the CUDA kernels, which Triton compiles."""

try:
    import triton  # noqa: F401
except ImportError as error:
    raise ImportError(
        "the CUDA kernels need Triton, which torch's CUDA builds bring along, and there is none. "
        "Install torch for CUDA, or take backend='segment'."
    ) from error
