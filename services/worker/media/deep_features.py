"""Features of images that are added to states behind the first layers (DeepStack, arXiv
2406.04334)."""

from torch import nn

from services.worker.layers.ops import Ops, X
from services.worker.models.decoder import DecoderLM


class AddFeatures(nn.Module):
    """A layer that adds an input of the pass. A pass from ids has none."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, ops: Ops[X], x: X) -> X:
        return ops.add_input(x, self.number)


def take_embeddings(model: DecoderLM, num: int, *, marks: bool) -> None:
    """Prepares ``model`` for passes from ``num`` embeddings of a token, and ``marks`` of images:
    its first layers are followed by layers that add an embedding each."""
    model.num_embeddings, layers = num + marks, model.model.layers
    for number in range(1, min(num, 1 + len(layers))):
        layers.insert(2 * number - 1, AddFeatures(number))
