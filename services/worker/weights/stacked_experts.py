"""Checkpoints that have the tensors of all experts of a layer in one, as gpt-oss has them."""

import re

from torch import Tensor

from services.worker.config.model_config import ModelConfig
from services.worker.weights.checkpoint import Checkpoint, TensorSource

FAMILIES = {"GptOssForCausalLM"}
OUR_NAME = re.compile(
    r"(?P<experts>.+\.experts)\.(?P<expert>\d+)\.(?P<part>gate|up|down)_proj\.(?P<kind>\w+)"
)
# Gates and ups take turns.
STACKS = {
    "gate": ("gate_up_proj", slice(0, None, 2)),
    "up": ("gate_up_proj", slice(1, None, 2)),
    "down": ("down_proj", slice(None)),
}


class StackedExperts(Checkpoint):
    """A view of ``checkpoint`` with one tensor per expert, by our names, instead of
    ``experts.gate_up_proj`` [experts, inputs, outputs]. The other tensors are
    [experts, outputs, …] and end with ``_bias``, ``_blocks`` or ``_scales``."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint.folder, checkpoint.tensors)
        self._checkpoint = checkpoint

    def source(self, name: str) -> TensorSource:
        found = OUR_NAME.fullmatch(name)
        if found is None:
            return self._checkpoint.source(name)
        expert, kind = int(found["expert"]), found["kind"]
        stack, outputs = STACKS[found["part"]]

        def take(whole: Tensor) -> Tensor:
            one = whole[expert]
            return (one.T if kind == "weight" else one)[outputs]

        suffix = "" if kind == "weight" else f"_{kind}"
        return TensorSource(
            self._checkpoint.source(f"{found['experts']}.{stack}{suffix}").name, take
        )


def with_experts(checkpoint: Checkpoint, config: ModelConfig) -> Checkpoint:
    """``checkpoint`` with each expert's tensors by our names, if its family has others."""
    return checkpoint if FAMILIES.isdisjoint(config.architectures) else StackedExperts(checkpoint)
