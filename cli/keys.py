"""``shoal keys``: the keys by which services on several machines authenticate each other."""

import json
import os
from pathlib import Path

import zmq

from cli.command import run
from cli.exit_codes import OK
from cli.flags import Parser
from shared.errors import ConfigError
from shared.link.keys import COMMENT, SERVICES, public_path, read_secret, secret_path
from shared.wire.messages import ServiceName


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


def write_keys(folder: Path) -> list[ServiceName]:
    """Makes the missing pairs and returns their services; existing pairs stay.

    Raises ConfigError for a public key without its secret, because the secret is elsewhere.
    """
    for service in SERVICES:
        public, secret = public_path(folder, service), secret_path(folder, service)
        if public.exists() and not secret.exists():
            raise ConfigError(f"keys: {public} is there, but not its secret {secret}")
    try:
        return [service for service in SERVICES if _complete_pair(folder, service)]
    except OSError as error:
        raise ConfigError(f"keys: {error.filename or folder}: {error.strerror}") from None


def _complete_pair(folder: Path, service: ServiceName) -> bool:
    """The secret first: the public key can be made from it if we are stopped in between."""
    public, secret = public_path(folder, service), secret_path(folder, service)
    is_new = not secret.exists()
    if is_new:
        secret.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(secret, 0o400, f"secret key of the {service}s", zmq.curve_keypair()[1])
    if not public.exists():
        public.parent.mkdir(parents=True, exist_ok=True)
        key = zmq.curve_public(read_secret(secret))
        _write(public, 0o644, f"public key of the {service}s", key)
    return is_new


def _write(path: Path, mode: int, comment: str, key: bytes) -> None:
    """The whole file or none."""
    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        os.fchmod(file.fileno(), mode)  # overrides the umask
        file.write(f"{COMMENT}{comment} of a Shoal mesh\n{key.decode()}\n")
    part.rename(path)
