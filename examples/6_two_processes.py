"""
Two processes
=============

Two processes divide the graphs of each step, take the same steps as one and report the same score.
"""

import subprocess
import sys
import tempfile

# %%
# `trainer=ddp` uses all GPUs of a machine, `trainer=ddp_cpu` processes on its CPU.


def last_lines(*settings: str) -> list[str]:
    command = [sys.executable, "-m", "gat_pyg.run", "dataset=planted", "training.max_epochs=3", *settings]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if line.startswith(("epochs", "validation", "test"))]


one = last_lines()
two = last_lines("trainer=ddp_cpu", "trainer.devices=2")
print("one process", *one, "two processes", *two, sep="\n")
assert one == two
