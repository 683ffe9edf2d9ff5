"""``shoal probe``: the health of a local service, for health checks and people."""

import http.client
import os
import sys
from urllib.parse import urlsplit

USAGE = """\
usage: shoal probe [PATH | URL]

  asks a service's admin port (SHOAL_ADMIN_PORT of this machine, or the URL's) and prints its
  answer; PATH is /health (the default: alive, and was ready once), /ready, /status or /metrics
  exit code 0: the answer is 200; 1: it is another; 2: there is none"""
TIMEOUT_S = 5.0


def main(arguments: list[str]) -> int:
    if arguments in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    try:
        (target,) = arguments or ["/health"]
        url = urlsplit(target if "//" in target else f"http://{_admin_address()}{target}")
        connection = http.client.HTTPConnection(url.netloc, timeout=TIMEOUT_S)
    except KeyError:
        print(
            "shoal probe: SHOAL_ADMIN_PORT is not set; give a URL, such as"
            " http://127.0.0.1:8000/health; `shoal top` shows the services of `shoal serve`",
            file=sys.stderr,
        )
        return 2
    except (ValueError, http.client.InvalidURL):
        print(USAGE, file=sys.stderr)
        return 2
    try:
        connection.request("GET", url.path or "/health")
        response = connection.getresponse()
        print(response.read().decode().rstrip())
    except (OSError, http.client.HTTPException) as error:
        print(f"shoal probe: {url.netloc} does not answer: {error}", file=sys.stderr)
        return 2
    finally:
        connection.close()
    return 0 if response.status == 200 else 1


def _admin_address() -> str:
    """Raises KeyError if the environment has no admin port."""
    return f"127.0.0.1:{os.environ['SHOAL_ADMIN_PORT']}"
