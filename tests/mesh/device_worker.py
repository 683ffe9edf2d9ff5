"""A real worker with the engine for GPUs, on a CPU: ``python -m tests.mesh.device_worker``."""

from services.worker.engine.device.engine import DeviceEngine
from services.worker.service import WorkerService
from shared.process.service import main
from shared.settings.worker import WorkerConfig

if __name__ == "__main__":
    main("worker", WorkerConfig, lambda config: WorkerService(config, DeviceEngine))
