"""Requests a tokenizer cannot send down completely."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import Raw
from msgspec.msgpack import encode
from msgspec.structs import replace
from tokenizers import Regex, Tokenizer
from tokenizers.pre_tokenizers import Split

from services.tokenizer.lanes import Lanes
from services.tokenizer.requests import Requests
from services.tokenizer.text_model import ChatSettings, TextModel
from shared.model_folder import EMBEDDED_MODEL, TOKENIZER_FILE
from shared.process.rate import UNKNOWN_RETRY_AFTER_S
from shared.wire.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Accepted,
    ChatOptions,
    ChoiceStart,
    Convert,
    Failed,
    Generate,
    Hello,
    Lost,
    OutputFormat,
    OutputStart,
    RequestKey,
    SamplingParams,
    Submit,
    TextOptions,
    ToolChoice,
)
from tests.services.tokenizer.one_scheduler import OneScheduler
from tests.services.tokenizer.test_deliver import FakePeer


def submitted(name: str, num_choices: int = 1) -> tuple[Submit, np.ndarray, np.ndarray]:
    """A Submit and its buffers."""
    starts = [ChoiceStart(index) for index in range(num_choices)]
    submit = Submit(name, 1, "text", SamplingParams(seed=0), TextOptions(), starts)
    return submit, np.frombuffer(b"Who leads?", "u1"), np.zeros(0, np.int32)


async def test_a_cancelled_request_makes_room_like_an_ended_one():
    text, gateway = TextModel(EMBEDDED_MODEL, 100, 8192), FakePeer()
    async with asyncio.TaskGroup() as tasks:
        requests = Requests(text, None, 2, Lanes(1), tasks, OneScheduler(FakePeer()))
        requests.submit(gateway, *submitted("stays"))
        for number in range(10):
            requests.submit(gateway, *submitted(str(number)))
            requests.cancel(gateway, [RequestKey(str(number), 1)])
        requests.submit(gateway, *submitted("last"))
        requests.submit(gateway, *submitted("refused"))
    (failed,) = [each for each in gateway.sent if isinstance(each, Failed)]
    assert failed.request == "refused"
    assert failed.retry_after_s < UNKNOWN_RETRY_AFTER_S


class LeavingPeer(FakePeer):
    is_explained = False
    hello = Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, "scheduler", "s1")


@pytest.mark.parametrize("is_explained", [True, False])
async def test_gateways_get_the_scheduler_that_left_and_whether_it_was_planned(is_explained: bool):
    text, gateway, scheduler = TextModel(EMBEDDED_MODEL, 100, 8192), FakePeer(), LeavingPeer()
    async with asyncio.TaskGroup() as tasks:
        requests = Requests(text, None, 10, Lanes(1), tasks, OneScheduler(scheduler))
        requests.submit(gateway, *submitted("r"))
    scheduler.is_explained = is_explained
    requests.lose(scheduler)
    assert gateway.sent == [Lost([RequestKey("r", 1)], is_explained, "s1")]


class BreakingPeer(FakePeer):
    def send(self, message: Any, *arrays: np.ndarray) -> None:
        if isinstance(message, Generate):
            raise ValueError("a header that breaks the limit of the wire")
        super().send(message, *arrays)


async def test_a_request_that_cannot_be_sent_fails_alone():
    text, gateway, scheduler = TextModel(EMBEDDED_MODEL, 100, 8192), FakePeer(), BreakingPeer()
    async with asyncio.TaskGroup() as tasks:
        requests = Requests(text, None, 10, Lanes(1), tasks, OneScheduler(scheduler))
        requests.submit(gateway, *submitted("r", num_choices=2))
    assert scheduler.sent == []
    (failed,) = gateway.sent
    assert isinstance(failed, Failed)
    assert (failed.request, failed.status, len(requests)) == ("r", 500, 0)


async def test_a_text_at_which_the_library_panics_fails_alone(tmp_path: Path):
    """Its regular expressions have a limit on their steps, and no error for it."""
    raw = Tokenizer.from_file(str(EMBEDDED_MODEL / TOKENIZER_FILE))
    raw.pre_tokenizer = Split(Regex("(a+)+b"), "isolated")
    raw.save(str(tmp_path / TOKENIZER_FILE))
    text, gateway, scheduler = TextModel(tmp_path, 100, 8192), FakePeer(), FakePeer()
    async with asyncio.TaskGroup() as tasks:
        requests = Requests(text, None, 10, Lanes(1), tasks, OneScheduler(scheduler))
        submit, prompt, resumed = submitted("r")
        panicking = np.frombuffer(40 * b"a", "u1")
        requests.submit(gateway, submit, panicking, resumed)
        requests.convert(gateway, Convert("c", "text", True), panicking)
        requests.submit(gateway, replace(submit, request="next"), prompt, resumed)
    assert [(each.request, each.status) for each in gateway.sent] == [("r", 500), ("c", 500)]
    ((generate, _),) = scheduler.sent
    assert generate.request == "next"


async def test_an_acceptance_tells_the_start_of_the_output():
    settings = ChatSettings(reasoning_parser="deepseek_r1")
    text = TextModel(EMBEDDED_MODEL, 100, 8192, settings)
    gateway, scheduler = FakePeer(), FakePeer()
    async with asyncio.TaskGroup() as tasks:
        requests = Requests(text, None, 10, Lanes(1), tasks, OneScheduler(scheduler))
        submit, _, resumed = submitted("r")
        messages = np.frombuffer(b'[{"role": "user", "content": "Who leads?"}]', "u1")
        requests.submit(gateway, replace(submit, kind="chat"), messages, resumed)
    requests.accept(Accepted("r", 1))
    ((accepted, _),) = gateway.sent
    assert accepted == Accepted("r", 1, OutputStart.REASONING)


@pytest.mark.parametrize(
    ("constraint", "param"),
    [
        ({}, ""),
        ({"format": OutputFormat("regex", "guided_regex", "[0-9]+")}, "guided_regex"),
        ({"reasoning_budget": 3}, "thinking_token_budget"),
        ({"tool_choice": ToolChoice("auto")}, ""),
        ({"tool_choice": ToolChoice("required")}, "tool_choice"),
    ],
)
async def test_constraints_without_grammars(constraint: dict[str, Any], param: str):
    text, gateway, scheduler = TextModel(EMBEDDED_MODEL, 100, 8192), FakePeer(), FakePeer()
    submit, _, resumed = submitted("r")
    chat = ChatOptions(tools='[{"type": "function", "function": {"name": "f"}}]')
    messages = np.frombuffer(b'[{"role": "user", "content": "Hi"}]', "u1")
    async with asyncio.TaskGroup() as tasks:
        requests = Requests(text, None, 10, Lanes(1), tasks, OneScheduler(scheduler))
        submit = replace(submit, kind="chat", chat=chat, **constraint)
        requests.submit(gateway, submit, messages, resumed)
    if not param:
        ((generate, _),) = scheduler.sent
        assert generate.params.guide is None
        return
    (failed,) = gateway.sent
    assert (failed.status, failed.param) == (400, param)
    assert "has no grammars" in failed.message


async def test_ids_of_a_prompt_are_held_until_the_gateway_gets_them():
    text, gateway, scheduler = TextModel(EMBEDDED_MODEL, 100, 8192), FakePeer(), FakePeer()
    async with asyncio.TaskGroup() as tasks:
        requests = Requests(text, None, 10, Lanes(1), tasks, OneScheduler(scheduler))
        requests.submit(gateway, *submitted("r", num_choices=2))
    request = requests._open.get("r", 1)
    assert request is not None
    assert (gateway.sent, request.answer is None) == ([], False)
    requests.accept(Accepted("r", 1))
    requests.accept(Accepted("r", 1))  # twice, unlike a real scheduler
    ((accepted, arrays),) = gateway.sent
    assert accepted == Accepted("r", 1)
    assert text.decode(arrays.ids.tolist()) == "Who leads?"
    assert request.answer is None
    assert request.num_prompt_tokens == len(arrays.ids)
    requests.lose(gateway)


async def test_options_are_passed_on_as_they_came():
    """Also those of a newer release, which we do not know."""
    text, scheduler = TextModel(EMBEDDED_MODEL, 100, 8192), FakePeer()
    async with asyncio.TaskGroup() as tasks:
        requests = Requests(text, None, 10, Lanes(1), tasks, OneScheduler(scheduler))
        submit, *arrays = submitted("r")
        row = [0, "salt", "ann", False, 0, "", [None, 20.0], "", 300, {"of": "later"}]
        options = Raw(encode(row))
        requests.submit(FakePeer(), replace(submit, options=options), *arrays)
    ((generate, _),) = scheduler.sent
    assert isinstance(generate, Generate)
    assert bytes(generate.options) == bytes(options)


async def test_an_error_of_a_template_with_half_a_character_fails_its_request_alone():
    """``encode`` refuses the half, and an error while one fails would end the tokenizer."""
    settings, gateway = ChatSettings(trusts_requests=True), FakePeer()
    text = TextModel(EMBEDDED_MODEL, 100, 8192, settings)
    submit, _, resumed = submitted("r")
    chat = ChatOptions(template=r'{{ raise_exception("half \ud800") }}')
    messages = np.frombuffer(b'[{"role":"user","content":"Hi"}]', "u1")
    async with asyncio.TaskGroup() as tasks:
        requests = Requests(text, None, 10, Lanes(1), tasks, OneScheduler(FakePeer()))
        requests.submit(gateway, replace(submit, kind="chat", chat=chat), messages, resumed)
    (failed,) = gateway.sent
    assert failed.message == "chat_template fails: half \N{REPLACEMENT CHARACTER}"
    assert encode(failed)
