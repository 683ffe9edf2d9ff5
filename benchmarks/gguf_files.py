"""Tokens per second of whole servers with GGUF files: shoal, and llama.cpp with the same file, next
to shoal with its own form of as many bits.

The files are ``benchmarks.to_gguf``'s, quantized with ``llama-quantize --pure``, as
DIR/small-Q8_0.gguf; ``benchmarks.peers`` names the build of llama.cpp. Prompts of 128 ids, greedy,
no prefix cache. Rounds of all servers alternate.
"""

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

import uvloop

from benchmarks import servers
from benchmarks.checkpoints import FOLDER, SHAPES, checkpoint
from benchmarks.load import load
from benchmarks.peers import NUMS_STREAMS, PROMPT_LEN
from benchmarks.report import spread, write
from benchmarks.servers import Server

OUTPUT_LEN = 64
OWN_FORMS = {
    **dict.fromkeys(("Q4_0", "Q4_1", "Q4_K"), "wint4"),
    **dict.fromkeys(("Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0"), "wint8"),
    **dict.fromkeys(("F16", "BF16"), "none"),
}

Rates = dict[str, dict[int, list[float]]]  # by server and streams


def fleet(model: str, arguments: argparse.Namespace) -> list[Server]:
    folder, found = checkpoint(model, arguments.checkpoints), []
    flags = ("--no-enable-prefix-caching", *arguments.shoal_flags.split())
    for form in dict.fromkeys(OWN_FORMS[kind] for kind in arguments.kinds):
        found.append(servers.shoal(folder, *flags, "--quantization", form, name=form))
    for kind in arguments.kinds:
        file = arguments.files / f"{model}-{kind}.gguf"
        found.append(servers.shoal(file, *flags, name=kind))
        if arguments.llama is not None:
            peer = servers.llama(arguments.llama, file)
            found.append(Server(f"{peer.name}, {kind}", peer.command))
    return found


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    return {model: await _of_model(model, arguments) for model in arguments.models}


async def _of_model(model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    rates: Rates = defaultdict(lambda: defaultdict(list))
    for number in range(arguments.rounds):
        for server in fleet(model, arguments):
            async with servers.running(server) as url:
                for num in arguments.streams:
                    found = await load(
                        url,
                        concurrency=num,
                        num_requests=max(num, 2),
                        warmup=1,
                        input_len=PROMPT_LEN,
                        output_len=OUTPUT_LEN,
                        vocab_size=SHAPES[model]["vocab_size"],
                        seed=1000 * number + num,  # no prompt occurs twice at a server
                    )
                    rates[server.name][num].append(found["output_tokens_per_s"])
            print(f"round {number + 1}: {model}, {server.name}: {dict(rates[server.name])}")
    return {kind: _figures(kind, rates, arguments.streams) for kind in arguments.kinds}


def _figures(kind: str, rates: Rates, streams: list[int]) -> dict[str, Any]:
    """Ratios are of one round."""
    own = OWN_FORMS[kind]
    others = {own: own, "llama.cpp": f"llama.cpp, {kind}"}
    found: dict[str, Any] = {}
    for num in streams:
        facts: dict[str, Any] = {"shoal": spread(rates[kind][num])}
        for name, other in others.items():
            if other in rates:
                pairs = list(zip(rates[kind][num], rates[other][num], strict=True))
                facts[name] = spread(rates[other][num])
                facts[f"shoal / {name}"] = spread([ours / theirs for ours, theirs in pairs])
        found[f"{num} streams"] = facts
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("files", type=Path, metavar="DIR", help="folder of the files MODEL-KIND.gguf")
    add("--llama", type=Path, metavar="PROGRAM", help="llama.cpp's llama-server")
    add("--checkpoints", type=Path, default=FOLDER, metavar="DIR", help="(default: %(default)s)")
    add("--models", nargs="+", choices=list(SHAPES), default=["small", "medium"])
    add("--kinds", nargs="+", choices=list(OWN_FORMS), default=["Q4_0", "Q4_K", "Q6_K", "Q8_0"])
    add("--streams", nargs="+", type=int, default=list(NUMS_STREAMS), metavar="N")
    add("--rounds", type=int, default=3)
    add("--shoal-flags", default="", help="settings of shoal, as one argument")
    return parser.parse_args()


if __name__ == "__main__":
    write("gguf_files", uvloop.run(measure(parse())))
