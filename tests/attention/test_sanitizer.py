"""The sanitizer of interpreted kernels finds planted faults; and offsets beyond 2^31, without the memory for them."""

from __future__ import annotations

import importlib
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from gat_pyg.attention import Additive, attend
from gat_pyg.attention.additive import gpu as additive
from gat_pyg.attention.pair import gpu_edges as pair_edges
from gat_pyg.attention.score import Operation
from gat_pyg.attention.steps import gpu as steps
from gat_pyg.features import gpu as features
from gat_pyg.graph import edges as edges_module
from gat_pyg.graph.edges import Edges
from gat_pyg.kernels import device
from gat_pyg.kernels.gpu import draw, rows
from gat_pyg.philox import keep_mask
from tests.attention.comparisons import answer, direction_of, stairs
from tests.attention.conftest import INTERPRETED
from tests.attention.test_gpu import test_offsets_pass_2_to_the_31 as multiply_offsets
from tests.graphs import Graph, random
from tests.laws import assert_close, edges_of
from tests.sanitizer import Sanitizer
from tests.scores import ADDITIVE, DOT_EDGES, GATV2, GATV2_EDGES, SHAPES, leaves_of, score_of

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
weekly = pytest.mark.weekly
SMALL = random(7, 6, 25)
SEED = torch.tensor(5)


@pytest.fixture(autouse=True)
def _these_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(device.FILES, "cpu", "gpu")


def run(names: str, graph: Graph = SMALL, channels: int = 5) -> None:
    leaves = leaves_of(graph, 3, channels, names, torch.float32)
    answer(leaves, edges_of(graph), direction_of(graph, 3, channels).float(), dropout=0.3)


def slices_of_one_tensor() -> None:
    src, dst = torch.randn(7, 6).chunk(2, 1)
    attend(torch.randn(7, 3, 5), Additive(src, dst[:6]), edges_of(SMALL), backend="fused")


# A fault: the function that contains it, the code before and after, the call, and the finding.
FAULTS: dict[str, tuple[Any, str, str, str, Callable[[], Any], str]] = {
    "ids beyond the last edge": (
        steps,
        "_forward_kernel",
        "tl.load(csr.p_ends + start + o_e, mask=m_e, other=0)",
        "tl.load(csr.p_ends + start + o_e)",
        lambda: run(ADDITIVE),
        r"_forward_kernel.*loads element \d+ of p_ends, which has 25",
    ),
    "the other half of strided rows": (
        steps,
        "row_width",
        "return STRIDE",
        "return WIDTH",
        slices_of_one_tensor,
        "loads between the rows of p_score_(src|dst), which is strided",
    ),
    "a row that several programs write": (
        steps,
        "store_row",
        "mask=m_row & is_whole)",
        "mask=m_row)",
        lambda: run(ADDITIVE, stairs(3, rows.SPLIT + 1)),
        "stores what another program has stored in p_out",
    ),
    "lanes that the mask leaves undefined": (
        additive,
        "load_row",
        ", other=0.0)",
        ")",
        lambda: run(ADDITIVE),
        "a masked load without `other`",
    ),
    "lanes that write one element": (
        features,
        "_keep_kernel",
        "p_out + i_model * size + o_out,",
        "p_out + i_model * size + o_out // 2,",
        lambda: features.keep(SEED, 64, 0.5, torch.float32),
        "two lanes store different values to one element of p_out",
    ),
    "no barrier between a store and a load": (
        pair_edges,
        "_parameters_kernel",
        "tl.debug_barrier()",
        "pass",
        lambda: run(GATV2_EDGES, channels=25),
        "loads what it has stored itself in p_grad_attr, without a barrier",
    ),
    "an offset of 32 bits": (
        rows,
        "offset",
        "i_row.to(tl.int64) * WIDTH",
        "i_row * WIDTH",
        lambda: multiply_offsets(torch.int32),
        "overflow",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, old, new, call, finding = FAULTS[fault]
    function = getattr(module, name).fn
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1
    call()
    file, planted = tmp_path / "planted.py", {}
    file.write_text(source.replace(old, new))
    exec(compile(file.read_text(), file, "exec"), function.__globals__, planted)
    monkeypatch.setattr(module, name, planted[name])
    with pytest.raises(Exception, match=finding):
        call()


# --- Beyond 2^31 elements: of large tensors only the last rows are in memory, and only the last programs run. ---

LAST = torch.tensor([[0, 1] * 6, [0] * 6 + [1] * 6])  # the last edges, between the last two src and dst
MANY = (1 << 23) + 32


def large(shape: list[int], dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory before they are written."""
    zeros = torch.from_numpy(np.zeros(shape, np.int16 if dtype == torch.bfloat16 else np.float32))
    return zeros.view(dtype)


CASES = {  # the operands, whether O is saved, edges, src, heads, channels, features of edges, dtype
    "N H C": (ADDITIVE, True, 12, MANY, 32, 8, 3, torch.bfloat16),
    "N H C, memory": (ADDITIVE, False, 12, MANY, 32, 8, 3, torch.bfloat16),
    "N H C, GATv2": (GATV2, True, 12, MANY, 32, 8, 3, torch.bfloat16),
    "E H": (ADDITIVE, True, MANY, 9, 256, 1, 3, torch.float32),
    "E H, memory": (ADDITIVE, False, MANY, 9, 256, 1, 3, torch.float32),
    "2 E H, GATv2": (GATV2, True, MANY, 9, 128, 1, 3, torch.float32),
    "E D, GATv2": (GATV2_EDGES, True, MANY, 9, 1, 1, 256, torch.float32),
    "E D, product": (DOT_EDGES, True, MANY, 9, 2, 4, 256, torch.float32),
}


@pytest.mark.filterwarnings("ignore:(overflow|invalid):RuntimeWarning")  # of rows whose programs have not run
@pytest.mark.parametrize("case", CASES)
def test_kernels_pass_2_to_the_31_elements(case: str, sanitizer: Sanitizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rows are those of a small graph of the same edges."""
    names, saved, num_edges, num_src, heads, channels, size, dtype = CASES[case]
    monkeypatch.setattr(rows, "SPLIT", 1 << 30)
    monkeypatch.setattr(pair_edges, "BLOCKS", 1 << 30)
    monkeypatch.setattr(edges_module, "_cpu_kernels", lambda _: None)
    sanitizer.last = 4
    small = Graph("the last edges", LAST, 2, 2)
    index = torch.zeros(2, num_edges, dtype=torch.int32)
    index[:, -12:] = LAST + torch.tensor([[num_src - 2], [7]])  # of 9 dst, the first with all other edges
    sizes = {"N_src": num_src, "N_dst": 9, "E": num_edges}
    few = leaves_of(small, heads, channels, names, dtype, features=size)
    many = {}
    for name, leaf in few.items():
        many[name] = large([sizes.get(SHAPES[name][0], leaf.size(0)), *leaf.shape[1:]], dtype)
        many[name][-leaf.size(0) :] = leaf
    ids = torch.arange(num_edges - 12, num_edges, dtype=torch.int32)
    grids = replace(edges_of(small), dropout_ids=ids), Edges.from_index(index, num_src, 9)
    results = []
    for leaves, edges in zip((few, many), grids, strict=True):
        score, x = score_of(leaves), leaves["x"]
        kernels = importlib.import_module(f"gat_pyg.attention.{score.kernels}.gpu")
        call = Operation(x, score, edges, None, SEED, 0.3)
        out, *others = kernels.forward(call, torch.float32, saved)
        needs = tuple(operand is not None for operand in (x, None, *score.operands))
        grads = kernels.backward(call, torch.ones_like(out), out if saved else None, tuple(others), needs)
        results.append({"out": out, **{name: grad for name, grad in grads.items() if SHAPES[name][0] in sizes}})
    expected, measured = results
    for name, value in expected.items():
        if value is not None:
            last = measured[name][-value.size(0) :]
            columns = slice(-32, None) if name == "edge_attr" else slice(None)  # the programs that have run
            assert_close(last[..., columns].clone(), value[..., columns], name)


def test_masks_pass_2_to_the_31_elements(sanitizer: Sanitizer) -> None:
    sanitizer.last = 1
    size = (1 << 31) + 4096
    x = large([size], torch.bfloat16)
    x[-4:] = 1
    ids = torch.arange(size // 4 - 1, size // 4)
    assert torch.equal(features.drop(x, SEED, 0.5)[-4:].float(), keep_mask(SEED, ids, 4, 0.5).flatten())
    kept = draw.kept(SEED, size, 1, 0.5)[-8:]
    assert torch.equal(kept, keep_mask(SEED, torch.arange(size - 8, size), 1, 0.5) > 0)
