"""Sessions to work on the repository: `nox --list` lists them, `nox -s NAME` runs one.

Every environment has the versions of constraints.txt. uv installs it where uv is installed, otherwise pip. Pip's own
settings choose where torch comes from: PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL and the like are passed on, to uv too.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

import nox

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # nox brings it

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["tests", "lint", "types"]
nox.options.reuse_venv = "yes"
nox.options.default_venv_backend = "uv|virtualenv"

ROOT = Path(__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SPARSE = PROJECT["optional-dependencies"]["sparse"]
PINS = ("-c", str(ROOT / "constraints.txt"))
TRITONS = {  # the newest, that of constraints.txt, and the one that CUDA torch 2.11 pins; a NumPy for each
    "triton==3.7.1": (*PINS, "numpy"),
    "triton==3.6.0": ("numpy<2.4",),  # its interpreter makes scalars of arrays with an axis, which NumPy 2.4 refuses
}
PYTEST = ("python", "-m", "pytest", "-n", "auto", "--dist", "worksteal")  # on all cores
EVERY_TEST = ("-m", "")  # those marked weekly too
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else every process compiles torch's and PyG's modules: 3 seconds each
for pip, uv in {"PIP_FIND_LINKS": "UV_FIND_LINKS", "PIP_EXTRA_INDEX_URL": "UV_INDEX"}.items():
    if pip in os.environ:
        os.environ.setdefault(uv, ",".join(os.environ[pip].split()))


def install(session: nox.Session, *packages: str) -> None:
    """Install the packages, and torch, at the tested versions."""
    session.install(*PINS, "torch", *packages)


def install_sparse(session: nox.Session) -> None:
    """Install what the tests need, torch_scatter and torch_sparse; without a ready wheel, from source."""
    install(session, "-e", ".[dev]", "ninja", "setuptools", "wheel")
    session.install("--no-build-isolation", *PINS, *SPARSE)
    session.run("python", "-c", "import torch_scatter, torch_sparse")


def interpreted(session: nox.Session, triton: str, *options: str) -> None:
    """Test the CUDA kernels with one version of Triton: interpreted, then compiled."""
    session.install(*TRITONS[triton])
    session.install("--no-deps", triton)  # torch for CUDA pins another
    for interpret in ("1", "0"):  # one process cannot do both
        selected = "test_gpu or test_sanitizer" + " or triton" * (interpret == "1")
        session.run(*PYTEST, "tests/attention", "-k", selected, *options, env={"TRITON_INTERPRET": interpret})


@nox.session
def train(session: nox.Session) -> None:
    """Install what a user needs and run the main job; arguments after `--` go to it."""
    install(session, "-e", ".")
    session.run("python", "-m", "gat_pyg.run", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the suite; with torch_scatter and torch_sparse where a ready wheel can be had, without compiling."""
    install(session, "-e", ".[dev]")
    for package in SPARSE:
        # 1 is pip's "no such wheel": then the plain torch paths are what is tested, and the summary reports it
        session.install("--only-binary", ":all:", *PINS, package, success_codes=[0, 1], silent=True)
    session.run(*PYTEST, *session.posargs)


@nox.session
def tests_sparse(session: nox.Session) -> None:
    """Run the tests of the code that differs with torch_scatter and torch_sparse, and check that none is missing."""
    install_sparse(session)
    session.install(*PINS, "pytest-cov")
    session.run(*PYTEST, "-m", "sparse", "--cov=gat_pyg", "--cov-report=", *session.posargs)
    session.run("python", "tests/sparse_code.py")


@nox.session
def interpret(session: nox.Session) -> None:
    """Test the CUDA kernels without a GPU: in Triton's interpreter, then what they compile to (Linux)."""
    install(session, "-e", ".[dev]")
    interpreted(session, next(iter(TRITONS)), *session.posargs)


@nox.session
def weekly(session: nox.Session) -> None:
    """Repeat at length: every test with torch_scatter and torch_sparse, every Triton, kills, fuzzing, all examples."""
    install_sparse(session)
    session.run(*PYTEST, *EVERY_TEST)
    for triton in reversed(TRITONS):  # the newest stays installed
        interpreted(session, triton, *EVERY_TEST)
    session.run("python", "benchmarks/kills.py", "--kills", "100", "--placed", "20")
    os.environ["GALLERY"] = "all"
    for name in ("fuzz", "minimums", "docs", "wheel"):
        session.notify(name)


@nox.session
def gpu_code(session: nox.Session) -> None:
    """List the code for GPUs alone with the tests that enter it, in the suite and in Triton's interpreter (Linux)."""
    install(session, "-e", ".[dev]", [*TRITONS][-1], "pytest-cov")
    measured = ("--cov=gat_pyg", "--cov-context=test", "--cov-report=")
    kernels = ("tests/attention", "-k", "test_gpu or triton")
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder, name)) for name in ("suite", "interpreted")]
        for file, interpreted, selected in zip(files, "01", ((), kernels), strict=True):
            env = {"COVERAGE_FILE": file, "TRITON_INTERPRET": interpreted}
            session.run(*PYTEST, *measured, *selected, env=env)
        session.run("python", "tests/gpu_code.py", *files)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Check random inputs at length: `-- 10000 7` is 10,000 cases for each test, by the seed 7."""
    install(session, "-e", ".[dev]")
    cases, seed = [*session.posargs, *("10000", "0")[len(session.posargs) :]]
    env = {"FUZZ_CASES": cases, "FUZZ_SEED": seed}
    session.run("python", "-m", "pytest", "-s", "tests/fuzz", f"--hypothesis-seed={seed}", env=env)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, format and the import layers."""
    session.install(*PINS, "ruff", "import-linter")
    session.run("ruff", "check")
    session.run("ruff", "format", "--check", "--diff")
    session.run("lint-imports", "--no-logo", env={"PYTHONPATH": "src"})


@nox.session
def types(session: nox.Session) -> None:
    """Check the types of src, strictly."""
    install(session, "-e", ".", "mypy")
    session.run("mypy", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation into docs/_build, warnings are errors; `-- linkcheck` checks external links instead."""
    install(session, "-e", ".[docs]")
    builder, *options = session.posargs or ["html"]
    session.run("sphinx-build", "-W", "--keep-going", "-b", builder, *options, "docs", f"docs/_build/{builder}")


@nox.session
def wheel(session: nox.Session) -> None:
    """Build wheel and sdist (or take those of a folder: `-- dist`), install each elsewhere and run the command."""
    with tempfile.TemporaryDirectory() as folder:
        if session.posargs:
            dist = Path(session.posargs[0]).resolve()
        else:
            dist = Path(folder, "dist")
            session.install(*PINS, "build")
            session.run("python", "-m", "build", "--outdir", str(dist))
        for built in (next(dist.glob("*.whl")), next(dist.glob("*.tar.gz"))):
            elsewhere = Path(folder, built.suffix.lstrip("."))
            elsewhere.mkdir()
            session.run("python", "-m", "venv", str(elsewhere / "venv"))
            scripts = elsewhere / "venv" / ("Scripts" if sys.platform == "win32" else "bin")
            for package in ("torch", str(built)):
                session.run(str(scripts / "python"), "-m", "pip", "install", "-q", *PINS, package, external=True)
            with session.chdir(elsewhere):
                session.run(str(scripts / "gat-pyg"), external=True)


@nox.session(venv_backend="virtualenv")  # pip compares the versions of all indexes, uv does not
def newest(session: nox.Session) -> None:
    """Run the suite with the newest versions, pre-releases too; `-- PACKAGE ...` adds some, such as PyG's main."""
    session.install("--pre", "-e", ".[dev]", *session.posargs)
    session.run(*PYTEST)


@nox.session
def minimums(session: nox.Session) -> None:
    """Run the suite with the lowest versions that pyproject.toml allows."""
    lowest = [re.sub(r">=([^,; ]+)[^;]*", r"==\1", requirement) for requirement in PROJECT["dependencies"]]
    session.install(*lowest)
    session.install("-e", ".[dev]", *lowest)
    session.run(*PYTEST, *session.posargs)
