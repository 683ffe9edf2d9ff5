"""A real worker that encodes no image while there is a file ``hold`` in the folder that TEST_HOLD
names: ``python -m tests.mesh.held_worker``. The file ``begun`` shows that it would."""

import os
import time
from pathlib import Path

import numpy as np
from torch import Tensor

from services.worker.__main__ import service_of
from services.worker.media.tower import Tower
from shared.process.service import main
from shared.settings.worker import WorkerConfig

LOOK_S = 0.005

if __name__ == "__main__":
    folder, encode = Path(os.environ["TEST_HOLD"]), Tower.features

    def features(tower: Tower, pixels: np.ndarray) -> Tensor:
        (folder / "begun").touch()
        while (folder / "hold").exists():
            time.sleep(LOOK_S)
        return encode(tower, pixels)

    Tower.features = features  # type: ignore[assignment,method-assign]
    main("worker", WorkerConfig, service_of)
