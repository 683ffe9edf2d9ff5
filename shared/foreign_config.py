"""Reads a config.json through transformers, for keys with other names or nested ones.

Importing transformers takes seconds: this module is imported on demand.
"""

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from shared.errors import ConfigError


def read_foreign_config(folder: Path) -> Any:
    """transformers' configuration of the model. Raises ConfigError."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        config.get_text_config()  # ValueError if there are several
        return config
    except Exception as error:  # transformers raises many types
        raise ConfigError(
            f"model: {folder / 'config.json'}: transformers cannot read it: {error}"
        ) from None
