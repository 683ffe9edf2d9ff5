"""Finds the model that the setting ``model`` names: a folder, or a snapshot in the cache."""

import re
from dataclasses import dataclass
from pathlib import Path

from shared.errors import ConfigError
from shared.model_folder import CONFIG_FILE, INDEX_FILE, TOKENIZER_FILE

HUB_NAME = re.compile(r"(?P<name>\w[\w.-]*(/\w[\w.-]*)?)(@(?P<revision>.+))?", re.ASCII)
# A snapshot may lack files that we never read. Those that we do would not be missed later, as
# weights are, so that the model would only answer otherwise.
FILES_WE_READ = [
    *(CONFIG_FILE, INDEX_FILE, TOKENIZER_FILE, "tokenizer_config.json"),
    *("generation_config.json", "chat_template.jinja"),
    *("modules.json", "*_Pooling/config.json", "sentence_bert_config.json"),
]


@dataclass(frozen=True, slots=True)
class ModelLocation:
    """``name`` is what clients call the model, unless a setting gives another name."""

    name: str
    folder: Path


def locate_model(model: str) -> ModelLocation:
    """A folder's path, or ``org/name`` or ``name``, with ``@revision`` (a branch, a tag or a whole
    commit hash) or without, of a snapshot in the Hugging Face cache. Nothing is downloaded.

    Raises ConfigError where there is neither.
    """
    folder = Path(model)
    if folder.is_dir():
        return ModelLocation(folder.resolve().name, folder)
    match = HUB_NAME.fullmatch(model)
    if match is None:
        raise ConfigError(
            f"model: no such folder: {model}; give a Hugging Face model folder, or the name of a"
            " model in the Hugging Face cache, org/name or org/name@revision"
        )
    return ModelLocation(match["name"], _find_snapshot(match["name"], match["revision"]))


def _find_snapshot(name: str, revision: str | None) -> Path:
    """Imports the hub's library, which takes a while, only here."""
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
