"""Check that the tests marked `sparse` enter all code that needs torch_scatter or torch_sparse (`nox -s tests_sparse`).

Such code is a function with a parameter of type SparseTensor, the body of an `if` that asks for one of the two, and a
statement that calls one. `python tests/sparse_code.py` reads the coverage data of those tests and lists what they miss.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
NAMES = {"torch_scatter", "torch_sparse", "SparseTensor", "WITH_TORCH_SCATTER", "WITH_TORCH_SPARSE"}


def names(node: ast.AST) -> set[str]:
    """Return the names that an expression uses."""
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Return the statements that run only with torch_scatter or torch_sparse.

    >>> tree = ast.parse("def f(x: SparseTensor):\\n    a\\nif isinstance(y, SparseTensor):\\n    b\\nelse:\\n    c")
    >>> [ast.unparse(statement) for statement in statements(tree)]
    ['a', 'b']
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.If):
            is_negated = any(isinstance(inner, ast.Not) for inner in ast.walk(node.test))
            if names(node.test) & NAMES and not is_negated:
                yield node.body[0]
        elif isinstance(node, ast.FunctionDef):
            if any(isinstance(kind := a.annotation, ast.Name) and kind.id == "SparseTensor" for a in node.args.args):
                yield from (s for s in node.body if not isinstance(s, ast.Pass) and not _is_text(s))
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.Expr, ast.Return)):
            calls = [inner.func for inner in ast.walk(node) if isinstance(inner, ast.Call)]
            if any(names(call) & {"torch_scatter", "torch_sparse"} for call in calls):
                yield node


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def main() -> None:
    """Print the statements that no test entered; status 1 if there are any."""
    from coverage import CoverageData  # the suite imports this module without it, for its doctests

    data = CoverageData()
    data.read()
    missed = []
    for file in sorted(SOURCE.rglob("*.py")):
        entered = set(data.lines(str(file)) or [])
        needed = {
            node.lineno: ast.unparse(node)[:80] for node in statements(ast.parse(file.read_text(encoding="utf-8")))
        }
        missed += [f"{file}:{line}: {code}" for line, code in needed.items() if line not in entered]
    print(
        *missed, f"{len(missed)} statements need torch_scatter or torch_sparse, and no marked test runs them", sep="\n"
    )
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
