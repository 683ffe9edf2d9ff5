"""An API key's limits on open requests and use."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY, generate_latest
from pydantic import ValidationError

from services.gateway.app import APIS
from services.gateway.http.account import TokenBucket
from shared.settings.gateway import GatewayConfig
from shared.wire.messages import State
from tests.services.gateway.fakes import (
    NUM_PROMPT_TOKENS,
    FakeTokenizer,
    Submitted,
    running_gateway,
    until,
)
from tests.services.gateway.test_errors import error_of

TEXT = "/v1/completions"
KEYS = ["ada", "bob"]

Post = Callable[..., asyncio.Task[aiohttp.ClientResponse]]


@asynccontextmanager
async def posting(mesh_dir: Path, **settings: Any) -> AsyncIterator[Post]:
    """Sends a body with a key, and makes a task of it."""
    async with running_gateway(mesh_dir, **{"api_key": KEYS} | settings) as gateway:
        await until(lambda: gateway.status().state == State.READY)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{gateway.port}") as http:

            def post(key: str, path: str = TEXT, **body: Any) -> Any:
                headers = {"Authorization": f"Bearer {key}"}
                body = body or {"prompt": "a"}
                return asyncio.create_task(http.post(path, json=body, headers=headers).__aenter__())

            yield post


async def retry_after_s(response: aiohttp.ClientResponse, limit: str) -> int:
    """The seconds after which a refused client may retry."""
    assert response.status == 429
    error = await error_of(response)
    assert error["code"] == "rate_limit_exceeded"
    assert limit in error["message"]
    return int(response.headers["Retry-After"])


async def finish(task: asyncio.Task[aiohttp.ClientResponse], request: Submitted) -> None:
    request.finish()
    async with await task as response:
        assert response.status == 200
        await response.read()


class TestOpenRequests:
    async def test_a_key_may_have_so_many_and_others_have_their_own(
        self, tmp_path: Path, tokenizer: FakeTokenizer
    ) -> None:
        async with posting(tmp_path, max_open_requests_per_key=1) as post:
            first = post("ada")
            request = await tokenizer.accepted()
            async with await post("ada") as response:
                assert await retry_after_s(response, "max-open-requests-per-key") >= 1
            other = post("bob")
            await finish(other, await tokenizer.accepted())
            await finish(first, request)
            again = post("ada")
            await finish(again, await tokenizer.accepted())

    async def test_a_client_that_leaves_frees_its_open_request(
        self, tmp_path: Path, tokenizer: FakeTokenizer
    ) -> None:
        async with posting(tmp_path, max_open_requests_per_key=1) as post:
            first = post("ada")
            await tokenizer.accepted()
            first.cancel()
            await tokenizer.cancelled.get()
            again = post("ada")
            await finish(again, await tokenizer.accepted())

    async def test_a_line_of_the_file_may_have_a_limit_of_its_own(
        self, tmp_path: Path, tokenizer: FakeTokenizer
    ) -> None:
        path = tmp_path / "keys"
        path.write_text("ada max-open-requests=2\nbeth\ncyd  max-open-requests=none\n")
        settings: Any = {"api_key_file": path, "max_open_requests_per_key": 1}
        async with posting(tmp_path, **settings) as post:
            tasks = []
            for key, num in {"ada": 2, "beth": 1, "cyd": 5}.items():
                for _ in range(num):
                    tasks.append((post(key), await tokenizer.accepted()))
                if key != "cyd":
                    async with await post(key) as response:
                        await retry_after_s(response, f"the limit is {num}")
            for task, request in tasks:
                await finish(task, request)

    async def test_each_text_counts_and_one_request_may_be_all(
        self, tmp_path: Path, tokenizer: FakeTokenizer
    ) -> None:
        async with posting(tmp_path, max_open_requests_per_key=3) as post:
            two = post("ada", prompt="a", n=2)
            request = await tokenizer.accepted()
            async with await post("ada", prompt="a", n=2) as response:
                await retry_after_s(response, "this one counts for")
            one = post("ada")
            await finish(one, await tokenizer.accepted())
            request.finish(choice=1)
            await finish(two, request)
            more_than_all = post("ada", prompt="a", n=5)
            request = await tokenizer.accepted()
            async with await post("ada") as response:
                await retry_after_s(response, "3 requests")
            for choice in range(1, 5):
                request.finish(choice=choice)
            await finish(more_than_all, request)

    async def test_every_route_is_limited_or_known_to_be_cheap(
        self, tmp_path: Path, tokenizer: FakeTokenizer
    ) -> None:
        async with running_gateway(tmp_path) as gateway:
            known = {resource.canonical for resource in gateway._runner.app.router.resources()}
            loads = [api.loads() for api in gateway._runner.app[APIS]]
        named = [route for each in loads for route in each]
        assert {*named} <= known, "else a name is written wrongly"
        assert len(named) == len({*named})


class TestTokens:
    async def test_tokens_of_prompts_and_outputs_count(
        self, tmp_path: Path, tokenizer: FakeTokenizer
    ) -> None:
        per_minute = NUM_PROMPT_TOKENS + 4
        async with posting(tmp_path, max_tokens_per_minute_per_key=per_minute) as post:
            for key, texts in {"ada": "xyzw", "bob": "x"}.items():
                task = post(key)
                request = await tokenizer.accepted()
                request.text(*texts)
                await finish(task, request)
            async with await post("ada") as response:
                assert (
                    1 <= await retry_after_s(response, f"the limit is {per_minute} a minute") <= 60
                )
            await finish(post("bob"), await tokenizer.accepted())

    async def test_a_key_with_tokens_left_is_not_cut_off(
        self, tmp_path: Path, tokenizer: FakeTokenizer
    ) -> None:
        async with posting(tmp_path, max_tokens_per_minute_per_key=1) as post:
            task = post("ada")
            request = await tokenizer.accepted()
            request.text(*"carp")
            request.finish()
            async with await task as response:
                assert (await response.json())["choices"][0]["text"] == "carp"
            async with await post("ada") as response:
                seconds = await retry_after_s(response, "max-tokens-per-minute-per-key")
                assert seconds > 60, "use beyond the limit is paid back"

    def test_they_come_back_evenly(self) -> None:
        bucket = TokenBucket(60, now_s=100)
        assert bucket.wait_s(100) == 0
        bucket.take(90, 100)
        assert bucket.wait_s(100) == 31
        assert bucket.wait_s(130.9) == pytest.approx(0.1)
        assert bucket.wait_s(131) == 0
        bucket.take(0, 10_000)
        bucket.take(60, 10_000)
        assert bucket.wait_s(10_000) == 1, "no more than a minute's are ever saved"

    @given(st.lists(st.tuples(st.integers(0, 1000), st.floats(0, 100))), st.integers(1, 1000))
    def test_after_wait_s_there_is_a_token(
        self, takes: list[tuple[int, float]], per_minute: int
    ) -> None:
        bucket, now_s = TokenBucket(per_minute, 0.0), 0.0
        for num, pause_s in takes:
            now_s += pause_s
            bucket.take(num, now_s)
        wait_s = bucket.wait_s(now_s)
        assert wait_s <= 60 * (sum(num for num, _ in takes) + 1) / per_minute + 1e-6
        assert bucket.wait_s(now_s + wait_s) < 1e-3


async def test_tokens_and_refusals_are_counted_for_each_key(
    tmp_path: Path, tokenizer: FakeTokenizer
) -> None:
    def value(name: str, **labels: str) -> float:
        key = "fdee430d40bd57de"  # sha256 of "ada" begins so
        return REGISTRY.get_sample_value(name, {"key": key, **labels}) or 0

    limit = "max-tokens-per-minute-per-key"
    before = value("shoal_key_tokens_total")
    num_refused = value("shoal_key_refusals_total", limit=limit)
    async with posting(tmp_path, max_tokens_per_minute_per_key=3) as post:
        await finish(post("ada"), await tokenizer.accepted())
        async with await post("ada") as response:
            assert response.status == 429
    assert value("shoal_key_tokens_total") == before + NUM_PROMPT_TOKENS
    assert value("shoal_key_refusals_total", limit=limit) == num_refused + 1


async def test_metrics_show_a_key_no_other_keys(tmp_path: Path, tokenizer: FakeTokenizer) -> None:
    ids = {key: sha256(key.encode()).hexdigest()[:16] for key in KEYS}
    async with (
        running_gateway(tmp_path, api_key=KEYS) as gateway,
        aiohttp.ClientSession(f"http://127.0.0.1:{gateway.port}") as http,
    ):
        for key, other in zip(KEYS, reversed(KEYS), strict=True):
            headers = {"Authorization": f"Bearer {key}"}
            async with http.get("/metrics", headers=headers) as response:
                text = await response.text()
            assert f'shoal_key_tokens_total{{key="{ids[key]}"}}' in text
            assert ids[other] not in text
            assert "shoal_buffered_bytes" in text
    everything = generate_latest().decode()
    assert all(key_id in everything for key_id in ids.values()), "at the admin port"


@pytest.mark.parametrize("name", ["max_open_requests_per_key", "max_tokens_per_minute_per_key"])
def test_a_limit_without_keys_is_a_mistake(name: str) -> None:
    settings: Any = {name: 5}
    with pytest.raises(ValidationError, match="needs api-key or api-key-file"):
        GatewayConfig(**settings)
