"""Makes a model folder of a GGUF file: the files that a Hugging Face folder has, and links to the
weights. It is kept in the user's cache, where no other user may have put it, and made anew if the
file changes."""

import hashlib
import os
import re
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from shared.errors import ConfigError
from shared.gguf.families import Layout
from shared.gguf.file import MAGIC, SUFFIX, GgufFile, linked_name
from shared.gguf.tokenizer import Vocabulary
from shared.model_folder import CONFIG_FILE, GENERATION_CONFIG_FILE, INDEX_FILE, TOKENIZER_FILE
from shared.wire.messages import MAX_NAME_CHARS

VERSION = 2  # of the folder's content
TENSORS_FILE = "tensors.json"  # their places in the files
PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})")
PROJECTOR = "mmproj"  # begins the names of files with an image model's weights
DIGEST_CHARS = 16
NAME_KEY = "_name_or_path"  # in config.json


def find(path: Path) -> tuple[str, Path] | None:
    """The name and the folder of the model in a GGUF file, or in a folder that holds one's; None if
    ``path`` is neither. A file without the usual suffix has the name in its metadata, if any.
    Raises ConfigError."""
    if (path / TENSORS_FILE).is_file():  # one that is made already
        return None
    if path.is_dir():
        files = [each for each in path.glob(f"*{SUFFIX}") if not each.name.startswith(PROJECTOR)]
        if not files or any(path.glob("*.safetensors")):
            return None
        if len(stems := sorted({_stem(each) for each in files})) > 1:
            raise ConfigError(
                f"model: {path} holds several GGUF models: {', '.join(stems)}; give one's file"
            )
        return path.resolve().name, folder_of(min(files))
    if not path.is_file():
        return None
    if path.suffix == SUFFIX:
        return _stem(path), folder_of(path)
    if not _has_magic(path):
        return None
    folder = folder_of(path)
    config = msgspec.json.decode((folder / CONFIG_FILE).read_bytes())
    return config[NAME_KEY] or path.name, folder


def folder_of(file: Path) -> Path:
    """Raises ConfigError."""
    files = _parts(file)
    key = hashlib.sha256(str(VERSION).encode())
    for each in files:
        try:
            found = each.stat()
        except OSError as error:
            raise ConfigError(f"model: {each}: cannot be read: {error.strerror}") from None
        key.update(f"{each.resolve()} {found.st_size} {found.st_mtime_ns}\n".encode())
    root = _root(file)
    folder = root / f"{_stem(file)}-{key.hexdigest()[:DIGEST_CHARS]}"
    try:
        for each in (root.parent, root):
            each.mkdir(0o700, parents=True, exist_ok=True)
            _check_owner(each)
        if not (folder / CONFIG_FILE).is_file():
            _make(folder, files)
        _check_owner(folder)
    except OSError as error:
        raise ConfigError(
            f"model: {root} cannot be written, for the tokenizer of {file}: {error.strerror};"
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


def _make(folder: Path, files: list[Path]) -> None:
    """Raises ConfigError and OSError."""
    content = _content(files)
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".unfinished-"))
    try:
        for name, value in content.items():
            (unfinished / name).write_bytes(msgspec.json.encode(value))
        for each in files:
            (unfinished / linked_name(each)).symlink_to(each.resolve())
        unfinished.rename(folder)
    except OSError:
        if not (folder / CONFIG_FILE).is_file():  # else another process made it meanwhile
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    _remove_older(folder, files)


def _remove_older(folder: Path, files: list[Path]) -> None:
    """Removes our folders of the same ``files`` with other content."""
    targets = {linked_name(each): each.resolve() for each in files}
    stem = folder.name[:-DIGEST_CHARS]
    for each in folder.parent.iterdir():
        if each == folder or each.name[:-DIGEST_CHARS] != stem:
            continue
        with suppress(OSError):  # it has other links, or another process removes it too
            links = {name: (each / name).readlink() for name in targets}
            if links == targets and each.lstat().st_uid == os.getuid():
                shutil.rmtree(each)


def _root(file: Path) -> Path:
    """The folder of the folders of all files. Raises ConfigError."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError:
        raise ConfigError(
            f"model: {file}: user {os.getuid()} has no home directory for its tokenizer;"
            " XDG_CACHE_HOME names another place"
        ) from None
    return cache / "shoal" / "gguf"


def _content(paths: list[Path]) -> dict[str, Any]:
    """The files of the folder, by their names."""
    files = [GgufFile(path) for path in paths]
    first = files[0]
    if (count := first.get("split.count", int, 0) or 1) != len(files):
        raise first.wrong(f"it has split.count {count} and the name of {len(files)} files")
    num_tensors, wanted = sum(len(each.tensors) for each in files), first.metadata
    if (num := wanted.get("split.tensors.count", num_tensors)) != num_tensors:
        raise first.wrong(f"{num} tensors are to be in its parts, {num_tensors} are")
    layout = Layout(first, files)
    config, entries = layout.config(), layout.entries()
    vocabulary = Vocabulary(first, layout.vocab_size)
    end_ids = vocabulary.end_ids()
    name = first.get("general.name", str, "").strip()
    is_usable = len(name) <= MAX_NAME_CHARS and name.isprintable()
    config[NAME_KEY] = name if is_usable else ""
    return {
        CONFIG_FILE: config | {"eos_token_id": end_ids},
        GENERATION_CONFIG_FILE: {"eos_token_id": end_ids},
        TOKENIZER_FILE: vocabulary.tokenizer(),
        "tokenizer_config.json": vocabulary.tokenizer_config(),
        TENSORS_FILE: entries,
        INDEX_FILE: {"weight_map": {each.name: each.file for each in entries}},
    }


def _has_magic(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            return stream.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise ConfigError(f"model: {path}: cannot be read: {error.strerror}") from None


def _parts(file: Path) -> list[Path]:
    """The files of one model, of which ``file`` is one."""
    found = PART.fullmatch(file.stem)
    if found is None:
        return [file]
    number, count = int(found["number"]), int(found["count"])
    if not 0 < number <= count:
        raise ConfigError(f"model: {file}: its name says part {number} of {count}")
    names = [f"{found['stem']}-{number:05}-of-{found['count']}" for number in range(1, count + 1)]
    files = [file.with_name(f"{name}{file.suffix}") for name in names]
    for each in files:
        if not each.is_file():
            raise ConfigError(f"model: {each} is missing: {file.name} is one of {count} parts")
    return files


def _stem(file: Path) -> str:
    found = PART.fullmatch(file.stem)
    return file.stem if found is None else found["stem"]
