"""Ids of requests, prompts and outputs; and the prompt's own text."""

import asyncio
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI, BadRequestError

from services.gateway.service import GatewayService
from shared.errors import InvalidRequest
from tests.services.gateway.fakes import PROMPT_IDS, FakeTokenizer

MESSAGES: Any = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
BODIES: Any = {CHAT: {"messages": MESSAGES}, TEXT: {"prompt": "a"}}


class TestOfRequests:
    @pytest.mark.parametrize(("path", "prefix"), [(CHAT, "chatcmpl-"), (TEXT, "cmpl-")])
    async def test_the_clients_id_is_taken(
        self, http: aiohttp.ClientSession, tokenizer: FakeTokenizer, path: str, prefix: str
    ) -> None:
        name = "My/id:7-}" + "x" * 119
        headers = {"X-Request-Id": name}
        response, request = await asyncio.gather(
            http.post(path, json=BODIES[path] | {"request_id": "other"}, headers=headers),
            tokenizer.answer("x"),
        )
        assert response.headers["X-Request-Id"] == name
        assert (await response.json())["id"] == prefix + name
        assert request.submit.request.startswith(f"{name}~")

    async def test_an_id_in_the_body_is_taken_where_the_header_has_none(
        self, http: aiohttp.ClientSession, tokenizer: FakeTokenizer
    ) -> None:
        body = {"prompt": "a", "request_id": "seven"}
        response, _ = await asyncio.gather(http.post(TEXT, json=body), tokenizer.answer("x"))
        assert response.headers["X-Request-Id"] == "seven"
        assert (await response.json())["id"] == "cmpl-seven"

    async def test_two_requests_of_one_id_are_two_in_the_mesh(
        self, http: aiohttp.ClientSession, tokenizer: FakeTokenizer
    ) -> None:
        names = set()
        for _ in range(2):
            response, request = await asyncio.gather(
                http.post(TEXT, json={"prompt": "a"}, headers={"X-Request-Id": "a"}),
                tokenizer.answer("x"),
            )
            response.close()
            names.add(request.submit.request)
        assert len(names) == 2

    @pytest.mark.parametrize("name", ["", "a b", "a~b", "x" * 129, "ä"])
    async def test_an_id_that_cannot_be_taken_is_refused_by_name(
        self, http: aiohttp.ClientSession, name: str
    ) -> None:
        headers = {"X-Request-Id": name}
        async with http.post(TEXT, json={"prompt": "a"}, headers=headers) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == "X-Request-Id"
            assert len(response.headers["X-Request-Id"]) == 32

    async def test_an_id_that_is_no_text_is_refused_too(self, gateway: GatewayService) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: \xff\xfe\r\n"
            b"Content-Length: 0\r\nConnection: close\r\n\r\n"
        )
        answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 400")
        assert b'"param":"X-Request-Id"' in answer


class TestOfTokens:
    async def test_a_completion_has_the_ids_of_its_prompt_and_text(
        self, http: aiohttp.ClientSession, tokenizer: FakeTokenizer
    ) -> None:
        body = {"prompt": "a", "return_token_ids": True}
        response, _ = await asyncio.gather(
            http.post(TEXT, json=body), tokenizer.answer("x", "", "y")
        )
        [choice] = (await response.json())["choices"]
        assert choice["prompt_token_ids"] == PROMPT_IDS
        assert choice["token_ids"] == [10, 11, 12]

    async def test_a_chat_has_the_ids_of_its_prompt_at_the_top_level(
        self, http: aiohttp.ClientSession, tokenizer: FakeTokenizer
    ) -> None:
        body = {"messages": MESSAGES, "return_token_ids": True}
        response, _ = await asyncio.gather(http.post(CHAT, json=body), tokenizer.answer("x", "y"))
        reply = await response.json()
        assert reply["prompt_token_ids"] == PROMPT_IDS
        assert reply["choices"][0]["token_ids"] == [10, 11]
        assert "prompt_token_ids" not in reply["choices"][0]

    @pytest.mark.parametrize("path", [CHAT, TEXT])
    async def test_a_stream_has_the_ids_of_the_prompt_once_and_all_of_the_text(
        self, openai: AsyncOpenAI, tokenizer: FakeTokenizer, path: str
    ) -> None:
        body = BODIES[path] | {"model": "fish", "stream": True}
        create: Any = openai.completions.create if path == TEXT else openai.chat.completions.create
        stream, _ = await asyncio.gather(
            create(**body, extra_body={"return_token_ids": True}), tokenizer.answer("x", "", "y")
        )
        prompts: list[Any] = []
        ids: list[Any] = []
        async for chunk in stream:
            holder = chunk.model_dump() if path == CHAT else chunk.choices[0].model_dump()
            prompts += [holder["prompt_token_ids"]] if holder.get("prompt_token_ids") else []
            ids += chunk.choices[0].model_dump().get("token_ids") or []
        assert prompts == [PROMPT_IDS]
        assert ids == [10, 11, 12]

    @pytest.mark.parametrize("path", [CHAT, TEXT])
    async def test_a_request_that_did_not_ask_gets_no_ids(
        self, http: aiohttp.ClientSession, tokenizer: FakeTokenizer, path: str
    ) -> None:
        response, _ = await asyncio.gather(
            http.post(path, json=BODIES[path]), tokenizer.answer("x")
        )
        assert "token_ids" not in await response.text()


class TestEcho:
    async def test_a_text_is_written_before_each_of_its_choices(
        self, openai: AsyncOpenAI, tokenizer: FakeTokenizer
    ) -> None:
        async def answer() -> None:
            for number in range(2):
                request = await tokenizer.accepted()
                for choice in range(2):
                    request.text(f"{number}.{choice}", choice=choice)
                    request.finish(choice=choice)

        reply, _ = await asyncio.gather(
            openai.completions.create(model="fish", prompt=["Früh ", "spät "], echo=True, n=2),
            answer(),
        )
        texts = [choice.text for choice in reply.choices]
        assert texts == ["Früh 0.0", "Früh 0.1", "spät 1.0", "spät 1.1"]

    async def test_the_text_of_ids_is_asked_for(
        self, openai: AsyncOpenAI, tokenizer: FakeTokenizer
    ) -> None:
        reply, request = await asyncio.gather(
            openai.completions.create(model="fish", prompt=[6, 1, 2], echo=True),
            tokenizer.answer("x"),
        )
        assert reply.choices[0].text == " w6€x"
        assert request.prompt.tolist() == [6, 1, 2]

    async def test_half_a_character_at_its_end_is_in_the_text(
        self, openai: AsyncOpenAI, tokenizer: FakeTokenizer
    ) -> None:
        for prompt, echoed in (([6, 1], " w6"), ([1], "")):
            reply, request = await asyncio.gather(
                openai.completions.create(model="fish", prompt=prompt, echo=True),
                tokenizer.answer("€"),
            )
            assert reply.choices[0].text == f"{echoed}€"
            assert request.prompt.tolist() == prompt

    async def test_a_stream_begins_with_it(
        self, openai: AsyncOpenAI, tokenizer: FakeTokenizer
    ) -> None:
        stream, _ = await asyncio.gather(
            openai.completions.create(model="fish", prompt="Once ", echo=True, stream=True),
            tokenizer.answer("x", "y"),
        )
        texts = [chunk.choices[0].text async for chunk in stream]
        assert texts[0].startswith("Once ")
        assert "".join(texts) == "Once xy"

    async def test_ids_that_cannot_be_written_are_refused(
        self, openai: AsyncOpenAI, tokenizer: FakeTokenizer
    ) -> None:
        tokenizer.conversion_error = InvalidRequest("no such id", param="prompt")
        with pytest.raises(BadRequestError, match="no such id"):
            await openai.completions.create(model="fish", prompt=[6], echo=True)
        assert tokenizer.submitted.empty()
