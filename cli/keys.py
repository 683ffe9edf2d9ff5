"""``shoal keys``: the keys that services on several machines know each other by."""

import sys
from pathlib import Path

from shared.errors import ConfigError
from shared.keys import SERVICES, public_path, secret_path, write_keys

USAGE = """\
usage: shoal keys DIR

  makes the key pairs that DIR lacks, one for each service; give DIR to the services as --keys"""


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
        new = write_keys(folder)
    except ConfigError as error:
        print(f"shoal keys: {error}", file=sys.stderr)
        return 2
    print(f"made keys for {', '.join(new)}" if new else "all keys are there already")
    print(_advice(folder))
    return 0


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
