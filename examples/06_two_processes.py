"""
Two processes
=============

Two processes divide the graphs of each step, take the same steps as one and report the same score.
"""

# sphinx_gallery_thumbnail_path = "thumbnails/two_processes.png"

import subprocess
import sys
import tempfile

# %%
# `trainer=ddp` uses all GPUs of a machine, `trainer=ddp_cpu` processes on its CPU.


def last_lines(*settings: str) -> list[str]:
    planted = ["dataset=planted", "training.max_epochs=3"]
    command = [sys.executable, "-m", "gat_pyg.run", *planted, *settings]
    options = {"capture_output": True, "text": True, "check": True}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, **options)
    lines = done.stdout.splitlines()
    wanted = "epochs", "validation", "test"
    return [line for line in lines if line.startswith(wanted)]


one = last_lines()
two = last_lines("trainer=ddp_cpu", "trainer.devices=2")
print("one process", *one, "two processes", *two, sep="\n")
assert one == two
