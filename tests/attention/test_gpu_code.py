"""What the CUDA kernels compile to for each architecture; without a GPU, but not in the interpreter's process."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")
tl = pytest.importorskip("triton.language")

from gat_pyg.attention.pair import gpu_edges as pair_edges  # noqa: E402
from gat_pyg.attention.steps import gpu as steps  # noqa: E402
from gat_pyg.kernels.gpu import FP_FUSION, draw, rows  # noqa: E402
from tests.attention.test_gpu import MODULES, compiles  # noqa: E402
from tests.sanitizer import elements  # noqa: E402

weekly = pytest.mark.weekly


# KiB of shared memory that a program may take: A100, RTX 30, L4 and RTX 40, H100 and H200, B200, RTX 50.
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
OTHERS = [80, 100, 120]  # for which the cases are compiled that take most
ARCHITECTURES = pytest.mark.parametrize("sm", [90, *(pytest.param(sm, marks=weekly) for sm in OTHERS)])

FORWARD = "x score_src score_dst ptr ends ids out lse out_plus mass_plus"
CHUNKS = "chunk_row chunk_start chunks"
KERNELS = {
    "forward": ("_forward_kernel", FORWARD),
    "forward, dropout and long rows": ("_forward_kernel", f"{FORWARD} seed dropout_ids {CHUNKS} chunks_h"),
    "forward, GATv2": ("_forward_kernel", "x x_dst att ptr ends out lse"),
    "forward, product": ("_forward_kernel", "x x_dst ptr ends out lse"),
    "forward, weights": ("_forward_kernel", f"{FORWARD} edge_weight"),
    "forward, GATv2 with features": ("_forward_kernel", "x x_dst att lin edge_attr ptr ends ids out lse"),
    "forward, product with keys and features": (
        "_forward_kernel",
        "x x_dst key query_edge edge_attr ptr ends ids out out_edge lse",
    ),
    "backward": ("_backward_kernel", "grad x score_src dst_terms ptr ends grad_x grad_src"),
    "backward, dropout and long rows": (
        "_backward_kernel",
        f"grad x score_src dst_terms g ptr ends ids seed dropout_ids grad_x {CHUNKS}",
    ),
    "backward of dst, GATv2": (
        "_backward_dst_kernel",
        "grad x x_dst att out lse weights signs ptr ends grad_x_dst grad_att",
    ),
    "backward of dst, product": ("_backward_dst_kernel", "grad x x_dst out lse weights ptr ends grad_x_dst"),
    "backward of src, GATv2": ("_backward_src_kernel", "grad att weights signs ptr ends ids grad_x"),
    "backward, weights": (
        "_backward_kernel",
        "grad x score_src dst_terms edge_weight ptr ends edge_ids grad_x grad_src grad_weight",
    ),
    "backward of dst, GATv2 with features": (
        "_backward_dst_kernel",
        "grad x x_dst att lin edge_attr out lse weights signs ptr ends ids grad_x_dst grad_att",
    ),
    "backward of dst, product with keys and features": (
        "_backward_dst_kernel",
        "grad grad_out_edge x x_dst key query_edge edge_attr out lse weights ptr ends ids grad_x_dst sums_edge",
    ),
    "backward of src, product with keys": ("_backward_src_kernel", "grad x_dst weights ptr ends ids grad_x grad_key"),
    "backward of src, product": ("_backward_src_kernel", "grad x_dst weights ptr ends ids grad_x"),
}
DROPS = {kernel: KERNELS[kernel] for kernel in KERNELS if "dropout" in kernel} | {
    # not in KERNELS: with dropout one register is spilled at 256 channels of float32, for one model or many
    "backward of dst, GATv2 with dropout": (
        "_backward_dst_kernel",
        "grad x x_dst att out lse weights signs ptr ends seed dropout_ids grad_x_dst grad_att",
    )
}
OF_X = {"x", "x_dst", "key", "att", "lin", "edge_attr", "grad", "out", "out_plus", "grad_x", "grad_x_dst", "grad_key"}
OF_X |= {"values", "weight"}
IDS = {"ends", "dst", "perm", "edge_ids", "ids", "dropout_ids", "col", "place"}
TUPLES = {"csr": rows.CSR, "drop": draw.Dropout, "pair": steps.Pair, "SIZES": rows.Sizes}
INTEGERS = dict.fromkeys(("num_chunks", "num_dst", "size", "models", "num_rows"), "i32")
INTEGERS |= dict.fromkeys(("num_items", "num_edges", "attr_stride", "grad_stride"), "i32")
INTEGERS |= dict.fromkeys(("values_stride", "weight_rows", "seed_stride", "x_stride"), "i32")
WIDE_IDS = {"ptr", "chunk_row", "chunk_start", "seed", "rows", "first"}


class Compiled(NamedTuple):
    """A kernel as compiled for one architecture."""

    ttir: str
    ptx: str
    sass: str
    registers: int
    local: int  # loads from and stores to local memory: of spilled registers
    shared: int  # bytes


Compile = Callable[..., Compiled]


@pytest.fixture
def compile_kernel(tmp_path: Path, request: pytest.FixtureRequest) -> Compile:
    """Compile a kernel with some of its pointers; the summary of all tests reports what it takes."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def compile_kernel(
        name: str,
        passed: str,
        dtype: str,
        *,
        sm: int = 90,
        num_warps: int,
        p: str = "number",
        divisible: tuple[str, ...] = (),
        **constants: int | str | None,
    ) -> Compiled:
        kernel = next(getattr(module, name) for module in MODULES if hasattr(module, name))
        values, aligned, pointers, missing = {}, {}, {f"p_{pointer}" for pointer in passed.split()}, object()
        others = dict.fromkeys(IDS, "i32") | dict.fromkeys(WIDE_IDS, "i64") | {"kept": "i1", "signs": "u8"}
        numbers = INTEGERS | ({"threshold": "i32"} if p == "number" else {"threshold": "*i64", "scale": "*fp32"})

        def type_of(argument: str, *path: int) -> Any:
            """Return the type of an argument, a tuple for that of several; note what is constant or aligned."""
            inner = TUPLES.get(argument) or elements(kernel.fn).get(argument)
            if inner is not None:
                types = [type_of(each, *path, place) for place, each in enumerate(getattr(inner, "_fields", inner))]
                return inner._make(types) if hasattr(inner, "_make") else tuple(types)
            constant = constants.get(argument, None if argument.isupper() else missing)
            if constant is not missing or (argument.startswith("p_") and argument not in pointers):
                values[path] = None if constant is missing else constant
                return "constexpr"
            if argument in pointers:
                pointers.remove(argument)
            if argument.startswith("p_") or argument in divisible:
                aligned[path] = [["tt.divisibility", 16]]
            pointer = argument.removeprefix("p_")
            element = dtype if pointer in OF_X else others.get(pointer, "fp32")
            return f"*{element}" if argument.startswith("p_") else numbers.get(argument, "fp32")

        signature = {argument: type_of(argument, place) for place, argument in enumerate(kernel.arg_names)}
        assert not pointers, f"{name} has no {pointers}"
        source = ASTSource(kernel, signature, values, aligned)
        options = {"num_warps": num_warps, "enable_fp_fusion": FP_FUSION}
        compiled = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
        cubin = tmp_path / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        dump = [tool, "-sass", "-res-usage", cubin]
        sass = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
        assert "EXIT" in sass
        registers, local = int(re.findall(r"\bREG:(\d+)", sass)[0]), len(re.findall(r"\b(?:STL|LDL)\b", sass))
        use = (registers, local, compiled.metadata.shared)
        request.node.user_properties.append(("compiled", [sm, compiled.hash, *use]))
        return Compiled(compiled.asm["ttir"], compiled.asm["ptx"], sass, *use)

    return compile_kernel


# Loads and stores of spilled registers by Triton's version, then kernel, sm, heads, channels and dtype. GATv2's
# backward pass by dst takes at most 244 of the 255 registers with Triton 3.7.1, or 168 and a few more in local memory,
# for which more programs fit; 3.6.0 takes all and needs a few more, as it does for stacks of 32 channels with dropout.
SPILLS = {
    "3.9.0": {("backward of dst, GATv2 with features", 90, 4, 256, "fp32"): 6},
    "3.8.0": {("backward of dst, GATv2 with dropout", 90, 12, 32, "fp32"): 4},
    "3.7.1": {
        ("backward of dst, GATv2", 90, 3, 32, "bf16"): 4,
        ("backward of dst, GATv2 with dropout", 90, 8, 8, "fp32"): 6,
        ("backward of dst, product with keys and features", 90, 4, 256, "fp32"): 2,
    },
    "3.6.0": {
        ("backward of dst, GATv2", 80, 8, 8, "bf16"): 11,
        ("backward of dst, GATv2", 90, 8, 8, "bf16"): 13,
        ("backward of dst, GATv2", 90, 3, 32, "bf16"): 4,
        ("backward of dst, GATv2 with features", 80, 8, 8, "bf16"): 3,
        ("backward of dst, GATv2 with features", 90, 3, 32, "bf16"): 2,
        ("backward of dst, GATv2 with features", 100, 8, 8, "bf16"): 2,
        ("backward of dst, product with keys and features", 80, 4, 256, "fp32"): 2,
        ("backward of dst, product with keys and features", 90, 4, 256, "fp32"): 12,
        ("backward of dst, product with keys and features", 100, 4, 256, "fp32"): 12,
        ("backward of dst, GATv2 with dropout", 90, 8, 8, "bf16"): 135,
        ("backward of dst, GATv2 with dropout", 90, 16, 8, "fp32"): 74,
        ("backward of dst, GATv2 with dropout", 90, 80, 8, "fp32"): 85,
        ("backward of dst, GATv2 with dropout", 80, 12, 32, "fp32"): 61,
        ("backward of dst, GATv2 with dropout", 90, 12, 32, "fp32"): 80,
        ("backward of dst, GATv2 with dropout", 100, 12, 32, "fp32"): 46,
        ("backward, dropout and long rows", 80, 8, 8, "bf16"): 2,
        ("backward, dropout and long rows", 80, 12, 32, "fp32"): 4,
        ("backward, weights", 80, 8, 8, "bf16"): 4,
        ("backward, weights", 90, 8, 8, "bf16"): 2,
        ("forward, dropout and long rows", 90, 12, 32, "fp32"): 2,
    },
}


def assert_fits(code: Compiled, sm: int, spills: int = 0) -> None:
    """Registers are not spilled to local memory, and a program finds the shared memory that it needs."""
    assert code.local <= spills, f"{code.local} loads and stores of spilled registers"
    assert code.shared <= SHARED[sm] * 1024, f"{code.shared} bytes of shared memory, of {SHARED[sm]} KiB"


PIPELINED, WIDE = (8, 8, 490, "bf16", 2), (4, 256, 28, "fp32", 4)  # the most shared memory, the most registers


@compiles
@pytest.mark.parametrize(
    ("sm", "heads", "channels", "degree", "dtype", "size"),
    [
        (90, *WIDE),
        *(
            pytest.param(90, *sizes, marks=weekly)
            for sizes in ((8, 8, 15, "fp32", 4), PIPELINED, (3, 32, 14, "bf16", 2))
        ),
        *(pytest.param(sm, *sizes, marks=weekly) for sm in OTHERS for sizes in (PIPELINED, WIDE)),
    ],
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_no_spills_and_wide_loads(
    kernel: str, sm: int, heads: int, channels: int, degree: int, dtype: str, size: int, compile_kernel: Compile
) -> None:
    assert_compiled_well(kernel, sm, heads, channels, degree, dtype, size, compile_kernel)


@compiles
@pytest.mark.parametrize(
    ("sm", "models", "heads", "channels", "degree", "dtype", "size"),
    [
        (90, 2, 12, 32, 28, "fp32", 4),
        pytest.param(90, 1, 8, 8, 15, "fp32", 4, marks=weekly),
        pytest.param(90, 2, 16, 8, 15, "fp32", 4, marks=weekly),
        pytest.param(90, 8, 8, 8, 490, "bf16", 2, marks=weekly),
        pytest.param(90, 10, 80, 8, 4, "fp32", 4, marks=weekly),
        *(pytest.param(sm, 2, 12, 32, 28, "fp32", 4, marks=weekly) for sm in OTHERS),
    ],
)
@pytest.mark.parametrize("p", ["number", "tensor"])
@pytest.mark.parametrize("kernel", DROPS)
def test_no_spills_and_wide_loads_with_dropout_of_many_models(
    kernel: str,
    p: str,
    sm: int,
    models: int,
    heads: int,
    channels: int,
    degree: int,
    dtype: str,
    size: int,
    compile_kernel: Compile,
) -> None:
    assert_compiled_well(kernel, sm, heads, channels, degree, dtype, size, compile_kernel, models, p)


def assert_compiled_well(
    kernel: str,
    sm: int,
    heads: int,
    channels: int,
    degree: int,
    dtype: str,
    size: int,
    compile_kernel: Compile,
    models: int = 1,
    p: str = "number",
) -> None:
    """No spills, and loads of 16 bytes wherever features are gathered."""
    name, passed = (KERNELS | DROPS)[kernel]
    size_of_edges, features = (16 if "edge_attr" in passed else 0), (16 if "query_edge" in passed else 0)
    tile = rows.tile_for(models, heads, channels, degree, features)
    sizes = {"EACH": heads // models, "C": channels, "D": size_of_edges, "BLOCK_D": max(1, features)}
    sizes |= {"models": None} if models == 1 else {}
    constants = {**sizes, "SPLIT": rows.SPLIT, "STAGES": tile.stages, **tile.blocks}
    code = compile_kernel(name, passed, dtype, sm=sm, p=p, **constants)
    assert_fits(code, sm, SPILLS.get(triton.__version__, {}).get((kernel, sm, heads, channels, dtype), 0))
    loads = re.findall(r"\b(?:LDG\.E|LDGSTS\.E\.BYPASS)(?:\.\w+)*?\.128\b", code.sass)
    gathers = 2 if name == "_backward_src_kernel" and "x_dst" in passed else 1
    slab = min(heads, tile.heads) if models == 1 else tile.heads
    at_least = gathers * tile.edges * slab * tile.channels * size // (16 * 32 * tile.warps)
    assert len(loads) >= at_least, f"{len(loads)} loads of 16 bytes, of {at_least} a thread"


TERMS = "score_src score_edge dst_terms"
MEMORY = f"{TERMS} g ptr ends ids edge_ids grad_src grad_edge {CHUNKS}"
TILE = {"BLOCK_E": 16, "BLOCK_H": 8, "BLOCK_C": 8, "num_warps": 1}
REST = {
    "merge": ("_merge_kernel", "chunks chunks_h rows first out lse out_plus mass_plus", TILE),
    "mean": ("_mean_kernel", "grad out out_plus mass_plus dst_terms grad_dst", TILE),
    "mean of g": ("_segment_mean_kernel", f"g {TERMS} ptr ends ids grad_dst", TILE),
    "mean of g, long rows": (
        "_segment_mean_kernel",
        f"g {TERMS} ptr ends ids rows grad_dst",
        {**TILE, "BLOCK_E": 512, "num_warps": 8},
    ),
    "backward, second pass": ("_backward_kernel", MEMORY, {**TILE, "C": 0, "BLOCK_C": 1}),
    "gradient of features": (
        "_attr_kernel",
        "grad_out_edge query_edge weights dst perm grad_attr",
        {"D": 16, "BLOCK_E": 64, "BLOCK_D": 16},
    ),
    "dropout of features": ("_keep_kernel", "seed dropout_ids out", {"BLOCK": 256}),
    "edges dropped out": ("_kept_kernel", "seed dropout_ids kept", {"BLOCK_E": 512, "BLOCK_H": 1}),
    "features dropped out": ("_keep_kernel", "seed x out", {"BLOCK": 256}),
}


@compiles
@pytest.mark.parametrize(
    ("sm", "stages"), [(90, 3), *(pytest.param(*of, marks=weekly) for of in ((90, 1), (80, 3), (100, 3)))]
)
@pytest.mark.parametrize("alone", [True, pytest.param(False, marks=weekly)], ids=["alone", "stack"])
@pytest.mark.parametrize("kernel", REST)
def test_no_spills_in_the_rest(kernel: str, alone: bool, sm: int, stages: int, compile_kernel: Compile) -> None:
    name, passed, constants = REST[kernel]
    constants = {"EACH": 8, "C": 8, "SPLIT": rows.SPLIT, "STAGES": stages, "num_warps": 4} | constants
    constants |= {"models": None} if alone else {}
    assert_fits(compile_kernel(name, passed, "bf16", sm=sm, **constants), sm)


PARAMETERS = "att lin edge_attr weights signs perm grad_lin grad_attr"


@compiles
@pytest.mark.parametrize(
    ("sm", "each", "channels", "size"),
    [
        (90, 8, 8, 32),
        (90, 4, 64, 64),
        *(pytest.param(90, *sizes, marks=weekly) for sizes in ((8, 8, 16), (4, 64, 16), (4, 64, 32), (8, 8, 64))),
        *(pytest.param(sm, 4, 64, 64, marks=weekly) for sm in OTHERS),
    ],
)
def test_no_spills_in_the_gradient_of_parameters(
    sm: int, each: int, channels: int, size: int, compile_kernel: Compile
) -> None:
    """Of float32, the widest, for any number of features of an edge; the loop over edges counts in int64."""
    constants = {"models": None, "EACH": each, "C": channels, "D": size, "BLOCK_E": 32, "BLOCK_C": 64}
    constants |= {"BLOCK_D": pair_edges.BLOCK_D, "num_warps": pair_edges.WARPS}
    code = compile_kernel("_parameters_kernel", PARAMETERS, "fp32", sm=sm, **constants)
    assert_fits(code, sm)
    assert re.search(r"scf\.for .*: i64 {", code.ttir)


@compiles
@pytest.mark.parametrize("sm", [86, *(pytest.param(sm, marks=weekly) for sm in SHARED if sm != 86)])
def test_a_wide_head_fits_in_shared_memory(sm: int, compile_kernel: Compile) -> None:
    passed = "grad x_dst weights ptr ends ids grad_x"  # of all kernels the one with most to hold
    for channels in (1024, 2048, 4096):
        tile = rows.tile_for(1, 1, channels, 1000)
        constants = {
            "models": None,
            "EACH": 1,
            "C": channels,
            "SPLIT": rows.SPLIT,
            "STAGES": tile.stages,
            **tile.blocks,
        }
        assert_fits(compile_kernel("_backward_src_kernel", passed, "fp32", sm=sm, **constants), sm)


@compiles
@pytest.mark.parametrize(
    "kernel",
    [
        kernel
        for kernel in KERNELS
        if {"lse", "dst_terms"} & {*KERNELS[kernel][1].split()} and "grad" in KERNELS[kernel][1]
    ],
)
def test_a_minimum_of_scores_propagates_nan(kernel: str, compile_kernel: Compile) -> None:
    tile = rows.tile_for(1, 8, 8, 15)
    constants = {"models": None, "EACH": 8, "C": 8, "D": 16, "BLOCK_D": 16, "SPLIT": rows.SPLIT}
    constants |= {"STAGES": tile.stages, **tile.blocks}
    ptx = compile_kernel(*KERNELS[kernel], "fp32", **constants).ptx
    assert re.search(r"\bmin\.NaN\.f32\b", ptx) and not re.search(r"\bmin\.f32\b", ptx)


@compiles
def test_random_words_are_compared_without_a_sign(compile_kernel: Compile) -> None:
    ptx = compile_kernel("_keep_kernel", "seed dropout_ids out", "fp32", num_warps=4, BLOCK=256).ptx
    assert re.search(r"\bsetp\.\w+\.u32\b", ptx) and not re.search(r"\bsetp\.\w+\.s32\b", ptx)


@compiles
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_dropout_of_features_reads_and_writes_four_at_once(dtype: str, compile_kernel: Compile) -> None:
    wide = {"fp32": "128", "bf16": "64"}[dtype]
    sizes = ("size", "x_stride")
    code = compile_kernel("_keep_kernel", "seed x out", dtype, num_warps=4, BLOCK=256, divisible=sizes)
    for access in ("LDG", "STG"):
        assert len(re.findall(rf"\b{access}\.E(?:\.\w+)*?\.{wide}\b", code.sass)) >= 2
    assert_fits(code, 90)


SUMS = "values weight ptr col out"


@compiles
@ARCHITECTURES
@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=weekly)])
@pytest.mark.parametrize("given", [SUMS, f"{SUMS} seed", f"{SUMS} seed place"])
def test_sums_over_non_zeros_are_compiled_well(given: str, dtype: str, sm: int, compile_kernel: Compile) -> None:
    for channels, block_k in ((1, 32), (16, 32), (64, 16), (500, 4)):
        blocks = {"C": channels, "BLOCK_E": block_k, "BLOCK_C": min(256, triton.next_power_of_2(channels))}
        code = compile_kernel("_weighted_rows_kernel", given, dtype, sm=sm, num_warps=1, **blocks)
        assert_fits(code, sm)
        assert channels != 64 or re.search(r"\bLDG\.E(?:\.\w+)*?\.128\b", code.sass)
