"""The images of a worker as its schedulers see them."""

import asyncio
from collections.abc import Sequence
from functools import partial

from services.worker.extension import WorkerCore, WorkerExtension
from services.worker.media.addition import Media
from services.worker.media.item_check import check_items, check_pixels
from services.worker.step_thread import call_soon, raise_soon
from shared.errors import CodecError
from shared.media.family import WITH_ARTICLE
from shared.wire.codec import Array
from shared.wire.messages import MEDIA_MINOR, Encoded, Item, StepPlan


class WorkerMedia(WorkerExtension):
    """Checks the images of plans, and tells their scheduler when they are encoded."""

    def __init__(self, core: WorkerCore) -> None:
        self._core = core
        found = [each for each in core.engine.additions if isinstance(each, Media)]
        self._media = found[0] if found else None
        self._of_slots: dict[int, tuple[str, int]] = {}  # request and attempt
        if self._media is not None:
            loop = asyncio.get_running_loop()
            self._media.encoder.on_encoded = partial(call_soon, loop, self._report)
            self._media.encoder.on_error = partial(raise_soon, loop)

    def check(self, plan: StepPlan, pixels: Sequence[Array]) -> None:
        check_pixels(plan, pixels)
        for slot in plan.release:
            self._of_slots.pop(slot, None)
        for row in plan.admit:
            capacity = self._core.engine.capacity
            check_items(row, capacity.all_media)
            for item in row.items:
                if self._num_tokens(item) != item.num_tokens:
                    raise CodecError(
                        f"slot {row.slot} has {item.num_tokens} tokens of"
                        f" {WITH_ARTICLE[item.kind]} of the size {item.size}"
                    )
            if row.items:
                self._of_slots[row.slot] = row.request, row.attempt

    def clear(self) -> None:
        self._of_slots.clear()

    def close(self) -> None:
        if self._media is not None:
            self._media.encoder.close()

    def _report(self, request: str, attempt: int, num_ids: int) -> None:
        """Its scheduler may be lost meanwhile."""
        home = self._core.home()
        is_open = (request, attempt) in self._of_slots.values()
        if is_open and home is not None and home.hello.minor >= MEDIA_MINOR:
            home.send(Encoded(request, attempt, num_ids))

    def _num_tokens(self, item: Item) -> int:
        """0 for a size that no item of the kind has."""
        assert self._media is not None, "plans with items are for workers with images"
        family, wanted = self._media.family, 1
        if family.videos is not None and item.kind == "video":
            wanted = family.videos.group
        if family.videos is not None and item.size[0] != wanted:
            return 0
        try:
            return family.num_tokens(item.size)
        except ValueError:
            return 0
