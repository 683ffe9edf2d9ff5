"""Messages between a tokenizer and a scheduler: ids go down, tokens come up."""

from typing import Annotated

from msgspec import Meta, Raw

from shared.wire.messages.media import Items
from shared.wire.messages.ranges import EMPTY_ROW, MAX_CHOICES, Int32, Name, Priority, Row
from shared.wire.messages.rows import Finished, SamplingParams, SpanReport, TokenRun


class NewSequence(Row, frozen=True):
    """A choice of a prompt, with its name as a sequence. ``num_emitted`` counts its ids in the
    Generate's second buffer; ``num_prompt_scored``: as in ChoiceStart."""

    request: Name
    choice: Int32 = 0
    num_emitted: Int32 = 0
    num_prompt_scored: Int32 = 0


class Generate(Row, tag=11, frozen=True):
    """Tokenizer → scheduler: a prompt and its choices, accepted or refused together. Buffers: int32
    ids of the prompt; int32 ids its sequences emitted in earlier attempts.

    Choice 0 alone has the logprobs of the prompt. ``options`` and the ``old_`` fields: as in
    Submit. Further buffers: the pixels of each different digest in ``items``, in their order.
    """

    request: Name
    attempt: Int32
    params: SamplingParams
    sequences: Annotated[list[NewSequence], Meta(min_length=1, max_length=MAX_CHOICES)]
    old_priority: Priority = 0
    old_salt: Name = ""
    old_is_traced: bool = False
    old_num_worker_deaths: Int32 = 0
    old_owner: Name = ""
    options: Raw = EMPTY_ROW
    items: Items = []


class TokenRow(Row, frozen=True):
    """Tokens of a sequence from ``position`` on, in its output, or in its prompt for prompt tokens;
    drafts are for the tokens from ``position`` on. ``num_cached`` ids of the prompt came from the
    prefix cache."""

    request: Name
    attempt: Int32
    position: Int32
    run: TokenRun
    num_cached: Int32 = 0


class Tokens(Row, tag=21, frozen=True):
    """Scheduler → tokenizer, one per peer and step; requests are named as sequences.

    Buffers, of all rows, concatenated: int32 ids; float32 logprobs; int32 ids of the most likely
    tokens; int32 ranks of the tokens (1: the most likely), for rows with values.
    """

    rows: list[TokenRow]
    finished: list[Finished]
    spans: list[SpanReport] = []
