"""Makes the message for one tokenizer of what a step brought."""

from services.scheduler.emission import Emission
from shared.messages import Finished, TokenRow, Tokens
from shared.token_arrays import Layout, Selection, TokenArrays


def tokens_of(emissions: list[Emission], layout: Layout) -> tuple[Tokens, TokenArrays]:
    """Returns the message for the tokenizer of ``emissions`` and its buffers, which are views where
    the rows lie together."""
    rows = [_row(emission) for emission in emissions]
    ends = [(each.sequence, reason) for each in emissions if (reason := each.row.finish)]
    finished = [
        Finished(each.request, each.attempt, each.choice, reason, len(each.emitted))
        for each, reason in ends
    ]
    selection = Selection(layout)
    for emission in emissions:
        selection.add(emission.index)
    return Tokens(rows, finished), selection.arrays()


def _row(emission: Emission) -> TokenRow:
    sequence = emission.sequence
    return TokenRow(
        sequence.request, sequence.attempt, emission.position, emission.row.run, sequence.num_cached
    )
