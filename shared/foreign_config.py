"""What transformers reads in a config.json whose keys have other names, or are further in.

Importing transformers takes seconds: this module is imported where it is needed.
"""

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from shared.errors import ConfigError


def read_foreign_config(folder: Path) -> Any:
    """Returns transformers' configuration of the model. Raises ConfigError."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        config.get_text_config()  # ValueError where there are several
        return config
    except Exception as error:  # of many kinds
        raise ConfigError(
            f"model: {folder / 'config.json'}: transformers cannot read it: {error}"
        ) from None
