"""Watches the event loop of a service.

The longest time for which it stood still is in a file of the folder that TEST_STALLS names;
a test that removes the file begins anew.
"""

import asyncio
import os
import time
from pathlib import Path

TICK_S = 0.002


async def watch(instance: str) -> None:
    path = Path(os.environ["TEST_STALLS"]) / instance
    longest_s, last_s = 0.0, time.monotonic()
    while True:
        await asyncio.sleep(TICK_S)
        now_s = time.monotonic()
        if not path.exists():  # a test starts anew
            longest_s = 0.0
        if now_s - last_s - TICK_S > longest_s:
            longest_s = now_s - last_s - TICK_S
            path.write_text(str(longest_s))
        last_s = now_s
