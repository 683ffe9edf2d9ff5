"""Are texts with drafts those without?

The embedded model in the engine, under the scheduler's own core: 200 beginnings of texts, with one
to five drafts by the MTP head and by prompt lookup, greedy and sampled, each prompt alone and 32 at
once, in float32 and bfloat16. Told is the share of texts that are the same, token for token, and of
those that differ how far the differing token lay below the highest score.
"""

import argparse
from typing import Any

from benchmarks.report import write
from tests.services.worker.equality import DTYPES, METHODS, TEMPERATURES, compare, prompts_of


def measure(num_prompts: int, max_tokens: int, depths: list[int], dtypes: list[str]) -> Any:
    prompts = prompts_of(num_prompts)
    return {
        f"{dtype}, {method}": {
            f"temperature {temperature:g}": compare(
                prompts, dtype, method, temperature, depths, max_tokens
            )
            for temperature in TEMPERATURES
        }
        for dtype in dtypes
        for method in METHODS
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--depths", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    args = parser.parse_args()
    write("equality", measure(args.prompts, args.max_tokens, args.depths, args.dtypes))
