"""What must hold of every run: of each request, and of a mesh at rest."""

from typing import Any

from shared.errors import QUARANTINED, TOO_MANY_REPLAYS, WORKER_DIED
from tests.sim.clients import Choice, Request
from tests.sim.faults import Faults
from tests.sim.mesh import LOOK_S, Host, Mesh

BEFORE_S = 15.0
"""For so long after a fault the mesh may refuse what it would serve without it."""
MIN_GAP_S = 3.0
"""A request waits at least so long for service before it fails."""
MIN_FAULTS = {TOO_MANY_REPLAYS: 3, WORKER_DIED: 2, QUARANTINED: 2}


def check_request(request: Request, expected: Request, faults: Faults, mesh: Mesh) -> None:
    """``expected`` is the request when it was alone."""
    assert request.fault is None, f"{request.name}: {request.fault!r}"
    assert request.num_ends == 1, f"{request.name} has {request.num_ends} ends"
    if request.error is not None:
        check_error(request, faults, mesh)
    elif not request.has_left:
        for index, (choice, whole) in enumerate(
            zip(request.choices, expected.choices, strict=True)
        ):
            check_choice(f"{request.name}, choice {index}", choice, whole, request)
        if request.aborts_s is None:
            assert request.prompt_ids == expected.prompt_ids


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
    hits = [is_loss for at_s, is_loss in faults.hits if request.begun_s - BEFORE_S <= at_s]
    gap_s = LOOK_S * sum(request.begun_s <= at_s <= ended_s for at_s in mesh.gaps)
    text = (
        f"{request.name} failed with {error.status} {error.code}: {error}; it had {len(hits)}"
        f" faults, {sum(hits)} losses, and no service for {gap_s:.1f} s"
    )
    if error.status == 429:
        assert mesh.shape.is_small, text
    elif error.status == 503:
        assert gap_s >= MIN_GAP_S or "stops" in error.message, text
    else:
        assert len(hits) >= MIN_FAULTS.get(error.code, 1000), text
        assert any(hits), text


def left_in(mesh: Mesh) -> list[str]:
    """What is there of requests that have ended."""
    return [
        f"{num} {what} at {host.name}"
        for host in mesh.live()
        if host.service is not None
        for what, num in left_at(host).items()
        if num
    ]


def left_at(host: Host) -> dict[str, Any]:
    service = host.service
    match host.kind:
        case "gateway":
            tokenizers = list(service._mesh.tokenizers)
            return {
                "prompts": sum(len(each.prompts) for each in tokenizers),
                "lost prompts": len(list(service._mesh._lost)),
                "bytes": service._admission._num_bytes,
                "requests": service._admission.num_open,
            }
        case "tokenizer":
            if (requests := service._requests) is None:
                return {}
            lanes = service._lanes
            return {
                "requests": len(requests),
                "grants": len(requests._credits._grants),
                "sequences": sum(each.num for each in service._schedulers._ours.values()),
                "threads": sum(lane._slots._held.total() for lane in (lanes._short, lanes._long)),
            }
        case "scheduler":
            core = service._core
            pools = [each.pool for each in core.workers.values()]
            return {
                "sequences": len(core.sequences),
                "waiting": len(list(core.queues)),
                "running": sum(len(each.running) for each in core.workers.values()),
                "plans": sum(len(each.in_flight) for each in core.workers.values()),
                "blocks": sum(each.num_blocks - each.num_free for each in pools),
                "tokens": sum(len(each._held) for each in service._routes.values()),
            }
        case "worker":
            return {"steps": service._num_pending, "sequences": service._load}
