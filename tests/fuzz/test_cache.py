"""Flipped bits in the compiled kernels on disk: each is found before any code of the file runs.

Runs with `nox -s fuzz` alone, up to 200 flips of a process each; tests/kernels/test_kernel_cache.py has a few for
every run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("numba", reason="numba is not installed")

from numba import config

from gat_pyg.attention import Additive, GATv2, attend
from gat_pyg.graph.edges import Edges

FLIPS = min(200, int(os.environ.get("FUZZ_CASES", "0")))
DIGEST = 8 * 32  # bits, at the beginning of each file

pytestmark = [
    pytest.mark.skipif(not FLIPS, reason="set FUZZ_CASES, or run `nox -s fuzz`"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="forks"),
]


def answer() -> bytes:
    """The bytes of outputs and gradients of both operations."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    edges = Edges.from_index(torch.randint(40, (2, 300), generator=generator), 40, 40)
    x, x_dst, att = draw(40, 3, 5), draw(40, 3, 5), draw(3, 5)
    scores = draw(40, 3), draw(40, 3), draw(300, 3)
    torch.manual_seed(0)
    out = attend(x, Additive(*scores), edges, dropout=0.3, backend="fused")
    pair = attend(x, GATv2(x_dst, att), edges, backend="fused")
    (out.square().sum() + pair.square().sum()).backward()
    results = (out, pair, *(leaf.grad for leaf in (x, x_dst, att, *scores)))
    return b"".join(result.detach().numpy().tobytes() for result in results if result is not None)


def in_a_fork(compute: Callable[[], bytes]) -> tuple[int, bytes]:
    """The exit status, negative where a signal ended it, and the result of a process without compiled kernels."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reader)
        status = 1
        try:
            with os.fdopen(writer, "wb") as pipe:
                pipe.write(compute())
            status = 0
        except BaseException as error:
            print(repr(error), file=sys.stderr)
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        result = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), result


def test_no_flipped_bit_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # a forked process has none of torch's others
    status, truth = in_a_fork(answer)
    assert status == 0 and in_a_fork(answer) == (0, truth)
    whole = {file: file.read_bytes() for file in sorted(tmp_path.rglob("*.nbc"))}
    assert len(whole) >= 4
    generator = np.random.default_rng(int(os.environ.get("FUZZ_SEED", "0")))
    compiled_again = 0
    for trial in range(FLIPS):
        file = [*whole][trial % len(whole)]
        bits = DIGEST if trial < FLIPS // 10 else 8 * len(whole[file])
        bit = int(generator.integers(bits))
        damaged = bytearray(whole[file])
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        assert in_a_fork(answer) == (0, truth), f"bit {bit} of {file.name}"
        compiled_again += file.read_bytes() != damaged
        file.write_bytes(whole[file])
    assert compiled_again == FLIPS
    print(f"\n{FLIPS} flipped bits in {len(whole)} files: all compiled again, 0 crashes, 0 wrong numbers")
