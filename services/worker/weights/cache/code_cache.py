"""Keeps the codes that dense weights were brought into, so that the next start reads them."""

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from services.worker.layers.weights import Quantized
from services.worker.weights.online import Forms, KnownCodes
from shared.model_folder import CONFIG_FILE, weight_files

log = logging.getLogger(__name__)

VERSION = 1  # of the file format, and of each form's choice of codes
ABOUT = "shoal"  # the key of metadata
PARTS = ("codes", "scales", "table")


class _About(msgspec.Struct):
    """``layers``: inputs and size of a group, by the layer's path in the model."""

    layers: dict[str, tuple[int, int]]


class CodeCache(KnownCodes):
    """A file in ``folder`` for forms and a dtype of the weights that ``model`` holds now. An
    invalid file is replaced; a failure to do so is only logged."""

    def __init__(self, folder: Path, model: Path, dtype: torch.dtype, forms: Forms) -> None:
        self._dtype = dtype
        key = hashlib.sha256(f"{VERSION} {dtype}".encode())
        for file in (model / CONFIG_FILE, *weight_files(model)):
            stat = file.stat()
            key.update(f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}\n".encode())
        name = f"{model.resolve().name}-{forms}-{key.hexdigest()[:16]}.safetensors"
        self.file = folder / name

    def read(self) -> dict[str, Quantized]:
        """Returns none without a valid file."""
        if not self.file.is_file():
            return {}
        try:
            with safe_open(self.file, framework="pt") as stored:
                about = msgspec.json.decode((stored.metadata() or {}).get(ABOUT, ""), type=_About)
                names = set(stored.keys())
                found = {
                    path: Quantized(
                        **{
                            part: stored.get_tensor(f"{path}.{part}")
                            for part in PARTS
                            if f"{path}.{part}" in names
                        },
                        dtype=self._dtype,
                        inputs=inputs,
                        group=group,
                    )
                    for path, (inputs, group) in about.layers.items()
                }
        except (SafetensorError, OSError, ValueError, TypeError) as error:
            log.warning("quantization-cache: %s is no good: %s", self.file, error)
            return {}
        log.info("quantization-cache: weights from %s", self.file)
        return found

    def write(self, model: nn.Module) -> None:
        forms = {
            path.removesuffix(".weight"): form
            for path, form in model.named_modules()
            if isinstance(form, Quantized)
        }
        tensors: dict[str, Tensor] = {}
        for path, form in forms.items():
            tensors |= {f"{path}.codes": form.codes.data, f"{path}.scales": form.scales.data}
            if form.table is not None:
                tensors[f"{path}.table"] = form.table.clone()  # layers share it
        about = _About({path: (form.shape[1], form.group) for path, form in forms.items()})
        metadata = {ABOUT: msgspec.json.encode(about).decode()}
        try:
            with _replacing(self.file) as unfinished:
                save_file(tensors, unfinished, metadata)
        except (OSError, SafetensorError) as error:
            log.warning("quantization-cache: %s was not written: %s", self.file, error)
        else:
            log.info("quantization-cache: weights are kept in %s", self.file)


@contextmanager
def _replacing(file: Path) -> Iterator[Path]:
    """A path next to ``file``; the file written there replaces ``file`` unless an error occurs."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=file.parent, prefix=f".{file.name}.", delete=False) as unfinished:
        path = Path(unfinished.name)
    try:
        yield path
        path.replace(file)
    finally:
        path.unlink(missing_ok=True)
