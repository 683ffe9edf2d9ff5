"""A gateway with an event loop that repeatedly stalls for half a second, as a process."""

import asyncio
import sys
import time
from pathlib import Path

from tests.shared.recorder import Recorder

STALL_S = 0.5
RUN_S = 0.1


async def main(directory: Path) -> None:
    recorder = Recorder("gateway", "stalling")
    recorder.link.dial("tokenizer", directory)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(recorder.link.run())
        while True:
            await asyncio.sleep(RUN_S)
            time.sleep(STALL_S)  # noqa: ASYNC251


asyncio.run(main(Path(sys.argv[1])))
