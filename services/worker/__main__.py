import gc

from services.worker.engine.protocol import Engine
from services.worker.service import RANKS, ROLES, WorkerService
from services.worker.weights.progress import Progress
from shared.process.service import Service, main
from shared.settings.worker import WorkerConfig


def build(config: WorkerConfig, progress: Progress) -> Engine:
    """Imports torch, which takes seconds, on the step thread: the admin port is up by then. Garbage
    collection of the many new objects would add a sixth."""
    gc.disable()
    try:
        from services.worker.engine.build import build_engine
    finally:
        gc.enable()
    return build_engine(config, progress)


def service_of(config: WorkerConfig) -> Service:
    """A worker's first rank, a rank led by another process, or the service of a role."""
    of_role = next(filter(None, (make(config) for make in ROLES)), None)
    return of_role or RANKS[0].follower(config, build) or WorkerService(config, build)


if __name__ == "__main__":
    main("worker", WorkerConfig, service_of)
