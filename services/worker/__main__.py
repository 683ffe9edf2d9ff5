import gc

from services.worker.engine.protocol import Engine
from services.worker.follower import FollowerService
from services.worker.service import WorkerService
from services.worker.weights.progress import Progress
from shared.process.service import Service, main
from shared.settings.worker import WorkerConfig


def build(config: WorkerConfig, progress: Progress) -> Engine:
    """Imports torch, which takes seconds, on the step thread: the admin port is up by then. It
    would take a sixth longer if its many new objects were searched for garbage."""
    gc.disable()
    try:
        from services.worker.engine.build import build_engine
    finally:
        gc.enable()
    return build_engine(config, progress)


def service_of(config: WorkerConfig) -> Service:
    """A worker, or one of its ranks that another process leads."""
    service = FollowerService if config.leader or config.node_rank else WorkerService
    return service(config, build)


if __name__ == "__main__":
    main("worker", WorkerConfig, service_of)
