"""Messages from and to peers below minor ``OPTIONS_MINOR``, with bytes recorded from minor 5."""

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from shared.link.link import Link
from shared.link.peer import Peer
from shared.wire.codec import Array, decode, encode
from shared.wire.envelope import RequestOptions, read_options, write_options
from shared.wire.messages import (
    EMPTY_ROW,
    MAX_TRACED,
    OPTIONS_MINOR,
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Admit,
    Cancel,
    ChatOptions,
    ChoiceStart,
    Generate,
    Hello,
    Message,
    NewSequence,
    RequestKey,
    SamplingParams,
    StepPlan,
    Submit,
    TextOptions,
)
from shared.wire.older import for_older, from_older
from tests.shared.recorder import Recorder

PARAMS = (
    "dc001703cb3ff000000000000000cb3ff0000000000000c0c2cb0000000000000000cb0000000000000000"
    "cb0000000000000000cb3ff00000000000000090909090c0c0c2c0cb0000000000000000c090c0"
)
SUBMIT = (
    f"dc00110aa5727e312f3002a3696473{PARAMS}999090c2c3c3c2c0c2c291950000000000f9a36b2073a16b97a0"
    "a0a0a0c3c200c0c009c301a27331"
)
GENERATE = f"9a0ba5727e312f3002{PARAMS}9194a7727e312f302f30000000f9a36b2073c301a16b"
PLAN = f"990d0490919c00a7727e312f302f30020100030300{PARAMS}910502c39090900001"
OPTIONS = RequestOptions(
    priority=-7,
    salt="k s",
    owner="k",
    is_traced=True,
    num_worker_deaths=1,
    left_scheduler="s1",
)
ROW = write_options(OPTIONS)
SAMPLING = SamplingParams(seed=3)
NEW_SUBMIT = Submit(
    request="r~1/0",
    attempt=2,
    kind="ids",
    params=SAMPLING,
    text=TextOptions(),
    choices=[ChoiceStart(0)],
    chat=ChatOptions(),
    reasoning_budget=9,
    options=ROW,
)
NEW_GENERATE = Generate(
    request="r~1/0",
    attempt=2,
    params=SAMPLING,
    sequences=[NewSequence("r~1/0/0")],
    options=ROW,
)
NEW_ROW = Admit(
    slot=0,
    request="r~1/0/0",
    attempt=2,
    route=1,
    choice=0,
    prompt_len=3,
    num_ids=3,
    num_cached=0,
    params=SAMPLING,
    blocks=[5],
    num_prompt_scored=2,
    options=ROW,
)
NEW_PLAN = StepPlan(step=4, release=[], admit=[NEW_ROW], extend=[], prefill=[], decode=[])
PAIRS = [(SUBMIT, NEW_SUBMIT), (GENERATE, NEW_GENERATE), (PLAN, NEW_PLAN)]
LIFTED = [OPTIONS, replace(OPTIONS, left_scheduler=""), RequestOptions(is_traced=True)]
IDS = ["Submit", "Generate", "StepPlan"]
NO_IDS = np.zeros(0, np.int32)


def recorded(message: str, num_arrays: int) -> Message:
    arrays = msgspec.msgpack.encode([["i4", [0]]] * num_arrays)
    return decode([b"\x92" + bytes.fromhex(message) + arrays])[0]


def options_of(message: Message) -> RequestOptions:
    assert isinstance(message, Submit | Generate | StepPlan)
    part = message.admit[0] if isinstance(message, StepPlan) else message
    return read_options(part.options)


def as_older(value: object, like: object) -> object:
    """``value`` for a reader with the shorter rows of ``like``."""
    if not isinstance(value, list) or not isinstance(like, list):
        return value
    known = value[: len(like)]
    return [as_older(each, other) for each, other in zip(known, like, strict=True)]


@pytest.mark.parametrize(
    ("old", "num_arrays", "options"),
    [*zip((SUBMIT, GENERATE, PLAN), (2, 2, 1), LIFTED, strict=True)],
    ids=IDS,
)
def test_the_options_of_an_older_peer_are_lifted_into_one_row(
    old: str, num_arrays: int, options: RequestOptions
):
    assert options_of(from_older(recorded(old, num_arrays))) == options


@pytest.mark.parametrize(("old", "new"), PAIRS, ids=IDS)
def test_an_older_peer_reads_messages_of_its_own_release(old: str, new: Message):
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(for_older(new)))
    expected = msgspec.msgpack.decode(bytes.fromhex(old))
    assert as_older(sent, expected) == expected


@pytest.mark.parametrize(
    ("new", "options"),
    [*zip((NEW_SUBMIT, NEW_GENERATE, NEW_PLAN), LIFTED, strict=True)],
    ids=IDS,
)
def test_there_and_back_only_options_without_a_field_are_lost(
    new: Message, options: RequestOptions
):
    assert options_of(for_older(new)) == OPTIONS
    assert options_of(from_older(for_older(new))) == options


def test_the_salt_survives_an_older_tokenizer_between_newer_services():
    """It makes its Generate of the fields that it knows."""
    submit = for_older(NEW_SUBMIT)
    assert isinstance(submit, Submit)
    generate = Generate(
        request="r~1/0",
        attempt=2,
        params=SAMPLING,
        sequences=[NewSequence("r~1/0/0")],
        old_priority=submit.old_priority,
        old_salt=submit.old_salt,
        old_is_traced=submit.old_is_traced,
        old_num_worker_deaths=submit.old_num_worker_deaths,
        old_owner=submit.old_owner,
    )
    assert options_of(from_older(generate)) == replace(OPTIONS, left_scheduler="")


def test_of_the_choices_of_a_prompt_older_workers_trace_the_first_alone():
    rows = [replace(NEW_ROW, choice=choice) for choice in (MAX_TRACED - 1, MAX_TRACED)]
    plan = for_older(replace(NEW_PLAN, admit=rows))
    assert isinstance(plan, StepPlan)
    assert [row.old_is_traced for row in plan.admit] == [True, False]


def test_the_options_of_a_newer_release_pass_through_unread():
    row = msgspec.Raw(
        msgspec.msgpack.encode([-7, "k s", "k", True, 1, "s1", None, "", 0, {"new": 1}])
    )
    frames = [bytes(each) for each in encode(replace(NEW_SUBMIT, options=row), [NO_IDS, NO_IDS])]
    received, _ = decode(frames)
    assert isinstance(received, Submit)
    assert bytes(received.options) == bytes(row)
    assert read_options(received.options) == OPTIONS


def test_a_message_without_options_is_left_as_it_is():
    cancel = Cancel([RequestKey("r", 1)])
    assert for_older(cancel) is cancel
    assert from_older(cancel) is cancel
    assert read_options(EMPTY_ROW) == RequestOptions()


@pytest.mark.parametrize(
    ("minor", "old_salt"), [(0, "k s"), (OPTIONS_MINOR - 1, "k s"), (PROTOCOL_MINOR, "")]
)
def test_a_peer_is_sent_the_old_fields_if_it_reads_them(minor: int, old_salt: str):
    sent: list[Message] = []

    def keep(peer: Peer, message: Message, arrays: tuple[Array, ...]) -> None:
        sent.append(message)

    peer = Peer(Hello(PROTOCOL_MAJOR, minor, "scheduler", "s"), keep)
    peer.send(NEW_GENERATE)
    (message,) = sent
    assert isinstance(message, Generate)
    assert (message.old_salt, read_options(message.options)) == (old_salt, OPTIONS)


@pytest.mark.parametrize(
    ("minor", "salt"), [(0, "k s"), (OPTIONS_MINOR - 1, "k s"), (PROTOCOL_MINOR, "")]
)
async def test_a_link_lifts_only_messages_of_older_peers(minor: int, salt: str):
    recorder = Recorder("scheduler", "s")
    link: Link = recorder.link
    peer = Peer(Hello(PROTOCOL_MAJOR, minor, "tokenizer", "t"), lambda *sent: None)
    link.received(peer, recorded(GENERATE, 2), [], 0)
    _, message, _ = recorder.messages.get_nowait()
    assert options_of(message).salt == salt
    await link.close("test over")
