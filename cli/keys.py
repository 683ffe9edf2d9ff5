"""``shoal keys``: the keys that services on several machines know each other by."""

import sys
from pathlib import Path

from shared.errors import ConfigError
from shared.keys import SERVICES, public_path, secret_path, write_keys

USAGE = """\
usage: shoal keys DIR

  makes a key pair for each service in DIR; give the folder to the services as --keys"""


def main(arguments: list[str]) -> int:
    """The exit code: 0, or 2 where nothing was written."""
    if arguments in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(USAGE, file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    try:
        write_keys(folder)
    except ConfigError as error:
        print(f"shoal keys: {error}", file=sys.stderr)
        return 2
    print(_advice(folder))
    return 0


def _advice(folder: Path) -> str:
    publics = " ".join(public_path(folder, service).name for service in SERVICES)
    lines = [f"{service:9}  {secret_path(folder, service).name}" for service in SERVICES]
    return "\n".join(
        [
            f"Keys are in {folder}. Each machine needs, in the folder that --keys names,",
            f"{publics}, and the secret of each service it runs:",
            *(f"  {line}" for line in lines),
            "Whoever has a secret can be that service. Nobody but the service's user may read it.",
        ]
    )
