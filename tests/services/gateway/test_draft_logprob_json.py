"""Drafts as JSON, also merged over several steps."""

import json
from typing import Any

import numpy as np

from services.gateway.chat.replies.logprob_json import PIECE_ENTRIES, DraftLogprobs
from services.gateway.mesh.output_collector import NO_DRAFTS, Drafts, drafts_of, joined
from shared.wire.messages import MIN_LOGPROB, Delta, RunKind, TokenRun
from shared.wire.token_arrays import TokenArrays
from tests.services.gateway.test_logprob_json import table


def drafts(position: int, ids: list[int], num_accepted: int) -> Drafts:
    """Drafts with ranks and logprobs derived from their ids."""
    row = Delta(
        "a", 1, 0, position, TokenRun(len(ids), 1, kind=RunKind.DRAFTS, num_accepted=num_accepted)
    )
    numbers = np.array(ids, np.int32)
    values = numbers.astype(np.float32) / -8
    return drafts_of(row, TokenArrays(numbers, values, numbers[:0], numbers + 1))


def written(*several: Drafts, by_id: bool = False) -> Any:
    writer = DraftLogprobs(table(100).spelling(by_id))
    return json.loads(b"".join(writer.write(several)))


def test_a_draft_has_token_logprob_rank_whether_it_was_accepted_and_position() -> None:
    assert written(drafts(4, [6, 0], 1)) == {
        "content": [
            {
                "token": " w6",
                "bytes": list(b" w6"),
                "logprob": -0.75,
                "rank": 7,
                "accepted": True,
                "position": 4,
            },
            {
                "token": '"',
                "bytes": list(b'"'),
                "logprob": 0,
                "rank": 1,
                "accepted": False,
                "position": 5,
            },
        ]
    }


def test_drafts_can_be_named_by_their_ids() -> None:
    [entry] = written(drafts(0, [6], 0), by_id=True)["content"]
    assert entry["token"] == "token_id:6"


def test_without_drafts_there_is_an_empty_list() -> None:
    assert written() == written(NO_DRAFTS, NO_DRAFTS) == {"content": []}


def test_a_draft_that_its_drafter_could_not_sample_has_a_number_all_the_same() -> None:
    one = np.ones(1, np.int32)
    arrays = TokenArrays(one, np.full(1, -np.inf, np.float32), one[:0], one)
    [entry] = written(drafts_of(Delta("a", 1, 0, 0, TokenRun(1, 1, kind=RunKind.DRAFTS)), arrays))[
        "content"
    ]
    assert entry["logprob"] == MIN_LOGPROB


def test_drafts_of_several_steps_are_written_in_order_joined_or_not() -> None:
    several = [drafts(0, [6, 7], 2), NO_DRAFTS, drafts(3, [8, 9], 0), drafts(4, [9], 1)]
    one = joined(several)
    assert one.num == 5
    content = written(*several)["content"]
    assert written(one)["content"] == content
    assert [(each["position"], each["rank"], each["accepted"]) for each in content] == [
        (0, 7, True),
        (1, 8, True),
        (3, 9, False),
        (4, 10, False),
        (4, 10, True),
    ]


def test_where_nothing_was_drafted_nothing_is_joined() -> None:
    assert joined([]) is NO_DRAFTS
    assert joined([NO_DRAFTS, NO_DRAFTS]) is NO_DRAFTS


def test_many_come_in_pieces_and_each_once() -> None:
    num = 2 * PIECE_ENTRIES + 1
    ids = [6 + number % 90 for number in range(num)]
    several = [drafts(0, ids, num), drafts(num, ids[:PIECE_ENTRIES], 0)]
    pieces = list(DraftLogprobs(table(100).spelling(by_id=False)).write(several))
    assert len(pieces) == 2 + 3 + 1
    content = json.loads(b"".join(pieces))["content"]
    assert [entry["position"] for entry in content] == list(range(num + PIECE_ENTRIES))
    assert [entry["rank"] - 1 for entry in content] == ids + ids[:PIECE_ENTRIES]
