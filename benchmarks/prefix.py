"""Effect of the prefix cache with nine tenths of each prompt shared.

Two whole servers, with and without it, are loaded in turns over HTTP. Prompts begin with one of a
few prefixes that are cached before the measurement; every round has its own prefixes.

Three loads: one stream, without queueing; random arrivals at a rate below the capacity of both
servers; and four streams in a closed loop, where prompts share steps and the faster server gets
more of them.
"""

import argparse
from itertools import count
from typing import Any

import uvloop

from benchmarks import servers
from benchmarks.checkpoints import SHAPES, checkpoint
from benchmarks.load import load
from benchmarks.report import spread, write

PREFIX_LEN, OWN_LEN = 1152, 128
LOAD = {
    "prefix_len": PREFIX_LEN,
    "num_prefixes": 4,
    "input_len": OWN_LEN,
    "output_len": 16,
    "warmup": 16,
    "vocab_size": SHAPES["small"]["vocab_size"],
}
LOADS: dict[str, dict[str, float]] = {
    "1 stream": {"concurrency": 1},
    "2 requests/s": {"request_rate": 2.0},
    "4 streams": {"concurrency": 4},
}
FLAGS = {"with": "--enable-prefix-caching", "without": "--no-enable-prefix-caching"}


async def measure(num_rounds: int, num_requests: int) -> dict[str, Any]:
    model = checkpoint("small")
    async with (
        servers.running(servers.shoal(model, FLAGS["with"])) as cached,
        servers.running(servers.shoal(model, FLAGS["without"])) as plain,
    ):
        urls = {"with": cached, "without": plain}
        found = {
            name: await _compare(
                urls, range(first, first + num_rounds), LOAD | kind | {"num_requests": num_requests}
            )
            for first, (name, kind) in zip(count(0, num_rounds), LOADS.items(), strict=False)
        }
    return {"shared share of a prompt": PREFIX_LEN / (PREFIX_LEN + OWN_LEN), **found}


async def _compare(urls: dict[str, str], seeds: range, flags: dict[str, Any]) -> dict[str, Any]:
    """Each of the ``seeds`` makes its own prompts."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in urls}
    for seed in seeds:
        for name, url in urls.items():
            runs[name].append(await load(url, seed=seed, **flags))
    pairs = list(zip(runs["without"], runs["with"], strict=True))
    return {
        **{f"{name}, TTFT ms, p50": spread([_ttft(run) for run in runs[name]]) for name in urls},
        "TTFT, ratio without to with": spread([_ttft(one) / _ttft(two) for one, two in pairs]),
        "tokens/s, ratio with to without": spread([_rate(two) / _rate(one) for one, two in pairs]),
    }


def _ttft(run: dict[str, Any]) -> float:
    return float(run["ttft_ms"]["p50"])


def _rate(run: dict[str, Any]) -> float:
    return float(run["output_tokens_per_s"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of few requests")
    arguments = parser.parse_args()
    num_rounds, num_requests = (1, 8) if arguments.quick else (arguments.rounds, 24)
    write("prefix", uvloop.run(measure(num_rounds, num_requests)))
