"""Finds the model of the setting ``model``: a folder, or a snapshot in the cache."""

import re
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from shared.errors import ConfigError
from shared.model_folder import CONFIG_FILE, EMBEDDED_MODEL, INDEX_FILE, TOKENIZER_FILE, find_file

HUB_NAME = re.compile(r"(?P<name>\w[\w.-]*(/\w[\w.-]*)?)(@(?P<revision>.+))?", re.ASCII)
# A snapshot may lack other files, but not these: the model would answer differently, and unlike
# missing weights nothing would notice.
FILES_WE_READ = [
    *(CONFIG_FILE, INDEX_FILE, TOKENIZER_FILE, "tokenizer_config.json"),
    *("generation_config.json", "chat_template.jinja", "tokenizer.model", "tiktoken.model"),
    *("vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json", "vocab.txt"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    *("modules.json", "*_Pooling/config.json", "*_Dense/*.*", "sentence_bert_config.json"),
]

# Modules that make a folder of a model in another format, by the end of the files' names:
# ``find(path)`` returns the model's name and folder, or None.
FORMATS: dict[str, str] = {
    ".gguf": "shared.formats.gguf.folder",
}
# The same for folders with other tokenizers.
TOKENIZERS: list[str] = [
    "shared.formats.older_tokenizer",
]


@dataclass(frozen=True, slots=True)
class ModelLocation:
    """``name`` is the model's name for clients, unless a setting gives another."""

    name: str
    folder: Path


def locate_model(model: str) -> ModelLocation:
    """``model`` is the path of a folder, or of a file in one of ``FORMATS``, the embedded model's
    name, or a snapshot in the Hugging Face cache: ``org/name`` or ``name``, optionally with
    ``@revision`` (a branch, a tag or a whole commit hash). Nothing is downloaded.

    Raises ConfigError if nothing is found, or a folder without ``config.json``.
    """
    folder = Path(model)
    if found := in_other_format(folder):
        return found
    if folder.is_dir():
        find_file(folder, CONFIG_FILE)
        return ModelLocation(folder.resolve().name, folder)
    if folder.is_file():
        ends = ", ".join(FORMATS)
        raise ConfigError(f"model: {model} is a file; give its folder, or a file with {ends}")
    if model == EMBEDDED_MODEL.name:
        return ModelLocation(model, EMBEDDED_MODEL)
    match = HUB_NAME.fullmatch(model)
    if match is None:
        raise ConfigError(
            f"model: no such folder: {model}; give a Hugging Face model folder, or the name of a"
            " model in the Hugging Face cache, org/name or org/name@revision"
        )
    snapshot = _find_snapshot(match["name"], match["revision"])
    found = in_other_format(snapshot)
    return ModelLocation(match["name"], found.folder if found else snapshot)


def in_other_format(path: Path) -> ModelLocation | None:
    """The model at ``path``, if its weights or its tokenizer are. Raises ConfigError."""
    found = (import_module(name).find(path) for name in (*FORMATS.values(), *TOKENIZERS))
    return next((ModelLocation(*each) for each in found if each), None)


def _find_snapshot(name: str, revision: str | None) -> Path:
    """Imports the hub's library, which is slow, on demand."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            name, revision=revision, local_files_only=True, allow_patterns=FILES_WE_READ
        )
    except (HFValidationError, LocalEntryNotFoundError):
        wanted = name if revision is None else f"{name} --revision {revision}"
        raise ConfigError(
            f"model: no such folder: {name}, and no complete snapshot of it in the Hugging Face"
            f" cache {constants.HF_HUB_CACHE}; `hf download {wanted}` puts it there"
        ) from None
    return Path(folder)
