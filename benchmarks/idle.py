"""The worker's idle time at 32 streams on the medium model.

One whole server, loaded over HTTP. The figures are the worker's own metrics: seconds in steps, and
seconds between steps while it has sequences.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import uvloop

from benchmarks import servers
from benchmarks.checkpoints import SHAPES, checkpoint
from benchmarks.harness.admin import metrics_of
from benchmarks.load import load
from benchmarks.report import spread, write

NUM_STREAMS = 32
NAMES = {"idle": "shoal_step_idle_seconds_total", "busy": "shoal_step_busy_seconds_total"}


async def measure(model: str, num_rounds: int, output_len: int) -> dict[str, Any]:
    flags: dict[str, Any] = {
        "concurrency": NUM_STREAMS,
        "num_requests": NUM_STREAMS,
        "input_len": 128,
        "output_len": output_len,
        "vocab_size": SHAPES[model]["vocab_size"],
    }
    runs: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as mesh_dir:
        server = servers.shoal(
            checkpoint(model), "--no-enable-prefix-caching", "--mesh-dir", mesh_dir
        )
        async with servers.running(server) as url:
            for number in range(num_rounds + 1):
                before = await _seconds(Path(mesh_dir))
                rate = (await load(url, seed=number, **flags))["output_tokens_per_s"]
                after = await _seconds(Path(mesh_dir))
                spent = {name: after[name] - before[name] for name in NAMES}
                runs.append({"rate": rate, "share": spent["idle"] / sum(spent.values())})
    counted = runs[1:]
    return {
        "idle share of the worker's time": spread([run["share"] for run in counted]),
        "tokens/s": spread([run["rate"] for run in counted]),
    }


async def _seconds(mesh_dir: Path) -> dict[str, float]:
    values = await metrics_of("worker", mesh_dir)
    return {name: values[metric] for name, metric in NAMES.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SHAPES, default="medium")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output-len", type=int, default=96)
    arguments = parser.parse_args()
    figures = measure(arguments.model, arguments.rounds, arguments.output_len)
    write("idle", {arguments.model: uvloop.run(figures)})
