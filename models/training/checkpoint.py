"""Checkpoints of a training run: weights in safetensors, progress in JSON.

Optimizer moments are not kept; a continued run rebuilds them in a few dozen steps.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from models.training.model import ShoalTiny


@dataclass(frozen=True)
class Progress:
    """The progress of a phase."""

    elapsed_s: float = 0.0
    num_steps: int = 0
    num_tokens: int = 0


def save_checkpoint(folder: Path, phase: str, model: ShoalTiny, progress: Progress) -> None:
    """Replace the phase's checkpoint; a kill at any moment leaves a whole one."""
    partial = folder / f"{phase}.partial"
    save_file(model.state_dict(), str(partial), {"progress": json.dumps(asdict(progress))})
    os.replace(partial, folder / f"{phase}.safetensors")
    (folder / f"{phase}.json").write_text(json.dumps(asdict(progress)))


def load_checkpoint(folder: Path, phase: str, model: ShoalTiny) -> Progress:
    """Load the phase's weights if there are any and return its progress."""
    weights = folder / f"{phase}.safetensors"
    if not weights.exists():
        return Progress()
    model.load_state_dict(load_file(weights))
    return Progress(**json.loads((folder / f"{phase}.json").read_text()))


def load_weights(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of an exported folder in float32."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    weights: dict[str, Tensor] = {}
    for shard in sorted(set(index["weight_map"].values())):
        weights.update(load_file(folder / shard))
    return {name: tensor.float() for name, tensor in weights.items()}
