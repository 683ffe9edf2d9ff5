"""Tokens a second of OpenVINO GenAI on the checkpoints that servers are measured with: a mark for
engines, without a server around it.

Its continuous batching is called in this process, with as many requests at once, prompts and
answers as long, as in ``benchmarks.peers``. Prompts are random ids, greedy, without an end of text.
Tokens a second count the prefill's time too. Run it with the interpreter of an environment with
``pip install openvino-genai openvino-tokenizers optimum-intel`` (this repository in PYTHONPATH), on
what ``optimum-cli export openvino -m FOLDER/medium --task text-generation-with-past --weight-format
fp16 OUT/medium`` and ``convert_tokenizer FOLDER/medium -o OUT/medium --with-detokenizer`` wrote.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino
from openvino_genai import ContinuousBatchingPipeline, GenerationConfig, SchedulerConfig

from benchmarks.report import spread, write

PROMPT_LEN = 128
OUTPUT_LENS = {"small": 128, "medium": 64}
NUMS_STREAMS = (1, 8, 32)
WAVES = 4  # requests a stream, one after the other
CACHE_GIB = 2
"""As of the server of vLLM: enough for every point."""


def run(
    pipeline: ContinuousBatchingPipeline, prompts: np.ndarray, output_len: int, num_streams: int
) -> float:
    """Returns tokens a second of requests with ``prompts`` [N, 1, prompt_len] int64."""
    config = GenerationConfig(max_new_tokens=output_len, ignore_eos=True, do_sample=False)
    waiting = [(i, openvino.Tensor(each)) for i, each in enumerate(prompts)]
    running: list[Any] = []  # handles
    num_tokens = 0
    started_s = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < num_streams:
            number, ids = waiting.pop()
            running.append(pipeline.add_request(number, ids, config))
        pipeline.step()
        for handle in running:
            if handle.can_read():
                num_tokens += sum(len(each.generated_ids) for each in handle.read().values())
        running = [each for each in running if each.get_status().name == "RUNNING"]
    seconds = time.perf_counter() - started_s
    if num_tokens != len(prompts) * output_len:
        raise RuntimeError(f"{num_tokens} tokens came of {len(prompts)} requests")
    return num_tokens / seconds


def measure(folder: Path, models: list[str], num_rounds: int) -> dict[str, dict[str, float]]:
    rates: dict[str, list[float]] = {}
    for model in models:
        scheduler = SchedulerConfig()
        scheduler.cache_size = CACHE_GIB
        scheduler.enable_prefix_caching = False
        pipeline = ContinuousBatchingPipeline(str(folder / model), scheduler, "CPU", {})
        vocab_size = json.loads((folder / model / "config.json").read_text())["vocab_size"]
        rng = np.random.default_rng(0)
        for number in range(num_rounds + 1):  # the first one warms up
            for num_streams in NUMS_STREAMS:
                size = num_streams * WAVES, 1, PROMPT_LEN
                prompts = rng.integers(10, vocab_size, size, dtype=np.int64)
                rate = run(pipeline, prompts, OUTPUT_LENS[model], num_streams)
                if number:
                    rates.setdefault(f"{model} × {num_streams}", []).append(rate)
    return {point: spread(each) for point, each in rates.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="of the exported models, by name")
    parser.add_argument("--models", nargs="+", choices=list(OUTPUT_LENS), default=["medium"])
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    versions = {"openvino": openvino.__version__, "device": "CPU"}
    write("openvino_genai", versions | measure(given.folder, given.models, given.rounds))
