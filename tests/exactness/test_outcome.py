"""Differences of outputs are found, with their place and size."""

import numpy as np
import pytest

from tests.exactness.mesh import Output, Scores
from tests.exactness.outcome import Difference, difference


def output(ids: list[int], *logprobs: float, text: str = "a", finish: str = "stop") -> Output:
    """Each token has its own logprob and the likeliest token's, which is token 9."""
    values = np.array([[each, -0.5] for each in logprobs], np.float32)
    top_ids, ranks = np.full((len(values), 1), 9), np.ones(len(values))
    return Output(ids, text, finish, Scores([values], [top_ids], [ranks]))


def gap(position: int, token: int) -> float:
    return position + token / 100


WANTED = output([5, 6, 7], -1.0, -2.0, -3.0)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (output([5, 6, 7], -1.0, -2.0, -3.0), None),
        (output([5, 6, 7], -1.0, -2.25, -3.5), Difference("logprobs of the output", 1, 0.5)),
        (output([5, 6, 7], -1.0, -2.0), Difference("logprobs of the output", 2, np.inf)),
        (output([5, 8, 9], -1.0, -2.0, -3.0), Difference("ids", 1, 1.08)),
        (output([5, 8, 9], 1.0, -9.0, -9.0), Difference("ids", 1, 2.0)),
        (output([5, 6], -1.0, -2.0), Difference("ids", 2, np.inf)),
        (
            output([5, 6, 7], -1.0, -2.0, -3.0, text="b"),
            Difference("text or finish reason", 3, np.inf),
        ),
        (
            output([5, 6, 7], -1.0, -2.0, -3.0, finish="length"),
            Difference("text or finish reason", 3, np.inf),
        ),
    ],
)
def test_the_first_difference_and_the_largest_size_are_found(
    found: Output, expected: Difference | None
) -> None:
    """After a different token logprobs are not compared."""
    assert difference(found, WANTED, gap) == expected


def test_logprobs_of_the_prompt_and_the_likeliest_tokens_are_compared() -> None:
    found, wanted = output([5], -1.0), output([5], -1.0)
    wanted.prompt_scores = output([], -4.0).scores
    found.prompt_scores = output([], -4.125).scores
    assert difference(found, wanted, gap) == Difference("logprobs of the prompt", 0, 0.125)
    found.prompt_scores = output([], -4.0).scores
    found.prompt_scores.top_ids[0][0] = 8
    assert difference(found, wanted, gap) == Difference("logprobs of the prompt", 0, 0.0)


def test_a_difference_names_its_place() -> None:
    text = "the ids differ from token 4 on, by 0.25"
    assert str(Difference("ids", 4, 0.25)) == text
