"""Images are encoded ahead of the steps that need them, while other steps go on."""

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Condition

import numpy as np
import torch
from prometheus_client import Counter
from torch import Tensor

from services.worker.media.features import Content, FeatureCache, content_of
from shared.process.cores import lower_priority
from shared.wire.messages import Item

ENCODE_SECONDS = Counter("shoal_worker_encode_seconds", "Seconds spent on features of images")
ENCODED_TOKENS = Counter(
    "shoal_worker_encoded_tokens", "Tokens of images whose features were computed"
)


@dataclass(slots=True, eq=False)
class Job:
    """A prompt in a slot: its ``items`` left to compute, and their ``pixels`` by digest. ``end`` is
    the length of the prompt, ``num_ids`` the place of the first item that is not encoded."""

    request: str
    attempt: int
    end: int
    items: list[Item]
    pixels: Mapping[bytes, np.ndarray]
    num_ids: int = 0


def _ignore(*_: object) -> None: ...


class Encoder:
    """Encodes the items of jobs in order, one by one, on a thread of its own with a low priority.
    ``encode`` computes features [num_tokens, size] of pixels [frames, height, width, 3].

    It pauses while the features of open jobs have more than ``max_bytes``. The thread calls
    ``on_encoded`` with request, attempt and ``num_ids`` of a job whose next item is there, and
    ``on_error`` with the error that ends it. While there are other encoders the thread rests, and
    ``on_wanted`` is called when items may wait for them. All other methods are called on the thread
    of the steps, except ``use_others`` to ``take_back``.
    """

    def __init__(
        self, encode: Callable[[np.ndarray], Tensor], max_bytes: int, num_threads: int
    ) -> None:
        self.on_encoded: Callable[[str, int, int], None] = _ignore
        self.on_error: Callable[[Exception], None] = _ignore
        self.on_wanted: Callable[[], None] = _ignore
        self._encode = encode
        self._features = FeatureCache(max_bytes)
        self._changed = Condition()  # guards what follows, and the features
        self._jobs: dict[Job, None] = {}  # in the order of admission
        self._urgent: tuple[Item, np.ndarray] | None = None  # a step waits for it
        self._under_way: set[Content] = set()
        self._is_busy = self._is_closed = self._has_others = False
        self._error: Exception | None = None
        self._thread = ThreadPoolExecutor(1, "encoder")
        num_before = torch.get_num_threads()
        self._thread.submit(_begin_thread, num_threads).result()
        torch.set_num_threads(num_before)  # it is of a thread, but new ones begin with the last one

    def add(self, job: Job) -> None:
        with self._changed:
            job.num_ids = job.items[0].start
            self._jobs[job] = None
            for item in job.items:
                self._features.pin(item)
            self._report(job)
            self._go_on()

    def drop(self, job: Job) -> None:
        """It has left its slot."""
        self.note_computed(job, job.end)

    def note_computed(self, job: Job, num_ids: int) -> None:
        """The features of items among the first ``num_ids`` ids are not needed again."""
        if not job.items or job.items[0].end > num_ids:
            return
        with self._changed:
            for item in job.items:
                if item.end <= num_ids:
                    self._features.unpin(item)
            job.items = [item for item in job.items if item.end > num_ids]
            job.pixels = {item.digest: job.pixels[item.digest] for item in job.items}
            if not job.items:
                del self._jobs[job]
            self._go_on()

    def features(self, job: Job, item: Item) -> Tensor:
        """Waits if it is not encoded yet: it is the next one then. Raises RuntimeError after an
        error of the thread."""
        with self._changed:
            while (found := self._features.find(item)) is None:
                if self._error is not None:  # no error of the step: its prompts are not to blame
                    raise RuntimeError("the encoder of images has failed") from self._error
                self._urgent = item, job.pixels[item.digest]
                self._go_on()
                self._changed.wait()
            self._urgent = None
            return found

    def use_others(self, has_others: bool) -> None:
        with self._changed:
            self._has_others = has_others
            self._go_on()

    def give_away(self) -> tuple[Item, np.ndarray] | None:
        """The next item and its pixels, for another encoder. ``add_features`` or ``take_back``
        follows."""
        with self._changed:
            return self._choose()

    def add_features(self, item: Item, features: Tensor) -> None:
        """Of an item that was given away."""
        self._add(item, features)

    def take_back(self, items: Iterable[Item]) -> None:
        """They were given away, and are not encoded there."""
        with self._changed:
            self._under_way -= {content_of(item) for item in items}
            self._go_on()

    def close(self) -> None:
        """The item under way is the last one."""
        self._is_closed = True

    def _go_on(self) -> None:
        if self._has_others:
            self.on_wanted()
        elif not self._is_busy:
            self._is_busy = True
            self._thread.submit(self._run)

    def _run(self) -> None:
        """On the thread, until nothing is left to do."""
        try:
            while (found := self._next()) is not None:
                item, pixels = found
                self._add(item, self._timed(item, pixels))
        except Exception as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
            self.on_error(error)

    def _next(self) -> tuple[Item, np.ndarray] | None:
        with self._changed:
            found = None if self._has_others else self._choose()
            self._is_busy = found is not None
            return found

    def _choose(self) -> tuple[Item, np.ndarray] | None:
        """The next item, which is under way from now on."""
        found = self._urgent
        if found is None or not self._is_missing(found[0]):
            found = self._first_missing()
        if found is not None:
            self._under_way.add(content_of(found[0]))
        return found

    def _is_missing(self, item: Item) -> bool:
        return item not in self._features and content_of(item) not in self._under_way

    def _first_missing(self) -> tuple[Item, np.ndarray] | None:
        if self._is_closed or self._features.is_overfull:
            return None
        missing = (
            (item, job.pixels[item.digest])
            for job in self._jobs
            for item in job.items
            if self._is_missing(item)
        )
        return next(missing, None)

    def _timed(self, item: Item, pixels: np.ndarray) -> Tensor:
        started_s = time.perf_counter()
        features = self._encode(pixels.reshape(*item.size, 3))
        ENCODE_SECONDS.inc(time.perf_counter() - started_s)
        ENCODED_TOKENS.inc(item.num_tokens)
        return features

    def _add(self, item: Item, features: Tensor) -> None:
        with self._changed:
            self._under_way.discard(content_of(item))
            self._features.add(item, features)
            for job in self._jobs:
                self._report(job)
            self._changed.notify_all()

    def _report(self, job: Job) -> None:
        """Under the lock, so that reports are in order."""
        missing = (item.start for item in job.items if item not in self._features)
        num_ids = next(missing, job.end)
        if num_ids > job.num_ids:
            job.num_ids = num_ids
            self.on_encoded(job.request, job.attempt, num_ids)


class RemoteEncoder:
    """The first rank's encoder on another rank: features are zeros until it shares its own."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._zeros = torch.zeros(1, size, device=device)

    def add(self, job: Job) -> None: ...

    def drop(self, job: Job) -> None: ...

    def note_computed(self, job: Job, num_ids: int) -> None: ...

    def features(self, job: Job, item: Item) -> Tensor:
        """[num_tokens, size]"""
        return self._zeros.expand(item.num_tokens, -1)


def _begin_thread(num_threads: int) -> None:
    lower_priority()
    torch.get_num_threads()  # at its first use a thread takes the number that was set last
    torch.set_num_threads(num_threads)
