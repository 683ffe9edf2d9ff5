"""The devices as a worker finds them, in a process of their own: torch takes seconds to import."""

import json
from typing import Any

import torch

from services.worker.machine.hardware import choose_dtype, read_memory


def main() -> None:
    """Prints one object."""
    cpu = torch.device("cpu")
    print(
        json.dumps(
            {
                "torch": torch.__version__,
                "cuda": torch.version.cuda,
                "dtype": str(choose_dtype("auto", cpu)).removeprefix("torch."),
                "free_bytes": read_memory(cpu).free,
                "gpus": [_gpu(index) for index in range(torch.cuda.device_count())],
            }
        )
    )


def _gpu(index: int) -> dict[str, Any]:
    major, minor = torch.cuda.get_device_capability(index)
    return {
        "name": torch.cuda.get_device_name(index),
        "capability": [major, minor],
        "free_bytes": read_memory(torch.device("cuda", index)).free,
    }


if __name__ == "__main__":
    main()
