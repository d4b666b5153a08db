"""The command `python -m gat_pyg.report`, another name of `gat-pyg report`."""

import sys

from ..run import main

if __name__ == "__main__":
    sys.argv.insert(1, "report")
    main()
