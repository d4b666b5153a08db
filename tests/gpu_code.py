"""List the code for GPUs alone, with the tests that enter it (`nox -s gpu_code`): `python tests/gpu_code.py FILES`.

FILES are coverage data by test (`pytest --cov-context=test`), of the suite and of the kernels in Triton's interpreter.
Code for GPUs is what no ordinary test enters: only tests whose names mention a GPU or what only a GPU has, and those of
tests/attention/test_gpu.py. Blocks that no test enters come last, with their code.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections import defaultdict
from pathlib import Path

FOR_GPU = re.compile(r"test_gpu\.py|cuda|gpu|captur|nccl|interpret|another_device|fake_process", re.IGNORECASE)
SOURCE = Path(__file__).parents[1] / "src"


def statements(file: Path) -> list[int]:
    """Return the first line of each statement."""
    from coverage.python import PythonParser

    parser = PythonParser(text=file.read_text(encoding="utf-8"), exclude=r"pragma: no cover")
    parser.parse_source()
    return sorted(parser.statements - parser.raw_docstrings)


def main() -> None:
    """Print the two lists."""
    from coverage import CoverageData  # the suite imports this module without it, for its doctests

    entered: dict[Path, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in sys.argv[1:]:
        data = CoverageData(name)
        data.read()
        for file in data.measured_files():
            for line, tests in data.contexts_by_lineno(file).items():
                entered[Path(file)][line] |= {test.split("|")[0] for test in tests}
    never = []
    for file in sorted(SOURCE.rglob("*.py")):
        source, lines = file.read_text(encoding="utf-8").splitlines(), statements(file)
        kinds = {}
        for line in lines:
            tests = entered[file][line]
            # "" is what ran outside of a test, as imports do
            ordinary = not tests or any(not test or not FOR_GPU.search(test) for test in tests)
            kinds[line] = "never" if not tests else "ordinary" if ordinary else "gpu"
        for kind, block in itertools.groupby(lines, kinds.__getitem__):
            first, *rest = block
            where = f"{file.relative_to(SOURCE)}:{first}" + (f"-{rest[-1]}" if rest else "")
            if kind == "gpu":
                tests = sorted(set.union(*(entered[file][line] for line in (first, *rest))), key=lambda t: (len(t), t))
                print(f"{where}  {tests[0]}" + (f" and {len(tests) - 1} more" if tests[1:] else ""))
            elif kind == "never":
                never.append("\n    ".join([where, *(source[line - 1].strip() for line in (first, *rest))]))
    print("\nEntered by no test:\n" + "\n".join(never))


if __name__ == "__main__":
    main()
