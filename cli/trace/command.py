"""``shoal trace``: the timeline of a request."""

import argparse
import json
from urllib.parse import quote, urlencode

from cli.command import run
from cli.console import console_for_people
from cli.exit_codes import OK
from cli.flags import Parser, add_server, whole
from cli.server import Server
from cli.trace.timeline import show_list, show_trace

TIMEOUT_S = 30.0
MAX_LIMIT = 100  # the server's


def main(arguments: list[str]) -> int:
    return run("trace", lambda: _trace(arguments))


def _trace(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    found = Server(options.url, options.api_key, TIMEOUT_S).get(_path(options))
    if options.json:
        print(json.dumps(found, indent=2))
        return OK
    with console_for_people() as console:
        if options.id is None:
            show_list(found["data"], console)
        else:
            show_trace(found, console)
    return OK


def _parser() -> Parser:
    parser = Parser(
        "shoal trace",
        description="Draws the timeline of a request, or lists the last requests.",
        epilog="Exit codes: 0; 1: the server has no such trace, or refused; 2: a wrong flag, or no"
        " server at --url.",
    )
    add = parser.add_argument
    add("id", nargs="?", metavar="ID", help="X-Request-Id, or the id of the reply; none: a list")
    add_server(add)
    add("--slowest", action="store_true", help="lists the slowest first, not the newest")
    text = "length of the list (default: %(default)s)"
    add("--limit", type=whole(1, MAX_LIMIT), default=20, metavar="N", help=text)
    add("--json", action="store_true", help="prints the server's reply")
    return parser


def _path(options: argparse.Namespace) -> str:
    if options.id is not None:
        return f"/v1/traces/{quote(options.id)}"
    query = {"limit": options.limit, "order": "slowest" if options.slowest else "newest"}
    return f"/v1/traces?{urlencode(query)}"
