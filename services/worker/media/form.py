"""Features on their way from one worker to another."""

from collections.abc import Mapping
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from shared.media.family import Family, placeholders_of
from shared.model_folder import facts_of_weights, read_model_info
from shared.wire.codec import Array
from shared.wire.messages import Item


class FeatureForm:
    """Features have ``width`` numbers of ``dtype``. Workers with the same ``layout`` compute the
    same ones."""

    def __init__(
        self, family: Family, layout: str, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layout = layout
        self._family, self._width, self._dtype, self._device = family, width, dtype, device
        self._placeholders = [*placeholders_of(family).values()]

    def num_bytes(self, item: Item) -> int:
        return self._num_rows(item) * self._width * self._dtype.itemsize

    def pack(self, features: Tensor) -> Array:
        """Their bytes, row by row."""
        packed: Array = features.cpu().contiguous().view(torch.uint8).numpy().reshape(-1)
        return packed

    def unpack(self, content: Array, item: Item) -> Tensor:
        """Copies ``content``, of ``num_bytes``, to the device."""
        copied = torch.from_numpy(content.copy()).view(self._dtype)
        return copied.view(self._num_rows(item), self._width).to(self._device)

    def _num_rows(self, item: Item) -> int:
        """Other ids of an item are texts."""
        return int(np.isin(self._family.ids(item.size), self._placeholders).sum())


def layout_of(
    folder: Path, dtype: torch.dtype, device: torch.device, settings: Mapping[str, object]
) -> str:
    """A digest of all facts besides pixels that decide about the bits of features."""
    is_on_gpu = device.type == "cuda"
    on_cpu = torch.backends.cpu.get_cpu_capability()
    facts = {
        "model": read_model_info(folder, [], None).fingerprint,
        "weights": facts_of_weights(folder),
        "dtype": str(dtype),
        "software": [str(torch.__version__), version("transformers")],
        "machine": torch.cuda.get_device_name(device) if is_on_gpu else on_cpu,
        **settings,
    }
    return blake2b(msgspec.json.encode(facts, order="sorted"), digest_size=16).hexdigest()
