"""The threads and the memory of the process that trains."""

import os
import subprocess
import sys
import weakref
from contextlib import suppress

import pytest
import torch

import gat_pyg.run
from gat_pyg.runs import process
from gat_pyg.runs.process import ELEMENTS, granted, reset_peak, suited_threads


@pytest.fixture
def eight(monkeypatch):
    """A machine of eight cores, of which the user has chosen none."""
    for name in process.CHOSEN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(process, "granted", lambda: 8)
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("elements", "cores", "expected"), [(0, 8, 1), (3 * ELEMENTS, 8, 3), (100 * ELEMENTS, 8, 8), (100 * ELEMENTS, 2, 2)]
)
def test_no_more_threads_than_the_work_and_the_machine_keep_busy(eight, monkeypatch, elements, cores, expected):
    monkeypatch.setattr(process, "granted", lambda: cores)
    with suppress(KeyError), suited_threads(elements) as number:
        assert number == torch.get_num_threads() == expected
        raise KeyError
    assert torch.get_num_threads() == 8


@pytest.mark.parametrize("name", process.CHOSEN)
def test_the_users_choice_stays(eight, monkeypatch, name):
    monkeypatch.setenv(name, "8")
    with suited_threads(0) as number:
        assert number == 8


@pytest.mark.parametrize(
    ("text", "expected"), [("max 100000\n", 64), ("150000 100000\n", 2), ("1000 100000\n", 1), ("no quota", 64)]
)
def test_a_containers_quota_counts(tmp_path, monkeypatch, text, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    quota = tmp_path / "cpu.max"
    assert granted(quota) == 64
    quota.write_text(text)
    assert granted(quota) == expected


@pytest.mark.parametrize(("environment", "expected"), [({}, "passive"), ({"OMP_WAIT_POLICY": "active"}, "active")])
def test_the_command_decides_how_threads_wait_before_torch_is_imported(environment, expected):
    code = """
import os, sys
import gat_pyg.run
sys.exit("too late" if "torch" in sys.modules else os.environ.get("OMP_WAIT_POLICY"))
"""
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    done = subprocess.run([sys.executable, "-c", code], env=inherited | environment, capture_output=True, text=True)
    assert done.stderr == expected + "\n"


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
@pytest.mark.parametrize("before", ["", "glibc.malloc.perturb=1"])
def test_the_command_starts_once_more_without_caches_of_small_blocks(monkeypatch, before):
    starts = []
    monkeypatch.setattr(os, "execv", lambda *program: starts.append((*program, os.environ["GLIBC_TUNABLES"])))
    monkeypatch.setattr(sys, "orig_argv", ["python", "-X", "dev", "-m", "gat_pyg.run", "dataset=cora"])
    monkeypatch.setenv("GLIBC_TUNABLES", before)
    for program in ("gat-pyg", "other.py"):
        monkeypatch.setattr(sys, "argv", [f"/bin/{program}"])
        gat_pyg.run.restart_without_thread_caches()
        with monkeypatch.context() as first:  # torch is not imported yet
            first.delitem(sys.modules, "torch")
            gat_pyg.run.restart_without_thread_caches()
    expected = ":".join(filter(None, [before, "glibc.malloc.tcache_count=0"]))
    assert starts == [(sys.executable, [sys.executable, *sys.orig_argv[1:]], expected)]


def test_the_package_alone_imports_no_torch():
    code = "import sys, gat_pyg; sys.exit('torch' in sys.modules or 'GATConv' not in dir(gat_pyg))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_run_frees_what_an_earlier_one_left():
    parent, child = torch.nn.Identity(), torch.nn.Identity()
    parent.child, vars(child)["parent"] = child, parent
    freed = weakref.ref(parent)
    del parent, child
    reset_peak()
    assert freed() is None
