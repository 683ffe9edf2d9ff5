"""The columns of the page: models, and the code that computes them.

A new model, backend or form of weights is a line here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.model_folder import EMBEDDED_MODEL
from tests.exactness.cells import Cell, covering_cells, every_cell, one_cell
from tests.exactness.checkpoints import (
    save_convolved,
    save_decaying,
    save_deep,
    save_experts,
    save_foreign,
    save_indexed,
    save_latent,
    save_modal,
    save_next,
    save_scanned,
    save_seeing,
    save_shared,
    save_stateful,
    save_windowed,
)


@dataclass(frozen=True)
class Model:
    """Weights, and a temperature at which some drafts are right and some are wrong.

    ``save`` writes a tiny random checkpoint; without it the model is the embedded one.
    """

    name: str
    temperature: float
    save: Callable[[Path], object] | None = None

    def folder(self, folders: Path) -> Path:
        """The model's folder, written to ``folders`` at the first use."""
        if self.save is None:
            return EMBEDDED_MODEL
        folder = folders / self.name
        if not folder.exists():
            folder.mkdir()
            self.save(folder)
        return folder


DENSE = Model("dense", 0.8)
EXPERTS = Model("experts", 6.0, save_experts)
LATENT = Model("latent attention", 6.0, save_latent)
WINDOWED = Model("windows", 6.0, save_windowed)
CONVOLVED = Model("convolutions", 6.0, save_convolved)
STATEFUL = Model("states", 6.0, save_stateful)
NEXT = Model("states, experts", 6.0, save_next)
SCANNED = Model("Mamba-2", 6.0, save_scanned)
DECAYING = Model("decay per channel", 6.0, save_decaying)
INDEXED = Model("indexed", 6.0, save_indexed)
SHARED = Model("shared keys", 6.0, save_shared)
FOREIGN = Model("transformers'", 6.0, save_foreign)
SEEING = Model("images", 1.0, save_seeing)
DEEP = Model("images, DeepStack", 1.0, save_deep)
MODAL = Model("images, experts", 1.0, save_modal)


@dataclass(frozen=True)
class Column:
    """A model, the operators that compute it (a key of ``ENGINES``), and the engine's settings.

    ``processes``: ``one``, or two that share the model as ``ranks`` or ``stages``. If it
    ``is_adapted``, the target has an adapter, and of the others some have it, another or none.
    """

    title: str
    model: Model
    kernels: str
    dtype: str = "float32"
    settings: Mapping[str, Any] = field(default_factory=dict)
    processes: str = "one"
    is_adapted: bool = False
    cells: Callable[[], Sequence[Cell]] = covering_cells

    @property
    def name(self) -> str:
        """Of all columns of all tables."""
        return f"{self.kernels}, {self.title}"

    def facts(self, cell: Cell) -> dict[str, str]:
        """All that decides the exactness of ``cell`` in this column."""
        own = {
            "column": self.title,
            "model": self.model.name,
            "kernels": self.kernels,
            "dtype": self.dtype,
        }
        return own | cell._asdict()


EVERY = Column("dense, bfloat16", DENSE, "native", "bfloat16", cells=every_cell)
"""The embedded model as ``make serve`` runs it."""

WINT8 = {"quantization": "wint8"}
WINT4 = {"quantization": "wint4"}
INT8_KV = {"kv_cache_dtype": "int8"}
FP8_KV = {"kv_cache_dtype": "fp8"}
THEIRS = {"model_impl": "transformers"}
CHUNKS = {"max_num_batched_tokens": 100}  # so that some images are computed in two steps

TABLES: dict[str, list[Column]] = {
    "Native code on CPUs": [
        Column("dense, float32", DENSE, "native"),
        Column("wint8", DENSE, "native", "bfloat16", WINT8),
        Column("wint4", DENSE, "native", "bfloat16", WINT4),
        Column("int8 KV", DENSE, "native", "bfloat16", INT8_KV),
        Column("experts", EXPERTS, "native", "bfloat16"),
        Column("latent", LATENT, "native", "bfloat16"),
        Column("latent, fp8 KV", LATENT, "native", "bfloat16", FP8_KV),
        Column("windows", WINDOWED, "native", "bfloat16"),
        Column("convolutions", CONVOLVED, "native", "bfloat16"),
        Column("states", STATEFUL, "native", "bfloat16"),
        Column("states, experts", NEXT, "native", "bfloat16"),
        Column("Mamba-2", SCANNED, "native", "bfloat16"),
        Column("decay per channel", DECAYING, "native", "bfloat16"),
        Column("indexed", INDEXED, "native", "bfloat16"),
        Column("indexed, int8 KV", INDEXED, "native", "bfloat16", INT8_KV),
        Column("shared keys", SHARED, "native", "bfloat16"),
        Column("shared keys, fp8 KV", SHARED, "native", "bfloat16", FP8_KV),
        Column("images", SEEING, "native", "bfloat16", CHUNKS),
        Column("images, DeepStack", DEEP, "native", "bfloat16", CHUNKS),
        Column("images, experts", MODAL, "native", "bfloat16", CHUNKS),
        Column("adapters", DENSE, "native", "bfloat16", is_adapted=True),
        Column("wint4, adapters", DENSE, "native", "bfloat16", WINT4, is_adapted=True),
        Column("two ranks", DENSE, "native", "bfloat16", processes="ranks"),
        Column("two ranks, experts", EXPERTS, "native", "bfloat16", processes="ranks"),
        Column("two ranks, convolutions", CONVOLVED, "native", "bfloat16", processes="ranks"),
        Column("two ranks, states", STATEFUL, "native", "bfloat16", processes="ranks"),
        Column("two ranks, images", SEEING, "native", "bfloat16", CHUNKS, "ranks"),
        Column("two ranks, images, experts", MODAL, "native", "bfloat16", CHUNKS, "ranks"),
        Column("two ranks, adapters", DENSE, "native", "bfloat16", {}, "ranks", is_adapted=True),
        Column("two stages", DENSE, "native", "bfloat16", processes="stages"),
        Column("two stages, experts", EXPERTS, "native", "bfloat16", processes="stages"),
        Column("two stages, images", SEEING, "native", "bfloat16", CHUNKS, "stages"),
        Column("two stages, images, DeepStack", DEEP, "native", "bfloat16", CHUNKS, "stages"),
        Column("two stages, images, experts", MODAL, "native", "bfloat16", CHUNKS, "stages"),
    ],
    "torch's operators on CPUs": [
        Column("dense", DENSE, "torch"),
        Column("wint8", DENSE, "torch", settings=WINT8),
        Column("wint4", DENSE, "torch", settings=WINT4),
        Column("int8 KV", DENSE, "torch", settings=INT8_KV),
        Column("experts", EXPERTS, "torch"),
        Column("latent", LATENT, "torch"),
        Column("latent, int8 KV", LATENT, "torch", settings=INT8_KV),
        Column("windows", WINDOWED, "torch"),
        Column("convolutions", CONVOLVED, "torch"),
        Column("states", STATEFUL, "torch"),
        Column("states, experts", NEXT, "torch"),
        Column("Mamba-2", SCANNED, "torch"),
        Column("decay per channel", DECAYING, "torch"),
        Column("indexed", INDEXED, "torch"),
        Column("images", SEEING, "torch", settings=CHUNKS),
        Column("images, DeepStack", DEEP, "torch", settings=CHUNKS),
        Column("images, experts", MODAL, "torch", settings=CHUNKS),
        Column("transformers'", FOREIGN, "torch", settings=THEIRS),
        Column("adapters", DENSE, "torch", is_adapted=True),
        Column("two ranks", DENSE, "torch", processes="ranks"),
        Column("two stages", DENSE, "torch", processes="stages"),
        Column("dense, bfloat16", DENSE, "torch", "bfloat16"),
        Column("experts, bfloat16", EXPERTS, "torch", "bfloat16"),
        Column("latent, bfloat16", LATENT, "torch", "bfloat16"),
        Column("windows, bfloat16", WINDOWED, "torch", "bfloat16"),
        Column("transformers', bfloat16", FOREIGN, "torch", "bfloat16", THEIRS),
    ],
    "The engine for GPUs, on a CPU": [
        Column("dense", DENSE, "device"),
        Column("dense, bfloat16", DENSE, "device", "bfloat16"),
        Column("wint8", DENSE, "device", settings=WINT8),
        Column("wint4", DENSE, "device", settings=WINT4),
        Column("int8 KV", DENSE, "device", settings=INT8_KV),
        Column("experts", EXPERTS, "device"),
        Column("latent", LATENT, "device"),
        Column("windows", WINDOWED, "device"),
        Column("convolutions", CONVOLVED, "device"),
        Column("states", STATEFUL, "device"),
        Column("states, experts", NEXT, "device"),
        Column("Mamba-2", SCANNED, "device"),
        Column("decay per channel", DECAYING, "device"),
        Column("images", SEEING, "device", settings=CHUNKS),
        Column("transformers'", FOREIGN, "device", settings=THEIRS),
    ],
}

REFUSED = [
    Column("convolutions, int8 KV", CONVOLVED, "native", settings=INT8_KV, cells=one_cell),
    Column("transformers', wint8", FOREIGN, "torch", settings=WINT8, cells=one_cell),
    Column("transformers', two ranks", FOREIGN, "torch", processes="ranks", cells=one_cell),
    Column("transformers', two stages", FOREIGN, "torch", processes="stages", cells=one_cell),
]
"""Settings with which no worker starts, for any cell."""

COLUMNS = [EVERY, *(column for columns in TABLES.values() for column in columns), *REFUSED]
