"""Requests of other APIs end by the ids that their clients know."""

from pathlib import Path

from tests.services.gateway.apis.aborts.test_aborts import abort
from tests.services.gateway.apis.messages.test_messages import BODY as MESSAGE
from tests.services.gateway.apis.messages.test_messages import PATH as MESSAGES
from tests.services.gateway.apis.messages.test_messages import read_message
from tests.services.gateway.apis.pooling.test_pooling import embed, mesh, pool
from tests.services.gateway.apis.responses.test_responses import created, response_in
from tests.services.gateway.client import Client


async def test_an_aborted_request_says_so(tmp_path: Path) -> None:
    async with mesh(tmp_path) as client:
        asked = embed(client, 2, request_id="mine")
        requests = [await client.tokenizer.accepted() for _ in range(2)]
        pool(requests[0])
        assert (await abort(client, "mine"))["aborted"] == ["mine"]
        reply = await asked
        assert (reply.status, reply.json["error"]["code"]) == (400, "request_aborted")


async def test_a_message_can_be_aborted_by_its_id(client: Client):
    asked, request = await client.accepted(MESSAGES, **MESSAGE, stream=True)
    name = f"msg_{request.submit.request.partition('~')[0]}"
    assert (await abort(client, name))["aborted"] == [name]
    assert read_message((await asked).text)["stop_reason"] == "end_turn"


async def test_a_response_can_be_aborted_by_its_id(client: Client) -> None:
    response, _ = await client.streaming("/v1/responses", first="", input="Hi")
    begun, running = await created(response)
    assert (await abort(client, running["id"]))["aborted"] == [running["id"]]
    assert response_in(begun + await response.text())["status"] == "cancelled"
