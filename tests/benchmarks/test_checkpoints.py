"""The bytes of a step in ``benchmarks/peers.py``, compared with the models themselves."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.checkpoints import SHAPES, bytes_read, config_of


@pytest.mark.parametrize("name", SHAPES)
def test_a_step_of_many_rows_reads_every_matrix_once(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(name))
    numbers = sum(
        each.numel()
        for part, each in model.named_parameters()  # the embeddings are also the head
        if each.ndim > 1 and not part.endswith("mlp.gate.weight")
    )
    of_rows = [bytes_read(name, num, num_cached=0, bits=16) for num in (1000, 2000)]
    of_states = of_rows[1] - of_rows[0]
    assert of_rows[0] - of_states == pytest.approx(2 * numbers, rel=1e-9)


def test_a_token_of_the_mixture_reads_as_much_as_one_of_the_dense_model() -> None:
    read = [bytes_read(name, 1, num_cached=160, bits=16) for name in ("medium", "moe")]
    assert read[0] == read[1]
