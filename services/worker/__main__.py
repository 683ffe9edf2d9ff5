from services.worker.progress import Progress
from services.worker.service import Engine, WorkerService
from shared.config import WorkerConfig
from shared.service import main


def build_engine(config: WorkerConfig, progress: Progress) -> Engine:
    """Imports torch, which takes seconds, on the step thread: the admin port is up by then."""
    from services.worker.engine import Engine

    return Engine(config, progress)


if __name__ == "__main__":
    main("worker", WorkerConfig, lambda config: WorkerService(config, build_engine))
