import os

from services.worker.service import WorkerService
from shared.config import WorkerConfig
from shared.service import main

if __name__ == "__main__":
    # Idle OpenMP threads sleep: the other services share these cores. Read when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    main("worker", WorkerConfig, WorkerService)
