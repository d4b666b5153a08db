"""Random files of known truth, written as people write them, are read as their truth, or refused.

One file of each kind is tried for every 50 `FUZZ_CASES`, drawn by `FUZZ_SEED`: see `benchmarks/files.py`, which repeats
a case.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

CASES = int(os.environ.get("FUZZ_CASES", "50")) // 50 or 1
SEED = int(os.environ.get("FUZZ_SEED", "0"))


@pytest.fixture
def files(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import files

    return files


def test_files_of_known_truth_are_read_as_it_or_refused(files):
    wrong = [
        f"python benchmarks/files.py --kind '{kind}' --first {number} --files 1 --seed {SEED}: {label}, {result}"
        for kind in files.RUNNERS
        for number in np.random.default_rng([SEED, *kind.encode()]).integers(1000, size=CASES).tolist()
        for label, result in files.outcomes(kind, [number], SEED)
        if result.wrong or result.crash
    ]
    assert not wrong, "\n".join(wrong)


def test_rows_alone_and_in_other_formats_have_the_features_of_the_whole_table(files):
    numbers = np.random.default_rng(SEED).integers(1000, size=2 * CASES).tolist()
    results = [*files.later_outcomes(numbers, SEED)]
    laws = {kind.partition(":")[0] for kind, _, result in results if not result.refusal}
    assert laws == {"pairs", "rows"}
    wrong = [(kind, label, result) for kind, label, result in results if result.wrong or result.warned or result.crash]
    assert not wrong, "\n".join(map(str, wrong))
