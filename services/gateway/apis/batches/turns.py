"""Which batches start, and in which order. Pure."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from services.gateway.apis.batches.folder import BatchKey

MAX_RUNNING = 4
"""Of all keys; a key always has one."""


def start(
    waiting: Mapping[BatchKey, int],
    running: Iterable[BatchKey],
    try_start: Callable[[BatchKey], bool],
) -> None:
    """Starts batches of ``waiting``, which has the time of creation of each: a key's oldest first,
    and keys with the fewest that run before others."""
    num_running = Counter(each.owner for each in running)
    queues: dict[str, list[BatchKey]] = {}
    for key in sorted(waiting, key=lambda key: (waiting[key], key), reverse=True):
        queues.setdefault(key.owner, []).append(key)
    while queues:
        owner = min(queues, key=lambda each: (num_running[each], waiting[queues[each][-1]]))
        if num_running[owner] and num_running.total() >= MAX_RUNNING:
            return
        if try_start(queues[owner].pop()):
            num_running[owner] += 1
        if not queues[owner]:
            del queues[owner]
