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
    secret = read_secret(secret_path(folder, service))
    publics = {
        each: _read(public_path(folder, each))
        for each in SERVICES
        if public_path(folder, each).exists()
    }
    if publics.setdefault(service, zmq.curve_public(secret)) != zmq.curve_public(secret):
        raise ConfigError(f"keys: {service}.key and {service}.secret in {folder} are no pair")
    return Keys(service, secret, publics, folder)


def public_path(folder: Path, service: ServiceName) -> Path:
    return folder / "public" / f"{service}.key"


def secret_path(folder: Path, service: ServiceName) -> Path:
    return folder / service / f"{service}.secret"


def read_secret(path: Path) -> bytes:
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
