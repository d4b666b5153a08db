"""Building blocks of the CUDA kernels, which Triton compiles."""

try:
    import triton  # noqa: F401
except ImportError as error:
    raise ImportError(
        "the CUDA kernels need Triton, which torch's CUDA builds bring along, and there is none. "
        "Install torch for CUDA, or take backend='segment'."
    ) from error

FP_FUSION = True  # a * b + c as one instruction: the default up to Triton 3.9, which warns that 3.10 changes it
