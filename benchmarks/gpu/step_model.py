"""How long a step that decodes should take on a card that is not there: a prediction, which no card
has checked yet.

What is launched is what the engine launches, and compiled for sm_90. A kernel takes the longest of
what its bytes take, what its instructions take, and what the longest chain of them takes, in as
many waves as it has programs for the places on a card, and before that its launch and the first
bytes' way from memory. What launches and latencies cost are arguments. Products are our own, for
any number of rows: what torch's library does is not looked at.

    python -m benchmarks.gpu.step_model --cards h100 h200 --rows 1 8 32
"""

import argparse
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from statistics import mean
from typing import Any, NamedTuple

from benchmarks.gpu.dry_card import Launch
from benchmarks.gpu.floor import step_floor_s
from benchmarks.gpu.places import beside, residents
from benchmarks.gpu.results import markdown
from benchmarks.gpu.sass import Timing, read_code, timing
from benchmarks.gpu.shapes import QWEN3_8B, Config
from benchmarks.gpu.step_launches import DTYPE, Operator, decode_launches
from benchmarks.gpu.switches import AS_IT_IS, changed, changes, own_products, product_changes
from benchmarks.report import write
from kernels.dependent.triton import LINE_BYTES, PREFETCH_LINES

MAX_LEN = 4096  # of a sequence, for tables
MAX_ROWS = 256
NUM_SCHEDULERS = 4  # of a processor
L2_GB_PER_S = 5500.0  # that all processors together read of what is there; a guess
PREFETCH = "prefetch_kernel"
ASKED_BYTES = LINE_BYTES.value * PREFETCH_LINES.value  # of each row, before a product waits


class Card(NamedTuple):
    """``read_gb_per_s`` is what a kernel reads, ``launch_us`` lies between two kernels of a graph,
    ``dependent_us`` between two of which the second began before the first had ended, and
    ``latency_us`` is a busy memory's."""

    num_processors: int
    clock_ghz: float
    read_gb_per_s: float
    launch_us: float
    latency_us: float
    dependent_us: float


# Processors, clock and bandwidth (3.35 and 4.8 TB/s) are NVIDIA's data sheets'; nine tenths of it
# are taken to be read. 1.3 us for a launch in a graph on an H100 is Hazy Research's ("Look
# Ma, No Bubbles", 2025). The latency is a guess, and so is what is left of a launch that began
# early: a wait that ends. ``make gpu-check`` has its card's own bandwidth.
CARDS = {
    "h100": Card(132, 1.755, 3015.0, 1.3, 0.7, 0.6),
    "h200": Card(132, 1.755, 4320.0, 1.3, 0.7, 0.6),
}


class Work(NamedTuple):
    """Of a launch: bytes that come from memory, programs that have something to do, and how often
    the longest of them runs each loop. What is behind an atomic is the last program's alone where
    one ``is_last``. ``num_shared_bytes`` come from the L2 cache to one program after the other."""

    num_bytes: int
    num_programs: int
    times: tuple[float, ...]
    is_last: bool = False
    num_shared_bytes: int = 0


class Start(NamedTuple):
    """What a launch finds: whether it began before the one in front had ended, and of its bytes
    how many are in the L2 cache."""

    is_early: bool = False
    num_cached: int = 0


class Predicted(NamedTuple):
    """``bound`` is what takes longest of a kernel's own time."""

    kernel: str
    grid: tuple[int, ...]
    us: float  # with its launch
    memory_us: float
    chain_us: float
    bound: str
    registers: int = 0
    shared_kb: float = 0.0
    residents: int = 0
    waves: float = 0.0


class Model:
    """Of steps with so many known tokens a row, ``context``, on a ``card``."""

    def __init__(self, card: Card, config: Config, context: int) -> None:
        self._card = card
        self._config = config
        self._context = context

    def step(self, num_rows: int) -> list[Predicted]:
        """All kernels of it, in order."""
        return self.launched(decode_launches(self._config, num_rows, MAX_LEN))

    def launched(self, launches: Iterable[Launch | Operator]) -> list[Predicted]:
        found: list[Predicted] = []
        prefetch: Launch | None = None
        before: Launch | Operator | None = None
        first = 0  # of what runs beside it
        for each in launches:
            if not isinstance(each, Launch):
                found.append(self._operator(each))
            elif each.model.name == PREFETCH:
                prefetch, first = each, len(found)
            elif prefetch is not None and KERNELS.get(each.model.name) is _product:
                found.append(self._waited(prefetch, found[first:]))
                start = Start(num_cached=prefetch.arguments["p_words"].nbytes)
                found.append(self._predicted(each, start))
                prefetch = None
            else:
                found.append(self._predicted(each, self._start(each, before, found)))
            before = each
        return found

    def _start(
        self, launch: Launch, before: Launch | Operator | None, done: Sequence[Predicted]
    ) -> Start:
        """Behind another that lets it begin early, a product asks for the beginning of its weight,
        as far as it has room beside the other and that one leaves the memory idle."""
        if not isinstance(before, Launch) or not (launch.is_dependent and before.is_dependent):
            return Start()
        if KERNELS.get(launch.model.name) is not _product:
            return Start(is_early=True)
        card, given = self._card, launch.arguments
        num_rows = given["BLOCK_ROWS"] * given["NUM_PARTS"]
        num_places = beside(launch, before, card.num_processors) * card.num_processors
        num_asked = min(num_places, math.prod(launch.grid)) * num_rows * ASKED_BYTES
        idle_us = done[-1].us - done[-1].memory_us
        num_read = idle_us * card.read_gb_per_s * 1e3
        return Start(True, int(min(num_asked, num_read, given["p_weight"].nbytes)))

    def floor_us(self, num_rows: int) -> float:
        rate = self._card.read_gb_per_s
        return 1e6 * step_floor_s(self._config, DTYPE.itemsize, num_rows, self._context, rate)

    def _operator(self, launch: Operator) -> Predicted:
        card = self._card
        memory_us = launch.num_bytes / card.read_gb_per_s / 1e3
        us = card.launch_us + card.latency_us + memory_us
        return Predicted(launch.name, (), us, memory_us, 0.0, "launch")

    def _waited(self, prefetch: Launch, others: Sequence[Predicted]) -> Predicted:
        """What a prefetch beside ``others`` makes the next product wait: it has the memory while
        they leave it idle."""
        card, num_bytes = self._card, prefetch.arguments["p_words"].nbytes
        memory_us = num_bytes / card.read_gb_per_s / 1e3
        idle_us = sum(each.us - each.memory_us for each in others)
        us = max(0.0, card.launch_us + card.latency_us + memory_us - idle_us)
        return Predicted(PREFETCH, prefetch.grid, us, memory_us, 0.0, "memory")

    def _predicted(self, launch: Launch, start: Start) -> Predicted:
        card = self._card
        work, num_residents = work_of(launch, self._context), residents(launch)
        alone = _timing(launch.model.cubin, work.times, work.is_last)
        memory_us = self._memory_us(launch, work, num_residents, start.num_cached)
        chain_us = self._chain_us(launch, work, num_residents, alone)
        own_us = max(memory_us, chain_us)
        fixed_us = card.dependent_us if start.is_early else card.launch_us
        if work.num_bytes and not (start.is_early and start.num_cached):
            fixed_us += card.latency_us
        bound = "launch" if fixed_us > own_us else "memory" if memory_us > chain_us else "chain"
        return Predicted(
            launch.model.name,
            launch.grid,
            fixed_us + own_us,
            memory_us,
            chain_us,
            bound,
            launch.model.resources.num_registers,
            launch.model.resources.shared_bytes / 1024,
            num_residents,
            work.num_programs / (num_residents * card.num_processors),
        )

    def _memory_us(self, launch: Launch, work: Work, num_residents: int, num_cached: int) -> float:
        """No more is on its way than the programs' shared memory has room for, and the L2 cache
        gives what all read besides what goes through it."""
        card = self._card
        num_places = min(work.num_programs, num_residents * card.num_processors)
        in_flight = max(launch.model.resources.shared_bytes, 1) * num_places
        rate = min(card.read_gb_per_s, in_flight / card.latency_us / 1e3)
        if not work.num_bytes:
            return 0.0
        uncached = work.num_bytes - num_cached
        through_l2 = work.num_bytes + work.num_shared_bytes
        return max(uncached / rate, through_l2 / max(rate, L2_GB_PER_S)) / 1e3

    def _chain_us(self, launch: Launch, work: Work, num_residents: int, alone: Timing) -> float:
        """Wave by wave: the last one has fewer programs on a processor."""
        card, left, clocks = self._card, work.num_programs, 0.0
        while left > 0:
            num_together = min(num_residents, math.ceil(left / card.num_processors))
            warps = launch.num_warps * num_together / NUM_SCHEDULERS
            clocks += max(alone.clocks, alone.num_instructions * warps)
            left -= num_together * card.num_processors
        return (clocks + alone.last_clocks) / card.clock_ghz / 1e3


def work_of(launch: Launch, context: int) -> Work:
    """What is not known by name reads what the caches hold, and runs its loops once."""
    kernel = KERNELS.get(launch.model.name)
    return Work(0, math.prod(launch.grid), ()) if kernel is None else kernel(launch, context)


def _product(launch: Launch, context: int) -> Work:
    given = launch.arguments
    stored = (
        given[name] for name in ("p_weight", "p_scales", "p_zeros") if given[name] is not None
    )
    times = math.ceil(given["K"] / given["BLOCK_K"])
    num_bytes, num_programs = sum(each.nbytes for each in stored), math.prod(launch.grid)
    num_tiles = given["NUM_TILES"]  # of tokens, which share what is read of the weight
    num_shared_bytes = num_programs * given["p_x"].nbytes // num_tiles + (num_tiles - 1) * num_bytes
    return Work(num_bytes, num_programs, (times,), num_shared_bytes=num_shared_bytes)


def _attention(launch: Launch, context: int) -> Work:
    given, (num_kv_heads, _, num_tiles) = launch.arguments, launch.grid
    num_rows, num_splits, split = len(given["p_slots"]), given["NUM_SPLITS"], given["SPLIT_TILES"]
    tiles = math.ceil(context / given["BLOCK_KEYS"])
    num_active = min(num_splits, math.ceil(tiles / split))
    own = math.ceil(tiles / split / num_splits) * split if tiles > split else tiles
    cache = given["p_kv_cache"]
    num_bytes = num_rows * context * cache[0, 0].nbytes
    num_programs = num_kv_heads * num_active * num_tiles
    return Work(num_bytes, num_programs, (own - 1, 1), given["p_arrivals"] is not None)


KERNELS: dict[str, Callable[[Launch, int], Work]] = {
    "linear_kernel": _product,
    "gated_kernel": _product,
    "decode_kernel": _attention,
}


def table(step: Sequence[Predicted]) -> Iterator[dict[str, Any]]:
    """A row for each kernel, by name and grid, in order of first use, and one for the step."""
    times = Counter(step)
    whole_us = sum(each.us for each in step)
    for each, num in times.items():
        found = each._asdict() | {"grid": str(list(each.grid))}
        yield found | {"times": num, "share": num * each.us / whole_us}
    yield {"kernel": "a step", "us": whole_us, "times": len(step), "share": 1.0}


def whole(model: Model, num_rows: int) -> dict[str, Any]:
    """A step, and how much of it the memory alone would take."""
    us, floor_us = sum(each.us for each in model.step(num_rows)), model.floor_us(num_rows)
    return {"us": us, "floor_us": floor_us, "share_of_floor": floor_us / us}


def compared(model: Model, num_rows: int) -> Iterator[dict[str, Any]]:
    """The step as it is, and with each change by itself."""
    as_it_is = whole(model, num_rows)
    for change in (AS_IT_IS, *changes(), *product_changes()):
        with changed(change):
            found = whole(model, num_rows)
        yield {"change": change.what} | found | {"more_us": found["us"] - as_it_is["us"]}


def with_predictions(
    rows: Iterable[dict[str, Any]], step: Sequence[Predicted]
) -> Iterator[dict[str, Any]]:
    """``rows`` of a timeline, those without drafts with what was predicted of each kernel and of
    the step, which is to be compared with ``us`` and ``gap_us`` together: launches of a name and
    grid are one there."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for each in step:
        found[each.kernel, str(list(each.grid))].append(each.us)
    means = {key: mean(all_us) for key, all_us in found.items()}
    means["a step", ""] = sum(each.us for each in step)
    for row in rows:
        us = None if row["depth"] else means.get((row["kernel"], row.get("grid", "")))
        yield row if us is None else row | {"predicted_us": us}


def main(arguments: list[str]) -> None:
    options = _parse(arguments)
    given = {name: getattr(options, name) for name in Card._fields}
    given = {name: value for name, value in given.items() if value is not None}
    cards = {name: CARDS[name]._replace(**given) for name in options.cards}
    kernels: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    for name, card in cards.items():
        model = Model(card, QWEN3_8B, options.context)
        for num_rows in options.rows:
            what = {"card": name, "num_rows": num_rows}
            with changed(own_products(num_rows)):
                kernels += [what | row for row in table(model.step(num_rows))]
                steps += [what | row for row in compared(model, num_rows)]
    print("A prediction, which no card has checked.", *markdown(kernels), "", sep="\n")
    print(*markdown(steps), sep="\n")
    if options.json:
        known = {name: card._asdict() for name, card in cards.items()}
        write("gpu.step_model", {"cards": known, "kernels": kernels, "steps": steps})


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu.step_model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--cards", choices=CARDS, nargs="+", default=["h100"])
    add("--rows", type=_num_rows, nargs="+", default=[1], metavar="N", help=f"1 to {MAX_ROWS}")
    add("--context", type=int, default=640, metavar="N", help="known tokens of each row (640)")
    add("--json", action="store_true", help="write it into benchmarks/results, too")
    for name in Card._fields:
        kind = type(getattr(CARDS["h100"], name))
        add(f"--{name.replace('_', '-')}", type=kind, metavar="N", help="in place of a card's own")
    return parser.parse_args(arguments)


def _num_rows(text: str) -> int:
    if not 1 <= int(text) <= MAX_ROWS:
        raise argparse.ArgumentTypeError(f"{text}: 1 to {MAX_ROWS} rows can be predicted")
    return int(text)


@cache
def _timing(cubin: bytes, times: tuple[float, ...], is_last: bool) -> Timing:
    return timing(_code(cubin), times, ends_at="ATOM" if is_last else None)


_code = cache(read_code)


if __name__ == "__main__":
    main(sys.argv[1:])
