"""A tokenizer of a model that marks its reasoning and its calls."""

import numpy as np

from shared.wire.messages import Accepted, Delta, Deltas, Mark, OutputStart, TokenRun
from shared.wire.token_arrays import TokenArrays
from tests.services.gateway.asking import CALLER
from tests.services.gateway.fakes import PROMPT_IDS, Submitted

MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
FIRST_MARKER = CALLER.vocab_size - len(MARKERS)
CALL = [
    "<tool_call>",
    '\n{"name": "weather", "arguments": ',
    '{"city": "Ulm"}',
    "}\n",
    "</tool_call>",
]
REPLY = ["Hm", "</think>", "\n\nSo:\n", *CALL, "\n", *CALL]


def accept(request: Submitted, start: OutputStart = OutputStart.REASONING) -> None:
    request.peer.send(Accepted(*request.key, start), np.array(PROMPT_IDS, np.int32))


def say(request: Submitted, *pieces: str, choice: int = 0, before: int = 0) -> None:
    """One token for each piece; ``before`` counts those of ``REPLY`` that were sent in other
    attempts."""
    position = sum(map(len, REPLY[:before]))
    for number, piece in enumerate(pieces, before):
        token_id = FIRST_MARKER + MARKERS.index(piece) if piece in MARKERS else 20
        marks = [Mark(position, len(piece), number, token_id)] if piece in MARKERS else []
        row = Delta(*request.key, choice, number, TokenRun(1), piece, marks=marks)
        request.peer.send(Deltas([row], []), *TokenArrays(np.array([token_id], np.int32)))
        request.num_sent[choice] = number + 1
        position += len(piece)
