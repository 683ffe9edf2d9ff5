"""What does it cost to hold texts to a grammar: a step with and without, and the masks alone.

The embedded model in this process, rows that decode; rounds of both kinds alternate.
"""

import argparse
import json
import time
from typing import Any

import numpy as np
from llguidance import grammar_from

from benchmarks.harness.engines import AnyEngine, make_engine
from benchmarks.harness.step_engine import run_step
from benchmarks.report import spread, write
from services.worker.metrics import GUIDE_MASK_SECONDS, GUIDE_MASKS
from shared.model_folder import EMBEDDED_MODEL
from shared.wire.messages import Admit, Decode, Guide, Prefill, SamplingParams, StepPlan

PROMPT_LEN, NUM_STEPS = 16, 64
ROWS = [1, 8, 32]
SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "price": {"type": "number"},
            "kind": {"enum": ["book", "record", "film"]},
        },
        "required": ["name", "price", "kind"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_pattern": "[ ]{0,1}"},
    },
}
KINDS = {"plain": None, "schema": Guide(grammar_from("json_schema", json.dumps(SCHEMA)))}


def run(engine: AnyEngine, num_rows: int, guide: Guide | None) -> dict[str, float]:
    """Of the steps after the one that computes the prompts."""
    rng = np.random.default_rng(num_rows)
    admits = []
    num_blocks = engine.capacity.max_model_len // engine.capacity.block_size
    for slot in range(num_rows):
        params = SamplingParams(seed=slot, ignore_eos=True, guide=guide)
        blocks = list(range(slot * num_blocks, (slot + 1) * num_blocks))
        lengths = PROMPT_LEN, PROMPT_LEN
        admits.append(Admit(slot, str(slot), 1, 0, 0, *lengths, 0, params, blocks))
    ids = rng.integers(10, engine.model_info.vocab_size, num_rows * PROMPT_LEN).astype(np.int32)
    prefills = [Prefill(slot, PROMPT_LEN) for slot in range(num_rows)]
    run_step(engine, StepPlan(0, [], admits, [], prefills, []), ids)
    decodes = [Decode(slot) for slot in range(num_rows)]
    mask_s, num_masks = _total(GUIDE_MASK_SECONDS), _total(GUIDE_MASKS)
    started_s = time.perf_counter()
    for number in range(NUM_STEPS):
        run_step(engine, StepPlan(1 + number, [], [], [], [], decodes), ids[:0])
    found = {"ms a step": (time.perf_counter() - started_s) / NUM_STEPS * 1e3}
    if guide is not None:
        mask_s, num_masks = _total(GUIDE_MASK_SECONDS) - mask_s, _total(GUIDE_MASKS) - num_masks
        found["µs a mask"] = mask_s / num_masks * 1e6
    engine.reset()
    return found


def _total(counter: Any) -> float:
    (metric,) = counter.collect()
    return float(metric.samples[0].value)


def measure(kernels: str, num_rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    length = PROMPT_LEN + 2 * NUM_STEPS
    engine = make_engine(EMBEDDED_MODEL, kernels, max_num_seqs=max(ROWS), max_model_len=length)
    for num_rows in ROWS:
        runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
        for number in range(num_rounds + 1):
            for kind in KINDS if number % 2 else reversed(KINDS):
                runs[kind].append(run(engine, num_rows, KINDS[kind]))
        found[f"{num_rows} rows"] = {
            f"{kind}, {name}": spread([each[name] for each in runs[kind][1:]])
            for kind in KINDS
            for name in runs[kind][0]
        }
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kernels", nargs="+", default=["native", "device"])
    args = parser.parse_args()
    write("guides", {kernels: measure(kernels, args.rounds) for kernels in args.kernels})
