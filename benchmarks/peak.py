"""Run the command in this process, as `python -m gat_pyg.run` does, and print the MiB at its peak of memory."""

from __future__ import annotations

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    import machine  # noqa: F401 (begins the rehearsal)

from gat_pyg.run import main  # before torch, whose environment it sets

try:
    main()
finally:
    from machine import process_peak

    print(process_peak())
