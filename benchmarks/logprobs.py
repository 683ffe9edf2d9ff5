"""What do logprobs cost: 20 of each token for everybody, or none.

One whole server, loaded with 32 streams over HTTP, in turns. The client that reads the longer
answers shares the server's cores.
"""

import argparse
from typing import Any

import uvloop

from benchmarks import servers
from benchmarks.checkpoints import SHAPES, checkpoint
from benchmarks.load import load
from benchmarks.report import spread, write

NUM_STREAMS = 32
KINDS: dict[str, dict[str, int]] = {"none": {}, "20": {"logprobs": 20}}
LOAD = {
    "concurrency": NUM_STREAMS,
    "input_len": 128,
    "warmup": NUM_STREAMS,
    "vocab_size": SHAPES["small"]["vocab_size"],
}


async def measure(num_rounds: int, num_waves: int, output_len: int) -> dict[str, Any]:
    runs: dict[str, list[float]] = {name: [] for name in KINDS}
    server = servers.shoal(checkpoint("small"), "--no-enable-prefix-caching")
    async with servers.running(server) as url:
        for number in range(num_rounds):
            flags = LOAD | {
                "num_requests": num_waves * NUM_STREAMS,
                "output_len": output_len,
                "seed": number,
            }
            for name, more in KINDS.items():
                runs[name].append((await load(url, **flags, **more))["output_tokens_per_s"])
    pairs = list(zip(runs["20"], runs["none"], strict=True))
    return {
        **{f"logprobs {name}, tokens/s": spread(rates) for name, rates in runs.items()},
        "tokens/s, ratio of 20 to none": spread([told / plain for told, plain in pairs]),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of short answers")
    arguments = parser.parse_args()
    shape = (1, 1, 16) if arguments.quick else (arguments.rounds, 2, 64)
    write("logprobs", uvloop.run(measure(*shape)))
