"""The sizes that memory is planned by, whoever computes the model."""

from dataclasses import dataclass

from services.worker.config.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class ModelShape:
    """``numbers_per_token``: how many numbers of a token exist at once within a layer, at most."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_key_value_heads: int
    head_dim: int
    numbers_per_token: int


def shape_of(config: ModelConfig) -> ModelShape:
    """Returns the shape of one of our own architectures.

    A layer holds its input, the sum that goes on, its norm and its rotation; and then the heads
    with what rotating them takes, or the two products of the feed-forward network with theirs.
    """
    heads = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    always = 3 * config.hidden_size + 2 * config.head_dim
    return ModelShape(
        config.vocab_size,
        config.hidden_size,
        config.num_hidden_layers,
        config.num_key_value_heads,
        config.head_dim,
        always + max(5 * heads, 4 * config.intermediate_size),
    )
