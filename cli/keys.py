"""``shoal keys``: the keys by which services on several machines authenticate each other."""

import json
from pathlib import Path

from cli.command import run
from cli.exit_codes import OK
from cli.flags import Parser
from shared.link.keys import SERVICES, public_path, secret_path, write_keys


def main(arguments: list[str]) -> int:
    return run("keys", lambda: _keys(arguments))


def _keys(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    new = write_keys(options.folder)
    if options.json:
        print(json.dumps({"folder": str(options.folder), "made": list(new)}))
        return OK
    print(f"made keys for {', '.join(new)}" if new else "all keys exist already")
    print(_advice(options.folder))
    return OK


def _parser() -> Parser:
    parser = Parser(
        "shoal keys",
        description="Makes missing key pairs in DIR, one for each service; give DIR to the"
        " services as --keys.",
        epilog="Exit codes: 0; 2: nothing was written.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--json", action="store_true", help="prints what was made as an object")
    return parser


def _advice(folder: Path) -> str:
    public = public_path(folder, SERVICES[0]).parent
    secrets = [f"  {service:9}  {secret_path(folder, service).parent}" for service in SERVICES]
    return "\n".join(
        [
            f"Each machine needs {public} and the secrets of the services it runs, at these places"
            " in the folder that --keys names:",
            *secrets,
            "A process that has a secret can act as that service: only the service's user may read"
            " it.",
        ]
    )
