"""What becomes of a request that a tokenizer cannot send down whole."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from services.tokenizer.requests import Requests
from services.tokenizer.text_model import TextModel
from shared.config import EMBEDDED_MODEL
from shared.messages import (
    Cancel,
    ChoiceStart,
    Failed,
    Generate,
    RequestKey,
    SamplingParams,
    Submit,
    TextOptions,
)
from tests.services.tokenizer.test_deliver import FakePeer


class BreakingPeer(FakePeer):
    """Of the choices it can send only the first."""

    def send(self, message: Any, *arrays: np.ndarray) -> None:
        if isinstance(message, Generate) and message.request.endswith("/1"):
            raise ValueError("a header that breaks the limit of the wire")
        super().send(message, *arrays)


async def test_what_has_gone_of_a_request_that_breaks_is_taken_back():
    text, gateway, scheduler = TextModel(EMBEDDED_MODEL, 100, 8192), FakePeer(), BreakingPeer()
    params, starts = SamplingParams(seed=0), [ChoiceStart(0), ChoiceStart(1)]
    submit = Submit("r", 1, "text", params, TextOptions(), starts)
    prompt, no_ids = np.frombuffer(b"Who leads?", "u1"), np.zeros(0, np.int32)
    with ThreadPoolExecutor(1) as threads:
        async with asyncio.TaskGroup() as tasks:
            requests = Requests(text, None, 10, threads, tasks, lambda: scheduler)
            requests.submit(gateway, submit, prompt, no_ids)
    (generate, _), cancel = scheduler.sent
    assert isinstance(generate, Generate)
    assert isinstance(cancel, Cancel)
    assert RequestKey(generate.request, 1) in cancel.keys
    (failed,) = gateway.sent
    assert isinstance(failed, Failed)
    assert (failed.request, failed.status, len(requests)) == ("r", 500, 0)
