"""A real worker that one token kills: ``python -m tests.mesh.poisoned_worker``.

It ends in the middle of a step that computes a sequence which knows the id that TEST_POISON
names.
"""

import os

from torch import Tensor

from services.worker.engine.host import HostEngine
from services.worker.service import WorkerService
from services.worker.step.batch import Batch
from services.worker.weights.progress import Progress
from shared.process.service import main
from shared.settings.worker import WorkerConfig

POISON = int(os.environ.get("TEST_POISON", "-1"))


class PoisonedEngine(HostEngine):
    def _forward(self, batch: Batch) -> Tensor:
        for slot in batch.slots:
            if POISON in self._slots.ids[slot, : self._slots.num_tokens[slot]]:
                os._exit(9)
        return super()._forward(batch)


def build(config: WorkerConfig, progress: Progress) -> PoisonedEngine:
    return PoisonedEngine(config, progress)


if __name__ == "__main__":
    main("worker", WorkerConfig, lambda config: WorkerService(config, build))
