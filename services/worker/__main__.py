import gc

from services.worker.engine.protocol import Engine
from services.worker.service import ENCODERS, RANKS, WorkerService
from services.worker.weights.progress import Progress
from shared.errors import ConfigError
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
    """A worker's first rank, a rank led by another process, or an encoder. Raises ConfigError."""
    if config.worker_role != "encoder":
        return RANKS[0].follower(config, build) or WorkerService(config, build)
    if not ENCODERS:
        raise ConfigError("worker-role: encoder: images are not a part of this installation")
    return ENCODERS[0](config)


if __name__ == "__main__":
    main("worker", WorkerConfig, service_of)
