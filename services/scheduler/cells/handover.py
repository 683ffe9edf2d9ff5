"""Hands prompts over to other cells: their gateways replay them there."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from math import ceil, inf

from msgspec.structs import replace

from services.scheduler.extension import OtherCells
from services.scheduler.limits import fits
from services.scheduler.scheduler import Scheduler
from services.scheduler.sequence import Sequence
from services.scheduler.tokens_message import Forwarding
from shared.wire.messages import CELLS_MINOR, Lost, Overview, RequestKey

TURN_S = 0.25  # between two handovers: time to recompute a sequence; chosen, not measured
PATIENCE_S = 1.0  # wait of a prompt before it moves to free slots, times attempts; chosen
SETTLED_S = 1.5  # until tokenizers know of taken slots: two heartbeats and their latency


class CellHandover(OtherCells):
    """The cells known to the tokenizers of ``routes``."""

    def __init__(
        self,
        core: Scheduler,
        routes: Mapping[int, Forwarding],
        instance: str,
        on_change: Callable[[], None],
    ) -> None:
        self._core = core
        self._routes = routes
        self._instance = instance
        self._on_change = on_change
        self._moved_s = -inf

    def may_have(self, sequence: Sequence, cell: str = "") -> bool:
        return any(cell in ("", each.scheduler) for each in self._known_at(sequence.route))

    def _known_at(self, route: int) -> list[Overview]:
        """Returns the ready cells other than ours that a tokenizer knows and that are not
        leaving."""
        if (forwarding := self._routes.get(route)) is None:
            return []
        peer = forwarding.peer
        if peer.hello.minor < CELLS_MINOR:
            return []
        others = [each for each in peer.status.overviews if each.scheduler != self._instance]
        return [each for each in others if each.is_ready and not each.is_leaving]

    def hand_over(self, sequences: Iterable[Sequence]) -> None:
        prompts: dict[tuple[str, int], list[Sequence]] = {
            each.prompt_key: [] for each in sequences if self.may_have(each)
        }
        if not prompts:
            return
        for each in self._core.sequences.values():
            if each.prompt_key in prompts:
                prompts[each.prompt_key].append(each)
        lost: dict[tuple[int, int], list[RequestKey]] = defaultdict(list)
        for key, choices in prompts.items():
            num_deaths = max(each.num_worker_deaths * each.is_isolated for each in choices)
            lost[choices[0].route, num_deaths].append(RequestKey(*key))
            for each in choices:
                self._core.cancel(each.key, "handed_over")
        for (route, num_deaths), keys in lost.items():
            forwarding = self._routes[route]
            forwarding.flush()
            forwarding.peer.send(Lost(keys, True, self._instance, num_deaths))
        self._on_change()

    def move_waiting(self, now_s: float) -> None:
        """Hands over the first prompts that have waited ``PATIENCE_S`` and never ran, up to the
        free slots of other cells. A prompt waits longer with each attempt, so that it does not move
        to and fro between slots that others have taken meanwhile. One that a resource keeps waiting
        stays, since the resource bounds its wait here alone."""
        rooms = {route: _with_slots(self._known_at(route)) for route in self._routes}
        if not any(rooms.values()) or now_s < self._moved_s + SETTLED_S:
            return
        begun = {each.prompt_key for each in self._core.sequences.values() if each.has_run}

        def may_move(sequence: Sequence) -> bool:
            has_waited = now_s - sequence.arrived_s >= PATIENCE_S * sequence.attempt
            if not has_waited or sequence.prompt_key in begun:
                return False
            return not any(
                each.admits and each.fits(sequence) and each.lacking(sequence) is not None
                for each in self._core.workers.values()
                if each.resources
            )

        moving: list[Sequence] = []
        waiting = self._core.queues.waiting.each_where(may_move, 0)
        for _, group in groupby(waiting, key=lambda each: each.prompt_key):
            choices = list(group)
            room = sum(
                num
                for cell, num in rooms.get(choices[0].route, [])
                if self._is_enough(cell, choices[0])
            )
            if len(moving) + len(choices) <= room:
                moving += choices
        if moving:
            self._moved_s = now_s
            self.hand_over(moving)

    def _is_enough(self, cell: Overview, sequence: Sequence) -> bool:
        """True if a worker with our limits and that cell's blocks could start ``sequence`` now and
        run it to its end."""
        prompt_len, num_workers = len(sequence.prompt), max(1, cell.num_workers)
        num_blocks, num_free = cell.num_blocks // num_workers, cell.num_free_blocks // num_workers
        return any(
            fits(replace(each, num_blocks=num_blocks), prompt_len, sequence.params.max_tokens)
            and fits(replace(each, num_blocks=num_free), prompt_len, 0)
            for each in self._core.capacities
        )

    async def hand_over_all(self, within_s: float) -> None:
        """Hands over waiting sequences at once and running ones in turns, one or more at a time to
        end after ``within_s``. Returns once no sequence is left that another cell may have."""
        for num_turns in range(max(1, int(within_s / TURN_S)), 0, -1):
            self.hand_over(self._core.queues)
            running = [
                each
                for worker in self._core.workers.values()
                for each in worker.running.values()
                if self.may_have(each)
            ]
            if not running:
                return
            self.hand_over(running[: ceil(len(running) / num_turns)])
            await asyncio.sleep(TURN_S)


def _with_slots(cells: list[Overview]) -> list[tuple[Overview, int]]:
    """Returns the cells with more slots than sequences, and the part of the free slots that we may
    fill: each of the other cells may fill as large a part."""
    free = [(each, each.num_slots - each.num_running - each.num_waiting) for each in cells]
    return [(each, ceil(num / len(cells))) for each, num in free if num > 0]
