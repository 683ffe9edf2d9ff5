"""Runs a command: its errors become one line and an exit code."""

import os
import sys
from collections.abc import Callable

from cli.exit_codes import FAILED, INTERRUPTED, OK, WRONG
from cli.server import RefusedError
from shared.errors import ConfigError


def run(name: str, act: Callable[[], int]) -> int:
    """Returns what ``act`` returns, or the code for what it raised."""
    try:
        return act()
    except ConfigError as error:
        print(f"shoal {name}: {error}", file=sys.stderr)
        return WRONG
    except RefusedError as error:
        print(f"shoal {name}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # of `| head`; what is left to be written has nowhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
