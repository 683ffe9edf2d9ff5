"""Ids of requests, prompts and outputs; and the prompt's own text."""

import asyncio
from typing import Any

import pytest

from services.gateway.service import GatewayService
from shared.errors import InvalidRequest
from tests.services.gateway.client import CHAT, HI, TEXT, Client, raw_answer
from tests.services.gateway.fakes import PROMPT_IDS

BODIES: Any = {CHAT: {"messages": HI}, TEXT: {"prompt": "a"}}


class TestOfRequests:
    @pytest.mark.parametrize(("path", "prefix"), [(CHAT, "chatcmpl-"), (TEXT, "cmpl-")])
    async def test_the_clients_id_is_taken(self, client: Client, path: str, prefix: str) -> None:
        name = "My/id:7-}" + "x" * 119
        body = BODIES[path] | {"request_id": "other"}
        answer, request = await asyncio.gather(
            client.send("POST", path, json=body, headers={"X-Request-Id": name}),
            client.tokenizer.answer("x"),
        )
        assert answer.headers["X-Request-Id"] == name
        assert answer.json["id"] == prefix + name
        assert request.submit.request.startswith(f"{name}~")

    async def test_an_id_in_the_body_is_taken_where_the_header_has_none(
        self, client: Client
    ) -> None:
        """Two requests of one id are two in the mesh."""
        names = set()
        for _ in range(2):
            answer, request = await client.answered(TEXT, "x", prompt="a", request_id="seven")
            assert answer.headers["X-Request-Id"] == "seven"
            assert answer.json["id"] == "cmpl-seven"
            names.add(request.submit.request)
        assert len(names) == 2

    @pytest.mark.parametrize("name", ["", "a b", "a~b", "x" * 129, "ä"])
    async def test_an_id_that_cannot_be_taken_is_refused_by_name(
        self, client: Client, name: str
    ) -> None:
        headers = {"X-Request-Id": name}
        answer = await client.send("POST", TEXT, json={"prompt": "a"}, headers=headers)
        assert answer.status == 400
        assert answer.error["param"] == "X-Request-Id"

    async def test_an_id_that_is_no_text_is_refused_too(self, gateway: GatewayService) -> None:
        answer = await raw_answer(
            gateway,
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: \xff\xfe\r\n"
            b"Content-Length: 0\r\nConnection: close\r\n\r\n",
        )
        assert answer.startswith(b"HTTP/1.1 400")
        assert b'"param":"X-Request-Id"' in answer


class TestOfTokens:
    async def test_a_completion_has_the_ids_of_its_prompt_and_text(self, client: Client) -> None:
        answer, _ = await client.answered(TEXT, "x", "", "y", prompt="a", return_token_ids=True)
        [choice] = answer.choices
        assert choice["prompt_token_ids"] == PROMPT_IDS
        assert choice["token_ids"] == [10, 11, 12]

    async def test_a_chat_has_the_ids_of_its_prompt_at_the_top_level(self, client: Client) -> None:
        answer, _ = await client.answered(CHAT, "x", "y", messages=HI, return_token_ids=True)
        assert answer.json["prompt_token_ids"] == PROMPT_IDS
        assert answer.choices[0]["token_ids"] == [10, 11]
        assert "prompt_token_ids" not in answer.choices[0]

    @pytest.mark.parametrize("path", [CHAT, TEXT])
    async def test_a_stream_has_the_ids_of_the_prompt_once_and_all_of_the_text(
        self, client: Client, path: str
    ) -> None:
        body = BODIES[path] | {"stream": True, "return_token_ids": True}
        chunks = (await client.answered(path, "x", "", "y", **body))[0].events
        choices = [chunk["choices"][0] for chunk in chunks]
        holders = chunks if path == CHAT else choices
        prompts = [each["prompt_token_ids"] for each in holders if each.get("prompt_token_ids")]
        assert prompts == [PROMPT_IDS]
        assert [each for choice in choices for each in choice.get("token_ids", [])] == [10, 11, 12]

    @pytest.mark.parametrize("path", [CHAT, TEXT])
    async def test_a_request_that_did_not_ask_gets_no_ids(self, client: Client, path: str) -> None:
        answer, _ = await client.answered(path, "x", **BODIES[path])
        assert "token_ids" not in answer.text


class TestEcho:
    async def test_a_text_is_written_before_each_of_its_choices(self, client: Client) -> None:
        asking = client.post(TEXT, prompt=["Früh ", "spät "], echo=True, n=2)
        asked = asyncio.create_task(asking)
        for number in range(2):
            request = await client.tokenizer.accepted()
            for choice in range(2):
                request.text(f"{number}.{choice}", choice=choice)
                request.finish(choice=choice)
        texts = [choice["text"] for choice in (await asked).choices]
        assert texts == ["Früh 0.0", "Früh 0.1", "spät 1.0", "spät 1.1"]

    @pytest.mark.parametrize(
        ("prompt", "echoed"),
        [([6, 1, 2], " w6€"), ([6, 1], " w6"), ([1], "")],
        ids=["whole", "half a character at its end", "half a character"],
    )
    async def test_the_text_of_ids_is_asked_for(
        self, client: Client, prompt: list[int], echoed: str
    ) -> None:
        answer, request = await client.answered(TEXT, "€", prompt=prompt, echo=True)
        assert answer.choices[0]["text"] == f"{echoed}€"
        assert request.prompt.tolist() == prompt

    async def test_a_stream_begins_with_it(self, client: Client) -> None:
        answer, _ = await client.answered(TEXT, "x", "y", prompt="Once ", echo=True, stream=True)
        texts = [chunk["choices"][0]["text"] for chunk in answer.events]
        assert texts[0].startswith("Once ")
        assert "".join(texts) == "Once xy"

    async def test_ids_that_cannot_be_written_are_refused(self, client: Client) -> None:
        client.tokenizer.conversion_error = InvalidRequest("no such id", param="prompt")
        error = await client.refused(400, TEXT, prompt=[6], echo=True)
        assert error["message"] == "no such id"
        assert client.tokenizer.submitted.empty()
