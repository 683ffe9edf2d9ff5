"""Rules for every run: for each request, and for a mesh at rest."""

from math import inf

from services.scheduler.service import SchedulerService
from shared.errors import ADAPTER_LOST, QUARANTINED, TOO_MANY_REPLAYS, WORKER_DIED
from shared.link.peer import SILENCE_S
from shared.wire.messages import MEDIA_MINOR
from tests.sim.clients import Choice, Request, job_of
from tests.sim.faults import Faults
from tests.sim.mesh import LOOK_S, STALL_S, Mesh
from tests.sim.virtual_loop import START_S, THREAD_S

BEFORE_S = 15.0
"""For so long after a fault the mesh may refuse what it would serve without it."""
MAX_WAIT_S = max(STALL_S, SILENCE_S) + 1
"""A better worker may hang or be gone, which is known by then."""
AFTER_S, EARLY_S, MAX_READ_S, LASTS_S = 3.0, 1.5, 0.1, 5.0
READY_WAIT_S, MIN_GAP_S = 5.0, 2.0
"""For so long a request waits before it fails, and of that without a mesh that could serve it."""
REASONS = {
    TOO_MANY_REPLAYS: ({"tokenizer", "scheduler"}, 3),
    WORKER_DIED: ({"worker"}, 2),
    QUARANTINED: ({"worker"}, 2),
}
"""Of an error: faults of these services, so many."""
OLD_FOR_IMAGES = ("takes images", "take no images", f"of protocol minor {MEDIA_MINOR}")
"""In errors about services of older versions."""
NO_REASON: tuple[set[str], float] = (set(), inf)


def check_request(request: Request, expected: Request, faults: Faults, mesh: Mesh) -> None:
    """``expected`` is the request when it was alone."""
    assert request.fault is None, f"{request.name}: {request.fault!r}"
    assert request.num_ends == 1, f"{request.name} has {request.num_ends} ends"
    check_time(request, faults, mesh.shape.step_s / THREAD_S)
    if request.error is not None:
        check_error(request, faults, mesh)
    elif not request.has_left:
        for index, (choice, whole) in enumerate(
            zip(request.choices, expected.choices, strict=True)
        ):
            check_choice(f"{request.name}, choice {index}", choice, whole, request)
        if request.aborts_s is None:
            assert request.prompt_ids == expected.prompt_ids


def check_time(request: Request, faults: Faults, pace: float) -> None:
    """A request that no fault was near of ends soon, where a step takes ``pace`` times as long as
    elsewhere."""
    ended_s, since_s = request.ended_s, request.begun_s - AFTER_S
    assert ended_s is not None
    is_near = any(since_s <= each.at_s <= ended_s for each in faults.hits)
    is_early = request.begun_s < START_S + EARLY_S
    if not (is_near or is_early or request.read_s > MAX_READ_S):
        lasted_s = ended_s - request.begun_s
        assert lasted_s < LASTS_S * pace, f"{request.name} lasted {lasted_s:.1f} s"


def check_choice(name: str, choice: Choice, whole: Choice, request: Request) -> None:
    """It is ``whole``, or a part of it that was aborted."""
    if request.aborts_s is not None and choice.reason == "abort None":
        assert whole.text.startswith(choice.text), f"{name}: {choice}, alone {whole}"
        assert whole.ids.startswith(choice.ids), f"{name}: {choice}, alone {whole}"
    else:
        assert choice == whole, f"{name}: {choice}, alone {whole}"


def check_error(request: Request, faults: Faults, mesh: Mesh) -> None:
    error, ended_s = request.error, request.ended_s
    assert error is not None
    assert ended_s is not None
    begun_s = request.begun_s - BEFORE_S
    hits = [each for each in faults.hits if begun_s <= each.at_s <= ended_s]
    gap_s = LOOK_S * sum(request.begun_s <= at_s <= ended_s for at_s in mesh.gaps)
    text = (
        f"{request.name} failed with {error.status} {error.code}: {error}; it had {len(hits)}"
        f" faults, {sum(each.is_loss for each in hits)} losses, and no service for {gap_s:.1f} s"
    )
    if error.status == 429 or error.code == "media_memory_full":
        assert mesh.shape.is_small, text
    elif any(each in error.message for each in OLD_FOR_IMAGES):
        assert any(each.media for each in job_of(request.job_number).prompts), text
        assert any(each.minor is not None for each in mesh.sites), text
    elif error.code == ADAPTER_LOST:
        adapter = job_of(request.job_number).options.adapter
        is_kept = adapter in {each.digest for each in mesh.shape.adapters}
        has_older = any(each.minor is not None for each in mesh.sites)
        assert hits or (faults.hits and (has_older or not is_kept)), text
    elif error.status == 503:
        gap_s += SILENCE_S * any(
            each.is_loss for each in hits
        )  # half of a connection may be left for as long
        has_waited = ended_s - request.begun_s >= READY_WAIT_S and gap_s >= MIN_GAP_S
        assert has_waited or "stops" in error.message, text
    else:
        kinds, num = REASONS.get(error.code, NO_REASON)
        if error.code == WORKER_DIED:
            hits = [each for each in hits if each.over_s > ended_s]
        assert sum(bool(each.kinds & kinds) for each in hits) >= num, text


def check_progress(mesh: Mesh) -> None:
    """No sequence waits for long while a worker of its scheduler has nothing to do."""
    now_s = mesh.loop.now_s
    for host in mesh.live("scheduler"):
        is_idle = host.service is not None and host.free_s <= now_s and lets_wait(host.service)
        host.waits_since_s = min(host.waits_since_s, now_s) if is_idle else inf
        waited_s = now_s - host.waits_since_s
        assert waited_s < MAX_WAIT_S, f"{host.name} lets sequences wait beside an idle worker"


def lets_wait(service: SchedulerService) -> bool:
    workers = service._core.workers
    idle = [each for each in workers.values() if not each.running and not each.in_flight]
    queues = service._core.queues
    runnable = [*queues.waiting, *queues.isolated]
    return any(
        service._workers[each.worker_id].is_ready and any(map(each.fits, runnable)) for each in idle
    )


def left_in(mesh: Mesh) -> list[str]:
    """What is there of requests that have ended."""
    return [
        f"{num} {what} at {host.name}"
        for host in mesh.live()
        for what, num in host.held().items()
        if num
    ]
