"""Runs a command and turns its errors into one line and an exit code."""

import os
import sys
from collections.abc import Callable

from cli.exit_codes import FAILED, INTERRUPTED, OK, WRONG
from cli.server import RefusedError
from shared.errors import ConfigError


def run(name: str, act: Callable[[], int]) -> int:
    """Returns the result of ``act``, or the exit code of its error."""
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
    except BrokenPipeError:  # for example of `| head`; remaining output is discarded
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
