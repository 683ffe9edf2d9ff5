import gc

from services.worker.engine.protocol import Engine
from services.worker.service import WorkerService
from services.worker.weights.progress import Progress
from shared.config.worker import WorkerConfig
from shared.service import main


def build(config: WorkerConfig, progress: Progress) -> Engine:
    """Imports torch, which takes seconds, on the step thread: the admin port is up by then. It
    would take a sixth longer if its many new objects were searched for garbage."""
    gc.disable()
    try:
        from services.worker.engine.build import build_engine
    finally:
        gc.enable()
    return build_engine(config, progress)


if __name__ == "__main__":
    main("worker", WorkerConfig, lambda config: WorkerService(config, build))
