"""Pace of streams next to clients with cold prompts.

Streams are long greedy completions. Each of the other clients sends one prompt after another, all
distinct and of random length, and asks for one token. Servers of all compared checkouts run side by
side and are loaded in turns, the others idle; streams and prompts come from processes of their own.
All share the machine's cores.

A promise is a time per token: by default twice the median of the same streams alone. A window, 16
tokens of a stream, keeps it if its mean time per token does.
"""

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import aiohttp
import msgspec
import numpy as np
import uvloop

from benchmarks import servers
from benchmarks.harness.stream_clients import Clients, Record
from benchmarks.report import spread, write
from shared.model_folder import EMBEDDED_MODEL

ALONE = 0
PROMISED_SHARE = 0.5  # of the pace of the same streams alone
WINDOW_TOKENS = 16
LEAD_S = 2.0  # until all clients are at work
STREAM_PROMPT_LEN = 16
MAX_STREAM_TOKENS = 4096
MIN_PROMPT_LEN, MAX_PROMPT_LEN = 100, 8000
GAP_PERCENTILES = {"p50": 50, "p99": 99, "p99.9": 99.9, "max": 100}
NO_DRAFTS = ("--speculative-config", '{"method": "none"}')

Figures = dict[str, float]


class Cell(msgspec.Struct, kw_only=True):
    """The measured time and the requests in it, also those begun before or ended later."""

    from_s: float
    until_s: float
    streams: list[Record]
    prompts: list[Record]

    def windows_ms(self) -> tuple[list[float], list[float]]:
        """Milliseconds per token of whole windows, and at least so many of the last ones, which
        the end of the measurement cut."""
        whole: list[float] = []
        cut: list[float] = []
        for record in self.streams:
            times_s = [time_s for time_s, num in record.chunks for _ in range(num)]
            inside_s = [each for each in times_s if self.from_s <= each <= self.until_s]
            starts_s = inside_s[::WINDOW_TOKENS]
            whole += [1000 * (end - start) / WINDOW_TOKENS for start, end in pairwise(starts_s)]
            if times_s and times_s[0] < self.until_s < self._end_s(record):
                start_s = starts_s[-1] if starts_s else self.from_s
                cut.append(1000 * (self.until_s - start_s) / WINDOW_TOKENS)
        return whole, cut

    def gaps_ms(self) -> list[float]:
        """Milliseconds from chunk to chunk; the end of the measurement counts as a chunk."""
        gaps_s: list[float] = []
        for record in self.streams:
            end_s = min(self.until_s, self._end_s(record))
            times_s = [time_s for time_s, _ in record.chunks if time_s < end_s] + [end_s]
            gaps_s += [end - start for start, end in pairwise(times_s) if end >= self.from_s]
        return [1000 * gap_s for gap_s in gaps_s]

    def rates(self) -> list[float]:
        """Tokens/s of each stream, without the time to its first tokens."""
        nums: dict[int, int] = {record.client: 0 for record in self.streams}
        durations_s: dict[int, float] = dict.fromkeys(nums, 0.0)
        for record in self.streams:
            if not record.chunks:
                continue
            start_s = max(self.from_s, record.chunks[0][0])
            end_s = min(self.until_s, self._end_s(record))
            if start_s < end_s:
                durations_s[record.client] += end_s - start_s
                nums[record.client] += sum(
                    num for time_s, num in record.chunks if start_s < time_s <= end_s
                )
        return [nums[each] / durations_s[each] if durations_s[each] else 0.0 for each in nums]

    def first_tokens_ms(self, records: Sequence[Record]) -> list[float]:
        """Milliseconds to first tokens within the time; without any, how long requests wait."""
        times_ms = [
            1000 * (record.chunks[0][0] - record.sent_s)
            for record in records
            if record.chunks and self.from_s <= record.chunks[0][0] <= self.until_s
        ]
        waits_ms = [1000 * (self.until_s - each.sent_s) for each in records if not each.chunks]
        return times_ms or waits_ms

    def prompt_rate(self) -> float:
        """Prompt tokens/s of the answers within the time."""
        answered = [
            record.num_prompt_tokens
            for record in self.prompts
            if record.chunks and self.from_s <= record.chunks[0][0] <= self.until_s
        ]
        return sum(answered) / (self.until_s - self.from_s)

    def _end_s(self, record: Record) -> float:
        """The last chunk; infinite if the client left before it."""
        return record.chunks[-1][0] if record.is_over else float("inf")


def promise_ms(alone: Cell) -> float:
    return median(alone.windows_ms()[0]) / PROMISED_SHARE


def figures_of(cell: Cell, alone: Cell, tpot_ms: float) -> Figures:
    """``alone``: the same streams without prompts. ``tpot_ms``: the promise."""
    whole_ms, cut_ms = cell.windows_ms()
    windows_ms = whole_ms + [each_ms for each_ms in cut_ms if each_ms > tpot_ms]
    gaps_ms = cell.gaps_ms()
    firsts_ms = cell.first_tokens_ms(cell.streams)
    rate = median(cell.rates())
    figures = {
        "tokens/s of a stream": rate,
        "ratio to the streams alone": rate / median(alone.rates()),
        **{
            f"ms between chunks, {name}": float(np.percentile(gaps_ms, share))
            for name, share in GAP_PERCENTILES.items()
        },
        "promise, ms per token": tpot_ms,
        "windows that keep it": sum(each <= tpot_ms for each in windows_ms) / len(windows_ms),
    }
    if firsts_ms:
        figures["ms to the first token of a stream, p50"] = median(firsts_ms)
    if cell.prompts:
        waits_ms = cell.first_tokens_ms(cell.prompts)
        figures["prompt tokens/s"] = cell.prompt_rate()
        figures["ms to the first token of a prompt, p50"] = float(np.percentile(waits_ms, 50))
        figures["ms to the first token of a prompt, p99"] = float(np.percentile(waits_ms, 99))
    return figures


@asynccontextmanager
async def running_clients(url: str, clients: Clients, records: list[Record]) -> AsyncIterator[None]:
    """``records`` gets those of ``clients`` at the end."""
    if not clients.num:
        yield
        return
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.harness.stream_clients"),
        *(url, msgspec.json.encode(clients).decode()),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=servers.ROOT,
    )
    try:
        yield
    finally:
        text, _ = await process.communicate(b"")  # closes its stdin
    if process.returncode:
        raise RuntimeError(f"the clients with {clients.kind} ended with {process.returncode}")
    records += msgspec.json.decode(text, type=list[Record])


async def measure_cell(url: str, streams: Clients, prompts: Clients, duration_s: float) -> Cell:
    sent: list[Record] = []
    streamed: list[Record] = []
    async with (
        running_clients(url, prompts, sent),
        running_clients(url, streams, streamed),
    ):
        await asyncio.sleep(LEAD_S)
        from_s = perf_counter()
        await asyncio.sleep(duration_s)
        until_s = perf_counter()
    return Cell(from_s=from_s, until_s=until_s, streams=streamed, prompts=sent)


async def _max_model_len(url: str) -> int:
    async with aiohttp.ClientSession(url) as session, session.get("/v1/models") as response:
        return int((await response.json())["data"][0]["max_model_len"])


async def _round(
    url: str, num_streams: int, seed: int, arguments: argparse.Namespace
) -> dict[int, Figures]:
    """Figures by the number of clients with prompts, first without any."""
    context = await _max_model_len(url)
    length = arguments.prompt_tokens
    streams = Clients(
        kind="streams",
        num=num_streams,
        seed=seed,
        min_len=STREAM_PROMPT_LEN,
        max_len=STREAM_PROMPT_LEN,
        max_tokens=min(MAX_STREAM_TOKENS, context - STREAM_PROMPT_LEN),
    )
    cells: dict[int, Cell] = {}
    for num in (ALONE, *(num for num in arguments.neighbours if num != ALONE)):
        prompts = Clients(
            kind="prompts",
            num=num,
            seed=1000 * seed + num,
            min_len=length or MIN_PROMPT_LEN,
            max_len=min(length or MAX_PROMPT_LEN, context - 1),
            max_tokens=1,
        )
        cells[num] = await measure_cell(url, streams, prompts, arguments.seconds)
    alone = cells[ALONE]
    tpot_ms = arguments.tpot_ms or promise_ms(alone)
    return {num: figures_of(cell, alone, tpot_ms) for num, cell in cells.items()}


async def measure(folders: dict[str, Path], arguments: argparse.Namespace) -> dict[str, Any]:
    drafts = () if arguments.speculation else NO_DRAFTS
    runs: dict[str, dict[str, list[Figures]]] = {}
    async with AsyncExitStack() as stack:
        urls = {
            name: await stack.enter_async_context(
                servers.running(
                    servers.checkout("--model", str(arguments.model), *drafts, folder=folder)
                )
            )
            for name, folder in folders.items()
        }
        for number in range(arguments.rounds):
            names = list(urls)[:: -1 if number % 2 else 1]
            for num_streams in arguments.streams:
                for name in names:
                    found = await _round(urls[name], num_streams, number, arguments)
                    for num, figures in found.items():
                        cell = f"streams: {num_streams}, clients with prompts: {num}"
                        runs.setdefault(cell, {}).setdefault(name, []).append(figures)
                        print(f"{cell}, {name}: {json.dumps(figures)}", file=sys.stderr)
    return {cell: {name: spreads(runs[cell][name]) for name in urls} for cell in runs}


def spreads(rounds: list[Figures]) -> dict[str, Any]:
    names = dict.fromkeys(name for figures in rounds for name in figures)
    return {
        name: spread([figures[name] for figures in rounds if name in figures]) for name in names
    }


def _commit(folder: Path) -> str:
    command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    return subprocess.check_output(command, text=True).strip()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, nargs="+", default=[], help="other checkouts")
    parser.add_argument("--model", type=Path, default=EMBEDDED_MODEL, help="a folder")
    parser.add_argument("--speculation", action="store_true", help="with the model's MTP head")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument(
        "--neighbours", type=int, nargs="+", default=[0, 1, 2, 8, 32], help="clients with prompts"
    )
    parser.add_argument("--prompt-tokens", type=int, help="length of all prompts")
    parser.add_argument("--tpot-ms", type=float, help="the promise")
    parser.add_argument("--seconds", type=float, default=10, help="of each cell")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    folders = {"ours": servers.ROOT} | {each.name: each.resolve() for each in arguments.before}
    commits = {name: _commit(folder) for name, folder in folders.items()}
    found = uvloop.run(measure(folders, arguments))
    write("streams", {"commits": commits} | found)
