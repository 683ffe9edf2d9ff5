"""What graphs should spare steps in which a short prompt joins rows that decode, on a card that is
not there: a prediction, which no card has checked yet.

A step takes the longer of what the host takes to launch it and what the device takes to compute it:
plans are launched ahead. The device's time is the model's of a step (``step_model``); padding is
computed as a prompt of as many tokens. Each launch is taken to cost the host as much as any other.

    python -m benchmarks.gpu.mixed_model --rows 1 8 32 --prompt 30
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.gpu.results import markdown
from benchmarks.gpu.shapes import QWEN3_8B, Config
from benchmarks.gpu.step_launches import mixed_launches
from benchmarks.gpu.step_model import CARDS, MAX_LEN, Model, Predicted
from benchmarks.report import write
from kernels.switches import FEW_TOKENS
from shared.config.worker import WorkerConfig

CONTEXT = 640  # known tokens of each row that decodes
SIZES = WorkerConfig().cudagraph_capture_sizes
# That the host takes for a launch: a guess, by which a step of Qwen3-8B takes it 5 to 6 ms.
HOST_US = 18.0


def predicted(
    model: Model, config: Config, num_rows: int, num_prompt: int, host_us: float
) -> Iterator[dict[str, Any]]:
    """A step without a prompt, and one that a prompt of ``num_prompt`` tokens joins, its forward
    pass as it comes and in a graph."""
    decode_us = _us(model.step(num_rows))
    yield {"step": "decodes", "num_tokens": num_rows, "device_us": decode_us, "us": decode_us}
    num_tokens = num_rows + num_prompt
    num_padded = min(size for size in SIZES if size >= num_tokens)
    padded = [num_prompt, *filter(None, [num_padded - num_tokens])]
    for name, nums, graph in (
        ("a prompt joins, as it comes", [num_prompt], None),
        ("a prompt joins, in a graph", padded, num_padded),
    ):
        computed = model.launched(mixed_launches(config, num_rows, nums, MAX_LEN))
        launches = mixed_launches(config, num_rows, [num_prompt], MAX_LEN, graph)
        num_launches = len(launches) + (graph is not None)
        us = max(_us(computed), num_launches * host_us)
        yield {
            "step": name,
            "num_tokens": graph or num_tokens,
            "launches": num_launches,
            "host_us": num_launches * host_us,
            "device_us": _us(computed),
            "us": us,
            "more_us": us - decode_us,
        }


def _us(step: Sequence[Predicted]) -> float:
    return sum(each.us for each in step)


def main(arguments: list[str]) -> None:
    options = _parse(arguments)
    rows = [
        {"card": name, "num_rows": num_rows, "prompt_len": options.prompt} | row
        for name in options.cards
        for num_rows in options.rows
        for row in predicted(
            Model(CARDS[name], QWEN3_8B, CONTEXT),
            *(QWEN3_8B, num_rows, options.prompt, options.host_us),
        )
    ]
    print("A prediction, which no card has checked.", *markdown(rows), sep="\n")
    if options.json:
        write("gpu.mixed_model", {"host_us": options.host_us, "steps": rows})


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu.mixed_model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--cards", choices=CARDS, nargs="+", default=["h100"])
    add("--rows", type=int, nargs="+", default=[1], metavar="N", help="that decode")
    add("--prompt", type=int, default=30, metavar="N", help="tokens of the prompt (30)")
    add("--host-us", type=float, default=HOST_US, metavar="N", help=f"a launch ({HOST_US})")
    add("--json", action="store_true", help="write it into benchmarks/results, too")
    options = parser.parse_args(arguments)
    if max(options.rows) + options.prompt > FEW_TOKENS:
        parser.error(f"steps of up to {FEW_TOKENS} tokens can be predicted")
    return options


if __name__ == "__main__":
    main(sys.argv[1:])
