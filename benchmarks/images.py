"""Images on a whole server: streams of text beside them, their parts, memory and pauses.

The server has the model of ``benchmarks.image_checkpoint``, in bfloat16. Clients send distinct
pictures of 1008 × 1008 pixels, 1,296 tokens, one after another, and ask for one token. Uploads are
bodies of 30 MB with a picture each, scaled to 16 tokens. All share the machine's cores.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import aiohttp
import uvloop
from msgspec import structs

from benchmarks import servers
from benchmarks.harness.admin import metrics_of
from benchmarks.harness.stream_clients import Clients, Record
from benchmarks.image_checkpoint import TOWER, Pictures, image_checkpoint
from benchmarks.processes import parent_of, services_of
from benchmarks.report import spread, write
from benchmarks.streams import Cell, Figures, figures_of, promise_ms, running_clients, spreads

SIDE = 1008
NUM_TOKENS = (SIDE // 28) ** 2
UPLOAD_SIDE, UPLOAD_PIXELS = 2720, 16 * 28 * 28
NUM_UPLOADS = 64
MAX_BODY_BYTES = 32 << 20
LEAD_S = 2.0
POLL_S = 0.2
SETTINGS = ["--max-body-bytes", str(MAX_BODY_BYTES), "--served-model-name", "images"]
CHAT = "/v1/chat/completions"
READ, ENCODE = "shoal_media_read_seconds_sum", "shoal_worker_encode_seconds_total"


def body_of(url: str, **fields: Any) -> bytes:
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "What is it?"},
    ]
    chat = {"model": "images", "messages": [{"role": "user", "content": parts}]}
    return json.dumps(chat | {"max_tokens": 1, "temperature": 0} | fields).encode()


async def send(session: aiohttp.ClientSession, body: bytes) -> tuple[int, dict[str, Any], str]:
    """Status, answer and Retry-After."""
    headers = {"Content-Type": "application/json"}
    async with session.post(CHAT, data=body, headers=headers) as response:
        return response.status, await response.json(), response.headers.get("Retry-After", "")


async def send_pictures(
    session: aiohttp.ClientSession,
    pictures: Pictures,
    client: int,
    records: list[Record],
    is_over: Callable[[], bool],
) -> None:
    while not is_over():
        body = await asyncio.to_thread(lambda: body_of(pictures.next_url()))
        record = Record(client=client, num_prompt_tokens=NUM_TOKENS, sent_s=perf_counter())
        records.append(record)
        status, answer, _ = await send(session, body)
        if status != 200:
            raise RuntimeError(f"{status}: {answer}")
        record.chunks.append((perf_counter(), 1))


async def measure_cell(
    session: aiohttp.ClientSession,
    url: str,
    pictures: Pictures,
    streams: Clients,
    num_clients: int,
    duration_s: float,
) -> Cell:
    """Ends when the pictures under way have their answers."""
    sent: list[Record] = []
    streamed: list[Record] = []
    is_over = False
    async with asyncio.TaskGroup() as group:
        async with running_clients(url, streams, streamed):
            for client in range(num_clients):
                group.create_task(send_pictures(session, pictures, client, sent, lambda: is_over))
            await asyncio.sleep(LEAD_S)
            from_s = perf_counter()
            await asyncio.sleep(duration_s)
            until_s = perf_counter()
        is_over = True
    return Cell(from_s=from_s, until_s=until_s, streams=streamed, prompts=sent)


def of_pictures(cell: Cell) -> Figures:
    """The time to the first token of those that were answered in the cell, or sent in it."""
    seconds = [
        record.chunks[0][0] - record.sent_s
        for record in cell.prompts
        if record.sent_s < cell.until_s
    ]
    return {"s to the first token of a picture": median(seconds)} if seconds else {}


async def beside_pictures(
    session: aiohttp.ClientSession, url: str, pictures: Pictures, arguments: argparse.Namespace
) -> dict[str, Any]:
    runs: dict[str, list[Figures]] = {}
    for number in range(arguments.rounds):
        for num in arguments.streams:
            streams = Clients(
                kind="streams", num=num, seed=number, min_len=16, max_len=16, max_tokens=3000
            )
            cells = {
                clients: await measure_cell(
                    session,
                    url,
                    pictures,
                    streams,
                    clients,
                    arguments.seconds if clients else arguments.seconds / 2,
                )
                for clients in (0, *arguments.clients)
            }
            for clients, cell in cells.items():
                only_text = structs.replace(cell, prompts=[])
                figures = figures_of(only_text, cells[0], promise_ms(cells[0]))
                figures |= of_pictures(cell)
                name = f"streams: {num}, clients with pictures: {clients}"
                runs.setdefault(name, []).append(figures)
                print(f"{name}: {json.dumps(figures)}", file=sys.stderr, flush=True)
    return {name: spreads(each) for name, each in runs.items()}


async def parts_of_a_picture(
    session: aiohttp.ClientSession, mesh_dir: Path, pictures: Pictures, num: int
) -> dict[str, Any]:
    """Seconds, without any other request; then with the same picture again."""
    runs: dict[str, list[float]] = {}
    for _ in range(num + 1):
        body = body_of(pictures.next_url())
        before = await _seconds(mesh_dir)
        first_s = await _timed(session, body)
        after = await _seconds(mesh_dir)
        read_s, encode_s = (after[name] - before[name] for name in (READ, ENCODE))
        for name, seconds in {
            "opened and scaled": read_s,
            "tower": encode_s,
            "all else: transport, prefill, first token": first_s - read_s - encode_s,
            "first token": first_s,
            "first token, the same request again": await _timed(session, body),
        }.items():
            runs.setdefault(name, []).append(seconds)
    return {name: spread(seconds[1:]) for name, seconds in runs.items()}  # after a warm-up


async def _seconds(mesh_dir: Path) -> dict[str, float]:
    return await metrics_of("tokenizer", mesh_dir) | await metrics_of("worker", mesh_dir)


async def _timed(session: aiohttp.ClientSession, body: bytes) -> float:
    started_s = perf_counter()
    status, answer, _ = await send(session, body)
    if status != 200:
        raise RuntimeError(f"{status}: {answer}")
    return perf_counter() - started_s


class PeakMemory:
    """The most that each process of a server had in memory, in MiB, since it began."""

    def __init__(self, mesh_dir: Path) -> None:
        services = services_of(mesh_dir)
        children = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        self._pids = {name: [pid] for name, pid in services.items()}
        readers = [pid for pid in children if _parent(pid) == services["tokenizer"]]
        self._pids["readers of images, each"] = readers
        for pids in self._pids.values():
            for pid in pids:
                Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew
        self._before = self._read("VmRSS")

    def figures(self) -> dict[str, Any]:
        peaks = self._read("VmHWM")
        return {
            name: {"before, MiB": self._before[name], "peak, MiB": peaks[name]} for name in peaks
        }

    def _read(self, field: str) -> dict[str, int]:
        return {
            name: max((_mib(pid, field) for pid in pids), default=0)
            for name, pids in self._pids.items()
        }


def _parent(pid: int) -> int:
    try:
        return parent_of(pid)
    except OSError:
        return 0


def _mib(pid: int, field: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1]) >> 10


async def uploads(session: aiohttp.ClientSession, mesh_dir: Path, num: int) -> dict[str, Any]:
    """All at once; a picture each."""
    pictures = Pictures(UPLOAD_SIDE, noise=255, level=0)
    fields = {"mm_processor_kwargs": {"max_pixels": UPLOAD_PIXELS}}
    bodies = [body_of(pictures.next_url(), **fields) for _ in range(num)]
    await send(session, bodies[0])  # readers start
    memory = PeakMemory(mesh_dir)
    started_s = perf_counter()
    answers = Counter(await asyncio.gather(*(_answer(session, body) for body in bodies)))
    return {
        "bytes of a body": len(bodies[0]),
        "answers": answers,
        "seconds": round(perf_counter() - started_s, 1),
        "memory": memory.figures(),
    }


async def _answer(session: aiohttp.ClientSession, body: bytes) -> str:
    try:
        status, answer, retry_after = await send(session, body)
    except aiohttp.ClientError as error:
        return type(error).__name__
    code = answer.get("error", {}).get("code") or ""
    return f"{status} {code}" + (f", Retry-After {retry_after}" if retry_after else "")


async def pauses(session: aiohttp.ClientSession, num: int) -> dict[str, Any]:
    """Answers of /health one after another while a body is read."""
    pictures = Pictures(UPLOAD_SIDE, noise=255, level=0)
    body = body_of(pictures.next_url(), mm_processor_kwargs={"max_pixels": UPLOAD_PIXELS})
    await send(session, body)
    runs: dict[str, list[float]] = {"alone": [], "beside a body of 30 MB": []}
    for _ in range(num):
        runs["alone"].append(await _longest_ms(session, asyncio.create_task(asyncio.sleep(1))))
        sending = asyncio.create_task(send(session, body))
        runs["beside a body of 30 MB"].append(await _longest_ms(session, sending))
    return {f"longest answer of /health, ms, {name}": spread(each) for name, each in runs.items()}


async def _longest_ms(session: aiohttp.ClientSession, task: asyncio.Task[Any]) -> float:
    longest_s = 0.0
    while not task.done():
        started_s = perf_counter()
        async with session.get("/health") as response:
            await response.read()
        longest_s = max(longest_s, perf_counter() - started_s)
    return 1000 * longest_s


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {"layers of the tower": TOWER["depth"]}
    pictures = Pictures(SIDE, noise=40)
    with tempfile.TemporaryDirectory() as name:
        mesh_dir = Path(name)
        server = servers.shoal(image_checkpoint(), *SETTINGS, "--mesh-dir", name)
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with (
            servers.running(server) as url,
            aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session,
        ):
            if "parts" in arguments.only:
                found["seconds of a picture"] = await parts_of_a_picture(
                    session, mesh_dir, pictures, arguments.rounds
                )
            if "streams" in arguments.only:
                found |= await beside_pictures(session, url, pictures, arguments)
            if "pauses" in arguments.only:
                found |= await pauses(session, arguments.rounds)
            if "uploads" in arguments.only:
                found[f"{NUM_UPLOADS} uploads at once"] = await uploads(
                    session, mesh_dir, NUM_UPLOADS
                )
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ["parts", "streams", "pauses", "uploads"]
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2], help="with pictures")
    parser.add_argument("--seconds", type=float, default=40, help="of each cell")
    parser.add_argument("--rounds", type=int, default=3)
    write("images", uvloop.run(measure(parser.parse_args())))
