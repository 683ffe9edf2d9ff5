import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cli.bench.divergence import compare, summary


def logprobs_of(tokens: list[int], probabilities: list[list[float]]) -> np.ndarray:
    values = np.log(np.array(probabilities, np.float32))
    return np.concatenate([values[range(len(tokens)), tokens, None], values], 1)


def test_a_known_distribution_has_the_known_figures():
    """0.5 ln 4 + 0.25 ln 2 − 0.25 ln 3 nats of the first token, 0 of the second; 3 bits and
    1 bit."""
    reference = logprobs_of([0, 1], [[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]])
    found = logprobs_of([0, 1], [[0.125, 0.125, 0.75], [0.25, 0.5, 0.25]])
    figures = summary([compare(reference, found)], num_bytes=6)
    assert figures["bits_per_byte"] == pytest.approx(4 / 6)
    assert figures["kl_divergence"] == pytest.approx((5 * np.log(2) - np.log(3)) / 4 / 2)
    assert figures["same_first_choice"] == 0.5
    of_reference = summary([compare(reference, reference)], num_bytes=6)
    assert of_reference == {
        "bits_per_byte": pytest.approx(2 / 6),
        "kl_divergence": 0,
        "same_first_choice": 1,
    }


@given(st.integers(0, 2**32 - 1), st.integers(1, 20), st.integers(2, 300))
def test_the_divergence_is_torchs(seed: int, num_tokens: int, vocab_size: int):
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(3 * rng.standard_normal((2, num_tokens, vocab_size)))
    tokens = rng.integers(0, vocab_size, num_tokens).tolist()
    wanted, got = logits.log_softmax(-1)
    reference, found = (logprobs_of(tokens, each.exp().tolist()) for each in (wanted, got))
    expected = torch.nn.functional.kl_div(got, wanted, log_target=True, reduction="batchmean")
    figures = summary([compare(reference, found)], num_bytes=1)
    assert figures["kl_divergence"] == pytest.approx(float(expected), rel=1e-4, abs=1e-6)
    assert figures["same_first_choice"] == (wanted.argmax(1) == got.argmax(1)).double().mean()


def test_tokens_of_all_pieces_count_alike():
    same = logprobs_of([0] * 3, [[0.5, 0.5]] * 3)
    other = logprobs_of([0], [[0.5, 0.5]]), logprobs_of([0], [[0.2, 0.8]])
    one, both = compare(*other), summary([compare(same, same), compare(*other)], num_bytes=4)
    assert both["kl_divergence"] == pytest.approx(one.divergences[0] / 4)
    assert both["same_first_choice"] == 0.75
