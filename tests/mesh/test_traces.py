"""The time of a request in ``/v1/traces``, over real sockets."""

import asyncio
import json
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from cli.trace.command import main as draw
from services.gateway.service import GatewayService
from shared.settings.gateway import GatewayConfig
from shared.wire.messages import MAX_TRACED
from tests.mesh.mesh import Mesh, running_mesh
from tests.mesh.test_pooling import TEXTS, serving
from tests.pooling_models import save_embedder

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TALK = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": TALK, "max_tokens": 7, "ignore_eos": True},
    TEXT: {"prompt": "Hi there", "max_tokens": 7, "ignore_eos": True},
    RESPONSES: {"input": "Hi", "max_output_tokens": 7},
    MESSAGES: {"messages": TALK, "max_tokens": 7},
}


@asynccontextmanager
async def mesh_and_client(directory: Path, **kwargs: Any):
    async with running_mesh(directory, **kwargs) as mesh, aiohttp.ClientSession(mesh.url()) as http:
        yield mesh, http


async def ask(http: aiohttp.ClientSession, name: str, path: str = TEXT, **body: Any) -> Any:
    body = BODIES[path] | body
    async with http.post(path, json=body, headers={"X-Request-Id": name}) as response:
        assert response.status == 200, await response.text()
        return await response.read() if body.get("stream") else await response.json()


async def trace_of(http: aiohttp.ClientSession, name: str, **headers: str) -> dict[str, Any]:
    async with http.get(f"/v1/traces/{name}", headers=headers) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def whole_trace(mesh: Mesh, http: aiohttp.ClientSession, name: str) -> dict[str, Any]:
    """A worker notified of an end by the next plan reports after it."""
    await mesh.until_idle()
    await asyncio.sleep(0.1)
    return await trace_of(http, name)


def named(trace: dict[str, Any], role: str, name: str) -> list[dict[str, Any]]:
    spans = trace["spans"]
    return [span for span in spans if (span["service"]["role"], span["name"]) == (role, name)]


def one(trace: dict[str, Any], role: str, name: str) -> dict[str, Any]:
    (span,) = named(trace, role, name)
    return span


def end_of(span: dict[str, Any]) -> float:
    return span["start"] + span["duration_ms"] / 1000


@pytest.mark.parametrize("path", BODIES)
async def test_the_spans_of_all_services_lie_within_the_request(tmp_path: Path, path: str) -> None:
    async with mesh_and_client(tmp_path) as (mesh, http):
        reply = await ask(http, "mine", path, stream=path == CHAT)
        trace = await trace_of(http, "mine")
        instances = {kind: mesh.services[kind]._config.instance for kind in mesh.services}
        if path != CHAT:
            assert await trace_of(http, reply["id"]) == trace, "the id of the reply names it too"
    whole, *others = trace["spans"]
    assert (trace["object"], trace["id"], trace["route"]) == ("trace", "mine", path)
    assert (whole["parent"], whole["name"]) == (None, f"POST {path}")
    facts = whole["attributes"]
    assert (facts["status"], facts["num_output_tokens"], facts["num_replays"]) == (200, 7, 0)
    assert {span["service"]["role"]: span["service"]["instance"] for span in others} == instances
    for span in others:
        assert whole["start"] - 1e-3 <= span["start"] <= end_of(span) <= end_of(whole) + 1e-3
    for name in ("read", "parse", "accept", "reply", "attempt"):
        assert one(trace, "gateway", name)["parent"] == whole["id"]
    assert len(named(trace, "tokenizer", "template")) == (path != TEXT)
    assert one(trace, "tokenizer", "encode")["attributes"] == {}
    prompt, sequence = one(trace, "tokenizer", "prompt"), one(trace, "scheduler", "sequence")
    queue, run = one(trace, "scheduler", "queue"), one(trace, "scheduler", "run")
    assert (prompt["parent"], sequence["parent"]) == (whole["id"], prompt["id"])
    assert queue["parent"] == run["parent"] == sequence["id"]
    assert sequence["attributes"]["reason"] == run["attributes"]["ends_with"] == "length"
    assert sequence["attributes"]["num_output_tokens"] == sequence["attributes"]["num_steps"] == 7
    chunk, decode = one(trace, "worker", "prefill"), one(trace, "worker", "decode")
    assert chunk["parent"] == decode["parent"] == run["id"]
    assert chunk["attributes"]["num_tokens"] == sequence["attributes"]["num_prompt_tokens"]
    steps = decode["attributes"]
    assert steps["num_steps"] == 6
    assert 0 < steps["step_min_ms"] <= steps["step_median_ms"] <= steps["step_max_ms"]
    assert len({span["id"] for span in trace["spans"]}) == len(trace["spans"])


async def test_a_lost_worker_shows_in_the_traces_of_its_sequences(tmp_path: Path) -> None:
    async with mesh_and_client(tmp_path, num_workers=2) as (mesh, http):
        request = asyncio.create_task(ask(http, "moved", max_tokens=200))
        await mesh.until(lambda: any(each.emitted for each in mesh.core.sequences.values()))
        (sequence,) = mesh.core.sequences.values()
        lost = sequence.last_worker_id.partition("/")[0]
        name = next(
            name
            for name, each in mesh.services.items()
            if name.startswith("worker") and each._config.instance == lost
        )
        await mesh.lose(name, says_bye=False)
        await request
        trace = await trace_of(http, "moved")
    before, after = (run["attributes"] for run in named(trace, "scheduler", "run"))
    assert (before["worker"], before["ends_with"]) == (lost, "worker_lost")
    assert after["worker"] != lost
    assert before["num_output_tokens"] + after["num_output_tokens"] == 200
    assert after["num_known_tokens"] > before["num_known_tokens"]
    _, again = (queue["attributes"] for queue in named(trace, "scheduler", "queue"))
    assert (again["after"], again["reason"]) == ("worker_lost", "isolated")
    assert one(trace, "scheduler", "sequence")["attributes"]["num_worker_deaths"] == 1
    assert {span["service"]["instance"] for span in named(trace, "worker", "decode")} == {
        after["worker"]
    }


@pytest.mark.slow
async def test_of_many_inputs_the_first_have_spans_of_all_services(tmp_path: Path) -> None:
    save_embedder(tmp_path / "model")
    async with (
        serving(tmp_path / "mesh", tmp_path / "model") as (_, url),
        aiohttp.ClientSession(url) as http,
    ):
        body = {"input": TEXTS, "request_id": "embedded"}
        async with http.post("/v1/embeddings", json=body) as response:
            assert len((await response.json())["data"]) == len(TEXTS) > MAX_TRACED
        trace = await trace_of(http, "embedded")
    for role, name in (
        ("gateway", "attempt"),
        ("tokenizer", "prompt"),
        ("scheduler", "sequence"),
        ("scheduler", "run"),
    ):
        assert len(named(trace, role, name)) == MAX_TRACED, (role, name)
    assert len(named(trace, "worker", "prefill")) >= MAX_TRACED
    assert one(trace, "gateway", "collect")["parent"] == trace["spans"][0]["id"]


@pytest.mark.parametrize("kind", ["scheduler", "tokenizer"])
async def test_a_replay_shows_as_another_attempt(tmp_path: Path, kind: str) -> None:
    async with mesh_and_client(tmp_path) as (mesh, http):
        request = asyncio.create_task(ask(http, "again", max_tokens=300))
        await mesh.until(lambda: any(each.emitted for each in mesh.core.sequences.values()))
        lost = mesh.services[kind]._config.instance
        await mesh.lose(kind)
        mesh.start(kind)
        await request
        trace = await trace_of(http, "again")
    first, *_, last = (each["attributes"] for each in named(trace, "gateway", "attempt"))
    assert first["lost"] == f"{kind} {lost}"
    assert "lost" not in last
    assert last["attempt"] > 1
    prompts = [each["attributes"] for each in named(trace, "tokenizer", "prompt")]
    assert prompts[-1]["num_resumed_tokens"] > 0
    if kind == "scheduler":
        assert prompts[0]["reason"] == "scheduler_lost"
    assert one(trace, "scheduler", "sequence")["attributes"]["attempt"] == last["attempt"]


async def test_an_end_by_a_stop_string_is_reported_after_the_reply(tmp_path: Path) -> None:
    async with mesh_and_client(tmp_path) as (mesh, http):
        await ask(http, "stopped", stop=" turns", max_tokens=50)
        trace = await whole_trace(mesh, http, "stopped")
    assert one(trace, "scheduler", "sequence")["attributes"]["reason"] == "cancelled"
    assert one(trace, "worker", "decode")
    assert one(trace, "tokenizer", "prompt")["attributes"]["reason"] == "finished"


async def test_a_client_sees_the_traces_of_its_own_key_only(tmp_path: Path) -> None:
    async with running_mesh(tmp_path) as mesh:
        config = GatewayConfig(mesh_dir=tmp_path, port=0, api_key=["one", "two"])
        mesh.start("gateway-1", GatewayService(config))
        await mesh.until_ready()
        one_key, other_key = ({"x-api-key": key} for key in ("one", "two"))
        async with aiohttp.ClientSession(mesh.url("gateway-1"), headers=one_key) as http:
            await ask(http, "private")
            assert (await trace_of(http, "private"))["id"] == "private"
            for path, status in (("/v1/traces/private", 404), ("/v1/traces", 200)):
                async with http.get(path, headers=other_key) as response:
                    assert response.status == status
                    body = await response.json()
                    assert "private" not in str(body.get("data", ""))


async def test_traces_are_listed_newest_or_slowest_first(tmp_path: Path) -> None:
    async with mesh_and_client(tmp_path) as (_, http):
        for name, num in (("slow", 100), ("fast", 1)):
            await ask(http, name, max_tokens=num)

        async def listed(query: str) -> Any:
            async with http.get(f"/v1/traces?{query}") as response:
                body = await response.json()
                return body["error"]["message"] if response.status == 400 else body["data"]

        assert [each["id"] for each in await listed("")] == ["fast", "slow"]
        (slowest,) = await listed("order=slowest&limit=1")
        assert slowest["id"] == "slow"
        assert slowest["attributes"]["num_output_tokens"] == 100
        assert "expected 1 to 100" in await listed("limit=0")
        assert "expected newest or slowest" in await listed("order=fastest")


async def test_shoal_trace_draws_the_spans_of_the_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")

    async def drawn(*arguments: str) -> tuple[int, str]:
        code = await asyncio.to_thread(draw, [*arguments, "--url", url])
        shown = capsys.readouterr()
        return code, shown.out + shown.err

    async with mesh_and_client(tmp_path) as (mesh, http):
        url = mesh.url()
        await ask(http, "mine", CHAT)
        code, text = await drawn("mine")
        listed, whole = await drawn("--slowest", "--limit", "1"), await drawn("mine", "--json")
        unknown = await drawn("nobody's")
    assert code == listed[0] == whole[0] == 0
    for word in ("gateway", "tokenizer", "scheduler", "worker", "template", "reason=", "━"):
        assert word in text
    assert "mine" in listed[1].splitlines()[1]
    assert json.loads(whole[1])["object"] == "trace"
    assert unknown[0] == 1
    assert "there is no trace" in unknown[1]
    assert (await drawn("mine"))[0] == 2, "the server is gone"
