"""The embedded model as one for long texts."""

import json
from pathlib import Path

from shared.model_folder import EMBEDDED_MODEL


def long_model(folder: Path, max_len: int, source: Path = EMBEDDED_MODEL) -> Path:
    """The model ``source`` with its context set to ``max_len``."""
    for path in source.iterdir():
        (folder / path.name).symlink_to(path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": max_len}))
    return folder
