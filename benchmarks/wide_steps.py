"""The fate of a step with many rows, drafts and logprobs in one message.

Through the real link and codec over ipc between two processes it arrives, and the receiver needs
little more memory than its bytes. A System V message queue refuses the same bytes at the kernel's
default limits; with only msgmax raised its send blocks for ever, which only root can test.
"""

import asyncio
from typing import Any

from benchmarks import sysv
from benchmarks.link import LinkRun
from benchmarks.report import spread, write
from benchmarks.steps import Step, wide_step

NUM_LOGPROBS = (21, 210)
NUM_RUNS = 5
NUM_MESSAGES = 20


async def measure() -> dict[str, Any]:
    return {
        f"512 rows x 6 tokens x {num} logprobs": await compare(wide_step(num))
        for num in NUM_LOGPROBS
    }


async def compare(step: Step) -> dict[str, Any]:
    num_bytes = step.num_wire_bytes
    growths = [await growth_mb(step) for _ in range(NUM_RUNS)]
    return {
        "MB": round(num_bytes / 1e6, 3),
        "link, MB of memory that its receiver needs": spread(growths),
        "queue at default limits": sysv.verdict(num_bytes),
        "queue, msgmax alone raised": sysv.verdict(num_bytes, msgmax=num_bytes),
    }


async def growth_mb(step: Step) -> float:
    """Growth of a new process's memory, without memory left over from other messages."""
    async with LinkRun() as link:
        return await link.growth_bytes(step, NUM_MESSAGES) / 1e6


if __name__ == "__main__":
    write("wide_steps", asyncio.run(measure()))
