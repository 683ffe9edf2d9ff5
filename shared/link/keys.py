"""The CURVE keys of a mesh: one pair for each service, in a folder of small text files.

``public/SERVICE.key`` is for all machines; ``SERVICE/SERVICE.secret`` only for the machines that
run the service, and only for its user there. Each file holds one key as Z85 text, after comments.
"""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import zmq

from shared.errors import ConfigError
from shared.wire.messages import ServiceName

SERVICES: tuple[ServiceName, ...] = get_args(ServiceName)
COMMENT = "# "  # a key may begin with "#", and never holds a space
KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


@dataclass(frozen=True)
class Keys:
    """The secret of ``service`` and the public keys that are known, by service."""

    service: ServiceName
    secret: bytes = field(repr=False)
    publics: dict[ServiceName, bytes]
    folder: Path

    @property
    def public(self) -> bytes:
        return self.publics[self.service]

    def public_of(self, service: ServiceName) -> bytes:
        """Raises ConfigError if the folder does not hold it."""
        if service not in self.publics:
            raise ConfigError(f"keys: no such file: {public_path(self.folder, service)}")
        return self.publics[service]


def load_keys(folder: Path | None, service: ServiceName) -> Keys | None:
    """The keys that ``service`` needs; None without a folder. Raises ConfigError."""
    if folder is None:
        return None
    secret = _read_secret(secret_path(folder, service))
    publics = {
        each: _read(public_path(folder, each))
        for each in SERVICES
        if public_path(folder, each).exists()
    }
    if publics.setdefault(service, zmq.curve_public(secret)) != zmq.curve_public(secret):
        raise ConfigError(f"keys: {service}.key and {service}.secret in {folder} are no pair")
    return Keys(service, secret, publics, folder)


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


def public_path(folder: Path, service: ServiceName) -> Path:
    return folder / "public" / f"{service}.key"


def secret_path(folder: Path, service: ServiceName) -> Path:
    return folder / service / f"{service}.secret"


def _complete_pair(folder: Path, service: ServiceName) -> bool:
    """The secret first: the public key can be made from it if we are stopped in between."""
    public, secret = public_path(folder, service), secret_path(folder, service)
    is_new = not secret.exists()
    if is_new:
        secret.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(secret, 0o400, f"secret key of the {service}s", zmq.curve_keypair()[1])
    if not public.exists():
        public.parent.mkdir(parents=True, exist_ok=True)
        key = zmq.curve_public(_read_secret(secret))
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


def _read_secret(path: Path) -> bytes:
    """A file of root may be readable for our group: so Kubernetes gives a Secret to a user."""
    key = _read(path)
    status = path.stat()
    mode = status.st_mode & 0o777
    limit = 0o640 if status.st_uid == 0 and os.geteuid() != 0 else 0o600
    if mode & 0o077 & ~limit:
        raise ConfigError(
            f"keys: others may read {path}, its mode is {mode:o}; the limit is {limit:o}"
        )
    return key


def _read(path: Path) -> bytes:
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"keys: {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"keys: {path} is no text") from None
    keys = [line for line in lines if line and not line.startswith(COMMENT)]
    if len(keys) != 1 or not KEY.fullmatch(keys[0]):
        raise ConfigError(f"keys: {path} must hold one key of 40 characters and only that")
    return keys[0].encode()
