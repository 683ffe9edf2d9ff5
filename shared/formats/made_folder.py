"""A model folder made of files in another format, in the user's cache. No other user may have put
it there, and it is made anew if a file changes."""

import hashlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from shared.errors import ConfigError
from shared.model_folder import CONFIG_FILE

DIGEST_CHARS = 16

ANY = re.compile("")

Links = Mapping[str, Path]
"""Files by their names in the folder."""


def made_folder(
    source: Path,
    place: str,
    version: int,
    links: Links,
    content: Callable[[], Mapping[str, bytes]],
    inputs: re.Pattern[str] = ANY,
) -> Path:
    """The folder made of ``source`` at ``place``, the names of its kind and of the model, with
    ``links`` and files with ``content``. Its name depends on the ``version`` of the content, on the
    links' names, and on the files whose names match ``inputs``. Raises ConfigError."""
    key = hashlib.sha256(f"{version} {sorted(links)}".encode())
    for each in [links[name] for name in sorted(links) if inputs.match(name)]:
        try:
            found = each.stat()
        except OSError as error:
            raise ConfigError(f"model: {each}: cannot be read: {error.strerror}") from None
        key.update(f"{each.resolve()} {found.st_size} {found.st_mtime_ns}\n".encode())
    kind, stem = place.split("/")
    root = _root(source) / kind
    folder = root / f"{stem}-{key.hexdigest()[:DIGEST_CHARS]}"
    try:
        for parent in (root.parent, root):
            parent.mkdir(0o700, parents=True, exist_ok=True)
            _check_owner(parent)
        if not (folder / CONFIG_FILE).is_file():
            _make(folder, links, content())
        _check_owner(folder)
    except OSError as error:
        raise ConfigError(
            f"model: {root} cannot be written, for the tokenizer of {source}: {error.strerror};"
            " XDG_CACHE_HOME names another place"
        ) from None
    return folder


def _check_owner(folder: Path) -> None:
    """Raises ConfigError if another user may have made ``folder``."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        problem = "is a link, or not a folder"
    elif found.st_uid not in (0, os.getuid()):
        problem = f"is of user {found.st_uid}, and this is user {os.getuid()}"
    else:
        return
    raise ConfigError(f"model: {folder} {problem}; XDG_CACHE_HOME names another place")


def _make(folder: Path, links: Links, content: Mapping[str, bytes]) -> None:
    """Raises OSError."""
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".unfinished-"))
    try:
        for name, value in content.items():
            (unfinished / name).write_bytes(value)
        for name, each in links.items():
            (unfinished / name).symlink_to(each.resolve())
        unfinished.rename(folder)
    except OSError:
        if not (folder / CONFIG_FILE).is_file():  # else another process made it meanwhile
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    _remove_older(folder, links)


def _remove_older(folder: Path, links: Links) -> None:
    """Removes our folders of the same ``links`` with other content."""
    targets = {name: each.resolve() for name, each in links.items()}
    stem = folder.name[:-DIGEST_CHARS]
    for each in folder.parent.iterdir():
        if each == folder or each.name[:-DIGEST_CHARS] != stem:
            continue
        with suppress(OSError):  # it has other links, or another process removes it too
            found = {name: (each / name).readlink() for name in targets}
            if found == targets and each.lstat().st_uid == os.getuid():
                shutil.rmtree(each)


def _root(source: Path) -> Path:
    """The folder of the folders of all kinds. Raises ConfigError."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError:
        raise ConfigError(
            f"model: {source}: user {os.getuid()} has no home directory for its tokenizer;"
            " XDG_CACHE_HOME names another place"
        ) from None
    return cache / "shoal"
