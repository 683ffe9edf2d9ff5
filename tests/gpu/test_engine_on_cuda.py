"""The engine on a CUDA device writes what it writes on the CPU. Needs a card: `pytest -m gpu`."""

import pytest
import torch
from tokenizers import Tokenizer

from services.worker.engine import Engine
from shared.config import EMBEDDED_MODEL, WorkerConfig
from tests.services.worker.driver import Driver, Job

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

PROMPTS = ["import os\n", "def main(", "The gateway", "class Queue:\n    "]


def texts(device: str, prompts: list[list[int]]) -> list[list[int]]:
    config = WorkerConfig(model=EMBEDDED_MODEL, device=device, dtype="float32", max_num_seqs=8)
    engine = Engine(config, lambda text, fraction: None)
    return Driver(engine, chunk_sizes=(5, 1000)).run([Job(list(ids)) for ids in prompts])


def test_greedy_text_in_float32_is_the_cpus() -> None:
    tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    assert texts("cuda", prompts) == texts("cpu", prompts)
