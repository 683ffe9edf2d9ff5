"""Cost of logprobs: 20 for every token of all streams, or none.

One whole server, loaded with 32 streams over HTTP, in turns. The client, which reads longer answers
with logprobs, shares the server's cores.
"""

import argparse
from typing import Any

import uvloop

from benchmarks import servers
from benchmarks.checkpoints import SHAPES, checkpoint
from benchmarks.load import load
from benchmarks.report import spread, write

MODELS = ("small", "medium")
NUM_STREAMS = 32
KINDS: dict[str, dict[str, int]] = {"none": {}, "20": {"logprobs": 20}}


async def measure(model: str, num_rounds: int, num_waves: int, output_len: int) -> dict[str, Any]:
    runs: dict[str, list[float]] = {name: [] for name in KINDS}
    server = servers.shoal(checkpoint(model), "--no-enable-prefix-caching")
    async with servers.running(server) as url:
        for number in range(num_rounds):
            flags: dict[str, Any] = {
                "concurrency": NUM_STREAMS,
                "input_len": 128,
                "output_len": output_len,
                "num_requests": num_waves * NUM_STREAMS,
                "warmup": NUM_STREAMS,
                "vocab_size": SHAPES[model]["vocab_size"],
                "seed": number,
            }
            names = list(KINDS) if number % 2 else list(reversed(KINDS))
            for name in names:
                runs[name].append((await load(url, **flags, **KINDS[name]))["output_tokens_per_s"])
    pairs = list(zip(runs["20"], runs["none"], strict=True))
    return {
        **{f"logprobs {name}, tokens/s": spread(rates) for name, rates in runs.items()},
        "tokens/s, ratio of 20 to none": spread([facts / plain for facts, plain in pairs]),
    }


async def measure_all(num_rounds: int, num_waves: int, output_len: int) -> dict[str, Any]:
    return {model: await measure(model, num_rounds, num_waves, output_len) for model in MODELS}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="one round of short answers")
    arguments = parser.parse_args()
    shape = (1, 1, 16) if arguments.quick else (arguments.rounds, 1, 64)
    write("logprobs", uvloop.run(measure_all(*shape)))
