"""The end of a command: errors as messages, and its exit status."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from ..settings.errors import message
from ..settings.overrides import misused_group
from ..terminal import print_message

FULL_ERROR = "GAT_PYG_FULL_ERROR"  # saves the user's HYDRA_FULL_ERROR, which the command sets to 1 for Hydra


@contextmanager
def errors_as_messages(overrides: Sequence[str] | None = None) -> Iterator[None]:
    """Context manager: print an error as a message, and exit with status 1; explain settings after a wrong option.

    `overrides` are the settings of a training; None for a verb.
    """
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ.setdefault(FULL_ERROR, before or "0")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    except Exception as error:
        exit_with(error, misused_group(overrides or ()) or message(error, overrides is not None))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except SystemExit as error:
        if error.code == 2:  # argparse, after its usage
            print(
                "gat-pyg: settings are NAME=VALUE without dashes, as in training.lr=0.01, and stand together: Hydra's "
                "options come before or after them.",
                file=sys.stderr,
            )
        raise
    finally:
        os.environ.pop(FULL_ERROR)
        os.environ.pop("HYDRA_FULL_ERROR")
        if before is not None:
            os.environ["HYDRA_FULL_ERROR"] = before


def exit_with(error: Exception, text: str | None) -> NoReturn:
    """Print the message, or the traceback if there is none or the user set `HYDRA_FULL_ERROR=1`, and exit."""
    if text is None or os.environ[FULL_ERROR] == "1":
        traceback.print_exception(error)
    else:
        print_message(f"gat-pyg: {text}")
    sys.exit(1)
