"""Makes a model folder of a GGUF file: the files that a Hugging Face folder has, and links to the
weights."""

import re
from pathlib import Path
from typing import Any

import msgspec

from shared.errors import ConfigError
from shared.formats.gguf.families import Layout
from shared.formats.gguf.file import MAGIC, SUFFIX, GgufFile, linked_name
from shared.formats.gguf.tokenizer import Vocabulary
from shared.formats.made_folder import made_folder
from shared.model_folder import CONFIG_FILE, GENERATION_CONFIG_FILE, INDEX_FILE, TOKENIZER_FILE
from shared.wire.messages import MAX_NAME_CHARS

VERSION = 2  # of the folder's content
TENSORS_FILE = "tensors.json"  # their places in the files
PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})")
PROJECTOR = "mmproj"  # begins the names of files with an image model's weights
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

    def content() -> dict[str, bytes]:
        return {name: msgspec.json.encode(value) for name, value in _content(files).items()}

    links = {linked_name(each): each for each in files}
    return made_folder(file, f"gguf/{_stem(file)}", VERSION, links, content)


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
