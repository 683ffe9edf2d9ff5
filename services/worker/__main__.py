from services.worker.engine.protocol import Engine
from services.worker.service import WorkerService
from services.worker.weights.progress import Progress
from shared.config.worker import WorkerConfig
from shared.service import main


def build(config: WorkerConfig, progress: Progress) -> Engine:
    """Imports torch, which takes seconds, on the step thread: the admin port is up by then."""
    from services.worker.engine.build import build_engine

    return build_engine(config, progress)


if __name__ == "__main__":
    main("worker", WorkerConfig, lambda config: WorkerService(config, build))
