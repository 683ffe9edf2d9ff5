"""Constraints of clients on their way down."""

import asyncio
from typing import Any

from msgspec.structs import replace

from services.tokenizer.guides.guides import guides_for
from services.tokenizer.lanes import Lanes
from services.tokenizer.requests import Requests
from services.tokenizer.text_model import ChatSettings, TextModel
from shared.model_folder import EMBEDDED_MODEL
from shared.wire.messages import OutputFormat
from tests.services.tokenizer.one_scheduler import OneScheduler
from tests.services.tokenizer.test_deliver import FakePeer
from tests.services.tokenizer.test_requests import submitted


async def test_a_constraint_becomes_a_guide_or_is_refused():
    settings = ChatSettings(reasoning_parser="deepseek_r1")
    text, lanes = TextModel(EMBEDDED_MODEL, 100, 8192, settings), Lanes(1)
    gateway, scheduler = FakePeer(), FakePeer()
    async with asyncio.TaskGroup() as tasks:
        guides = guides_for(text, lanes)
        requests = Requests(text, None, 10, lanes, tasks, OneScheduler(scheduler), guides=guides)
        kind: Any
        for name, kind, value in (
            ("plain", None, ""),
            ("held", "regex", "[0-9]+"),
            ("wrong", "regex", "[0-9"),
        ):
            submit, prompt, resumed = submitted(name)
            format = kind and OutputFormat(kind, "guided_regex", value)
            requests.submit(gateway, replace(submit, format=format), prompt, resumed)
    await requests.close()
    made = {message.request: message.params.guide for message, _ in scheduler.sent}
    assert made.keys() == {"plain", "held"}
    assert made["plain"] is None
    assert made["held"].grammar
    (failed,) = gateway.sent
    assert (failed.request, failed.status, failed.param) == ("wrong", 400, "guided_regex")
    assert len(requests) == 2
