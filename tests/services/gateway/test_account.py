"""An API key's limits on open requests and use."""

from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY, generate_latest
from pydantic import ValidationError

from services.gateway.app import APIS
from services.gateway.http.account import TokenBucket
from services.gateway.service import GatewayService
from shared.settings.gateway import GatewayConfig
from tests.services.gateway.client import TEXT, Answer, Client, client_of, serving, with_settings
from tests.services.gateway.fakes import NUM_PROMPT_TOKENS, FakeTokenizer

KEYS = ["ada", "bob"]


def with_limits(**settings: Any) -> pytest.MarkDecorator:
    return with_settings(**{"api_key": KEYS} | settings)


def retry_after_s(answer: Answer, limit: str) -> int:
    """The seconds after which a refused client may retry."""
    assert answer.status == 429
    assert answer.error["code"] == "rate_limit_exceeded"
    assert limit in answer.error["message"]
    return int(answer.headers["Retry-After"])


async def serve(client: Client, key: str) -> None:
    await client.finish(*await client.accepted(TEXT, key=key, prompt="a"))


async def refusal(client: Client, key: str, limit: str, **fields: Any) -> int:
    return retry_after_s(await client.post(TEXT, key=key, **{"prompt": "a"} | fields), limit)


class TestOpenRequests:
    @with_limits(max_open_requests_per_key=1)
    async def test_a_key_may_have_so_many_and_others_have_their_own(self, client: Client) -> None:
        first = await client.accepted(TEXT, key="ada", prompt="a")
        assert await refusal(client, "ada", "max-open-requests-per-key") >= 1
        await serve(client, "bob")
        await client.finish(*first)
        await serve(client, "ada")

    @with_limits(max_open_requests_per_key=1)
    async def test_a_client_that_leaves_frees_its_open_request(self, client: Client) -> None:
        asked, _ = await client.accepted(TEXT, key="ada", prompt="a")
        asked.cancel()
        await client.tokenizer.cancelled.get()
        await serve(client, "ada")

    async def test_a_line_of_the_file_may_have_a_limit_of_its_own(
        self, tmp_path: Path, tokenizer: FakeTokenizer
    ) -> None:
        path = tmp_path / "keys"
        path.write_text("ada max-open-requests=2\nbeth\ncyd  max-open-requests=none\n")
        settings: Any = {"api_key_file": path, "max_open_requests_per_key": 1}
        async with (
            serving(tmp_path, **settings) as gateway,
            client_of(gateway, tokenizer) as client,
        ):
            tasks = []
            for key, num in {"ada": 2, "beth": 1, "cyd": 5}.items():
                tasks += [await client.accepted(TEXT, key=key, prompt="a") for _ in range(num)]
                if key != "cyd":
                    await refusal(client, key, f"the limit is {num}")
            for each in tasks:
                await client.finish(*each)

    @with_limits(max_open_requests_per_key=3)
    async def test_each_text_counts_and_one_request_may_be_all(self, client: Client) -> None:
        asked, request = await client.accepted(TEXT, key="ada", prompt="a", n=2)
        await refusal(client, "ada", "this one counts for", n=2)
        await serve(client, "ada")
        request.finish(choice=1)
        await client.finish(asked, request)
        asked, request = await client.accepted(TEXT, key="ada", prompt="a", n=5)
        await refusal(client, "ada", "3 requests")
        for choice in range(1, 5):
            request.finish(choice=choice)
        await client.finish(asked, request)

    async def test_every_route_is_limited_or_known_to_be_cheap(
        self, gateway: GatewayService
    ) -> None:
        known = {resource.canonical for resource in gateway._runner.app.router.resources()}
        named = [route for api in gateway._runner.app[APIS] for route in api.loads()]
        assert {*named} <= known, "else a name is written wrongly"
        assert len(named) == len({*named})


class TestTokens:
    @with_limits(max_tokens_per_minute_per_key=NUM_PROMPT_TOKENS + 4)
    async def test_tokens_of_prompts_and_outputs_count(self, client: Client) -> None:
        for key, texts in {"ada": "xyzw", "bob": "x"}.items():
            asked, request = await client.accepted(TEXT, key=key, prompt="a")
            request.text(*texts)
            await client.finish(asked, request)
        limit = f"the limit is {NUM_PROMPT_TOKENS + 4} a minute"
        assert 1 <= await refusal(client, "ada", limit) <= 60
        await serve(client, "bob")

    @with_limits(max_tokens_per_minute_per_key=1)
    async def test_a_key_with_tokens_left_is_not_cut_off(self, client: Client) -> None:
        answer, _ = await client.answered(TEXT, *"carp", key="ada", prompt="a")
        assert answer.choices[0]["text"] == "carp"
        seconds = await refusal(client, "ada", "max-tokens-per-minute-per-key")
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


@with_limits(max_tokens_per_minute_per_key=3)
async def test_tokens_and_refusals_are_counted_for_each_key(client: Client) -> None:
    def value(name: str, **labels: str) -> float:
        key = "fdee430d40bd57de"  # sha256 of "ada" begins so
        return REGISTRY.get_sample_value(name, {"key": key, **labels}) or 0

    limit = "max-tokens-per-minute-per-key"
    before = value("shoal_key_tokens_total")
    num_refused = value("shoal_key_refusals_total", limit=limit)
    await serve(client, "ada")
    await refusal(client, "ada", limit)
    assert value("shoal_key_tokens_total") == before + NUM_PROMPT_TOKENS
    assert value("shoal_key_refusals_total", limit=limit) == num_refused + 1


@with_limits()
async def test_metrics_show_a_key_no_other_keys(client: Client) -> None:
    ids = {key: sha256(key.encode()).hexdigest()[:16] for key in KEYS}
    for key, other in zip(KEYS, reversed(KEYS), strict=True):
        text = (await client.get("/metrics", Authorization=f"Bearer {key}")).text
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
