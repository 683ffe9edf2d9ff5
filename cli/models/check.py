"""Checks if a worker can serve the model in a folder, by its file names and config."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shared.errors import ConfigError
from shared.model_folder import CONFIG_FILE, find_file, weight_files
from shared.model_location import in_other_format


@dataclass(frozen=True, slots=True)
class Verdict:
    """``backend`` computes the model; if empty, no backend can, and ``reason`` explains it.
    ``parameters`` is 0 if unknown."""

    backend: Literal["", "shoal", "transformers"]
    reason: str = ""
    architecture: str = ""
    parameters: int = 0
    max_model_len: int = 0
    runner: str = ""


def check(folder: Path) -> Verdict:
    """Uses the worker's own code, which imports torch, unless a file is missing."""
    try:
        if found := in_other_format(folder):
            folder = found.folder
        find_file(folder, CONFIG_FILE)
        weight_files(folder)
        from cli.models.check_config import check_config

        config = check_config(folder)
    except ConfigError as error:
        where = re.escape(str(folder))
        return Verdict("", re.sub(f"^model: |{where}[/ ]", "", str(error)))
    model = config.model
    return Verdict(
        *(config.backend, "", config.architecture, config.parameters),
        *(model.max_model_len, model.runner),
    )
