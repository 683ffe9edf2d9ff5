"""Accuracy of `shoal plan`: planned against measured tokens/s under a closed load, and the
difference in workers' memory between models.

Servers have no drafts, as plans have none, and no prefix cache. A worker's memory is its process's
own memory after all slots were used; only differences between models are compared, as libraries
take the same in each.
"""

import argparse
import asyncio
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import checkpoint
from benchmarks.load import load
from benchmarks.processes import own_bytes, services_of
from benchmarks.report import spread, write
from benchmarks.servers import running, shoal
from cli.plan.command import plan
from cli.plan.options import parse
from shared.model_folder import EMBEDDED_MODEL
from shared.settings.load import load_settings
from shared.settings.worker import WorkerConfig

LEN, MAX_NUM_SEQS = 128, 32  # LEN tokens in each prompt and answer
CONCURRENCIES = (1, 8, 32)
FLAGS = [
    *("--max-num-seqs", str(MAX_NUM_SEQS), "--max-model-len", "256", "--dtype", "bfloat16"),
    *("--speculative-config", '{"method": "none"}'),
]
VOCAB_SIZE = 1000
LEAST = "embedded"
MODELS = ("small", "medium", "medium, wint4")


def flags_of(name: str) -> list[str]:
    """The worker's flags."""
    name, _, form = name.partition(", ")
    folder = EMBEDDED_MODEL if name == LEAST else checkpoint(name)
    return ["--model", str(folder), *(("--quantization", form) if form else ())]


def planned(flags: list[str], concurrency: int) -> dict[str, Any]:
    words = ["--input-len", str(LEN), "--output-len", str(LEN), "--concurrency", str(concurrency)]
    given, rest = parse([*words, "--num-played", str(4 * concurrency), *flags, *FLAGS])
    return plan(given, load_settings(WorkerConfig, rest, "benchmarks.plan"))


async def served(flags: list[str], num_rounds: int) -> tuple[dict[int, list[float]], int]:
    """Tokens/s by concurrency, and the worker's own bytes at the end."""
    rates: dict[int, list[float]] = {each: [] for each in CONCURRENCIES}
    with tempfile.TemporaryDirectory() as mesh_dir:
        _, model, *others = flags
        every = [*others, *FLAGS, "--no-enable-prefix-caching", "--mesh-dir", mesh_dir]
        async with running(shoal(Path(model), *every)) as url:
            for number in range(num_rounds + 1):  # the first round is warm-up
                for concurrency in CONCURRENCIES:
                    figures = await load(
                        url,
                        seed=number,
                        concurrency=concurrency,
                        num_requests=4 * concurrency,
                        input_len=LEN,
                        output_len=LEN,
                        vocab_size=VOCAB_SIZE,
                    )
                    rates[concurrency] += [figures["output_tokens_per_s"]] * (number > 0)
            return rates, own_bytes(services_of(Path(mesh_dir))["worker"])


def compare(models: list[str], num_rounds: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    bytes_of: dict[str, tuple[float, float]] = {}  # planned, measured
    for name in (LEAST, *models):
        flags = flags_of(name)
        plans = {each: planned(flags, each)["machines"][0] for each in CONCURRENCIES}
        rates, held = asyncio.run(served(flags, num_rounds))
        first = plans[CONCURRENCIES[0]]
        bytes_of[name] = first["weights_bytes"] + first["kv_cache_bytes"], held
        results[name] = {
            f"{each} at once": {
                "planned tokens/s": round(plans[each]["played"]["output_tokens_per_s"], 1),
                "served tokens/s": spread(rates[each]),
                "planned to served": round(
                    plans[each]["played"]["output_tokens_per_s"] / spread(rates[each])["median"],
                    3,
                ),
            }
            for each in CONCURRENCIES
        }
    least = bytes_of[LEAST]
    for name, (as_planned, as_held) in bytes_of.items():
        if name != LEAST:
            ratio = (as_planned - least[0]) / (as_held - least[1])
            results[name]["memory beyond the embedded model's"] = {
                "planned MiB": round((as_planned - least[0]) / 2**20, 1),
                "held MiB": round((as_held - least[1]) / 2**20, 1),
                "planned to held": round(ratio, 3),
            }
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    given = parser.parse_args()
    write("plan", compare(given.models, given.rounds))
