"""Features of images that are added to states behind the first layers (DeepStack, arXiv
2406.04334)."""

from torch import nn

from services.worker.layers.ops import Ops, X
from services.worker.layers.stage import Stage
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
    marks."""
    layers = model.model.layers
    if not model.parallel.stage.is_first:
        model.num_embeddings = 1 + marks if marks else 0
        return
    model.num_embeddings = num + marks
    for number in range(1, min(num, 1 + len(layers))):
        layers.insert(2 * number - 1, AddFeatures(number))


def check_first_stage(num_stages: int, num_layers: int, num: int) -> None:
    """Raises ConfigError if the first stage lacks some of the layers behind which all but the first
    of ``num`` embeddings are added."""
    num_adding = min(num - 1, num_layers)
    if num_adding > len(Stage(0, num_stages).layers(num_layers)):
        most = (num_layers - 1) // (num_adding - 1)
        raise ConfigError(
            f"pipeline-parallel-size: {num_stages}: the first stage needs the {num_adding} layers"
            f" behind which the model adds features of images: 1 to {most} would work, or"
            " language-model-only"
        )
