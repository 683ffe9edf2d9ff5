"""Checkpoints that have the tensors of all experts of a layer in one, as gpt-oss and Qwen3.5 do."""

import re
from typing import NamedTuple

from torch import Tensor

from services.worker.config.model_config import ModelConfig
from services.worker.weights.checkpoint import Checkpoint, TensorSource

OUR_NAME = re.compile(
    r"(?P<experts>.+\.experts)\.(?P<expert>\d+)\.(?P<part>gate|up|down)_proj\.(?P<kind>\w+)"
)


class Stacks(NamedTuple):
    """Gates and ups take turns, or gates come first; weights are [experts, inputs, outputs], or the
    reverse."""

    takes_turns: bool
    has_inputs_first: bool

    def outputs(self, part: str, num: int) -> slice:
        """The place of ``part`` among ``num`` outputs."""
        if part == "down":
            return slice(None)
        is_second = part == "up"
        if self.takes_turns:
            return slice(int(is_second), None, 2)
        return slice(num // 2, None) if is_second else slice(num // 2)


GPT_OSS = Stacks(takes_turns=True, has_inputs_first=True)
QWEN3_5 = Stacks(takes_turns=False, has_inputs_first=False)
QWEN3_VL = Stacks(takes_turns=False, has_inputs_first=True)  # as published; transformers' differ
FAMILIES = {
    "Ernie4_5_VLMoeForConditionalGeneration": QWEN3_5,
    "GptOssForCausalLM": GPT_OSS,
    "GraniteMoeHybridForCausalLM": QWEN3_5,
    "Qwen3VLMoeForConditionalGeneration": QWEN3_VL,
    "Qwen3_5MoeForCausalLM": QWEN3_5,
    "Qwen3_5MoeForConditionalGeneration": QWEN3_5,
}


class StackedExperts(Checkpoint):
    """A view of ``checkpoint`` with one tensor per expert, by our names, instead of
    ``experts.gate_up_proj`` and ``experts.down_proj`` of all. Tensors next to a weight are
    [experts, outputs, …] and end with ``_bias``, ``_blocks`` or ``_scales``. An expert's own
    tensors remain."""

    def __init__(self, checkpoint: Checkpoint, stacks: Stacks) -> None:
        super().__init__(checkpoint.folder, checkpoint.tensors)
        self._checkpoint = checkpoint
        self._stacks = stacks

    def source(self, name: str) -> TensorSource:
        found, own = OUR_NAME.fullmatch(name), self._checkpoint.source(name)
        if found is None or own.name in self.tensors:
            return own
        expert, kind, part = int(found["expert"]), found["kind"], found["part"]
        stack = "down_proj" if part == "down" else "gate_up_proj"
        is_turned = kind == "weight" and self._stacks.has_inputs_first

        def take(whole: Tensor) -> Tensor:
            one = whole[expert].T if is_turned else whole[expert]
            return one[self._stacks.outputs(part, len(one))]

        suffix = "" if kind == "weight" else f"_{kind}"
        return TensorSource(
            self._checkpoint.source(f"{found['experts']}.{stack}{suffix}").name, take
        )


def with_experts(checkpoint: Checkpoint, config: ModelConfig) -> Checkpoint:
    """``checkpoint`` with each expert's tensors by our names, if its family has others."""
    for name in config.architectures:
        if stacks := FAMILIES.get(name):
            if stacks is QWEN3_VL and not _has_inputs_first(checkpoint, config.hidden_size):
                stacks = QWEN3_5
            return StackedExperts(checkpoint, stacks)
    return checkpoint


def _has_inputs_first(checkpoint: Checkpoint, hidden_size: int) -> bool:
    """By both stacks: another size of one of them may be ``hidden_size`` too."""
    tensors, dims = checkpoint.tensors.items(), {"gate_up_proj": -2, "down_proj": -1}
    found = ((each, dims.get(name.rpartition("experts.")[2])) for name, each in tensors)
    return all(each.shape[dim] == hidden_size for each, dim in found if dim is not None)
