"""Features of images that are added to states behind the first layers (DeepStack, arXiv
2406.04334)."""

from dataclasses import replace

from torch import nn

from services.worker.layers.ops import Ops, X
from services.worker.models.decoder import DecoderLM
from shared.errors import ConfigError


class AddFeatures(nn.Module):
    """A layer that adds an input of the pass. A pass from ids has none."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, ops: Ops[X], x: X) -> X:
        return ops.add_input(x, self.number)


def take_embeddings(model: DecoderLM, num: int, *, marks: bool) -> None:
    """Prepares ``model`` for passes from ``num`` embeddings of a token, and ``marks`` of images:
    its first layers are followed by layers that add an embedding each. Later stages take states and
    marks. Raises ConfigError if the first stage lacks some of these layers."""
    stage, layers = model.parallel.stage, model.model.layers
    num_adding = min(num - 1, len(layers))
    if num_adding > len(replace(stage, number=0).layers(len(layers))):
        most = (len(layers) - 1) // (num_adding - 1)
        raise ConfigError(
            f"pipeline-parallel-size: {stage.num}: the first stage needs the {num_adding} layers"
            f" behind which the model adds features of images: 1 to {most} would work, or"
            " language-model-only"
        )
    if not stage.is_first:
        model.num_embeddings = 1 + marks if marks else 0
        return
    model.num_embeddings = num + marks
    for number in range(1, 1 + num_adding):
        layers.insert(2 * number - 1, AddFeatures(number))
