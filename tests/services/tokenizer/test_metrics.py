"""A tokenizer's counters, from a Submit to the last token."""

import asyncio
from collections.abc import Callable

import numpy as np
from prometheus_client import REGISTRY
from tokenizers import Tokenizer

from services.tokenizer.deliver import deliver
from services.tokenizer.lanes import Lanes
from services.tokenizer.request_table import RequestTable
from services.tokenizer.requests import Requests
from services.tokenizer.text_model import TextModel
from shared.model_folder import EMBEDDED_MODEL
from shared.wire.messages import ChoiceStart, Generate, SamplingParams, Submit, TextOptions
from tests.services.tokenizer.one_scheduler import OneScheduler
from tests.services.tokenizer.test_deliver import FakePeer, open_request, tokens

NO_IDS = np.zeros(0, np.int32)

Change = Callable[[str], float]


def num_open() -> float | None:
    return REGISTRY.get_sample_value("shoal_open_requests")


async def test_a_prompt_is_counted_once_with_its_tokens_whatever_its_choices(change: Change):
    text, gateway, scheduler = TextModel(EMBEDDED_MODEL, 100, 8192), FakePeer(), FakePeer()
    params, starts = SamplingParams(seed=0), [ChoiceStart(0), ChoiceStart(1)]
    submit = Submit("r", 1, "text", params, TextOptions(), starts)
    async with asyncio.TaskGroup() as tasks:
        requests = Requests(text, None, 10, Lanes(1), tasks, OneScheduler(scheduler))
        requests.submit(gateway, submit, np.frombuffer(b"Who leads the shoal?", "u1"), NO_IDS)
        assert num_open() == 1
    ((generate, arrays),) = scheduler.sent
    assert isinstance(generate, Generate)
    assert change("shoal_prepare_seconds_count") == 1
    assert change("shoal_encoded_tokens_total") == len(arrays.ids) > 1
    requests.lose(gateway)
    assert num_open() == 0


def test_tokens_that_go_out_as_text_are_counted_and_no_others(tokenizer: Tokenizer, change: Change):
    table, gateway = RequestTable(), FakePeer()
    open_request(table, tokenizer, "a", gateway)
    open_request(table, tokenizer, "b", gateway, stop=("brown",))
    ids = tokenizer.encode("quick brown fox").ids
    deliver(*tokens([("a/0", ids), ("b/0", ids), ("gone/0", ids)]), table)
    ((deltas, _),) = gateway.sent
    whole, cut = (row.run.num_tokens for row in deltas.rows)
    assert change("shoal_decoded_tokens_total") == whole + cut < 2 * len(ids)
