"""Engines on a GPU."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from services.worker.engine.device.engine import DeviceEngine
from shared.model_folder import EMBEDDED_MODEL
from shared.settings.worker import WorkerConfig

TEXTS = (
    "import os\n",
    "def main(",
    "The gateway",
    "class Queue:\n    ",
    "x = [1, 2, 3, 1, 2, 3, 1",
)


def make_cuda_engine(model: Path = EMBEDDED_MODEL, **settings: Any) -> DeviceEngine:
    """With a small KV cache unless ``settings`` size it, so that tests may share a GPU."""
    defaults: Any = {"dtype": "float32", "max_num_seqs": 8}
    if not settings.keys() & {"gpu_memory_utilization", "num_gpu_blocks_override"}:
        defaults["kv_cache_memory_bytes"] = 256 << 20
    config = WorkerConfig(model=model, device="cuda", **(defaults | settings))
    return DeviceEngine(config, lambda text, fraction: None)


def drafting(depth: int) -> dict[str, Any]:
    """As ``speculative_config``."""
    if not depth:
        return {"method": "none"}
    return {"method": "mtp", "num_speculative_tokens": depth, "adaptive": False}


def prompts() -> list[list[int]]:
    """Of the embedded model, short and long."""
    tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    ids = [tokenizer.encode(text).ids for text in TEXTS]
    return [*ids, 8 * (ids[0] + ids[3]), 20 * (ids[1] + ids[4]), ids[2][:1]]
