"""Sessions of coding agents find their prompts in the prefix cache.

The sessions were recorded with the real clients, their texts are made up (``benchmarks/agents``).
The prompts go through a whole mesh, and a fake engine writes the recorded replies.
"""

import json
import lzma
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from tokenizers import Tokenizer

from services.gateway.apis.messages.requests.signature import Signer
from shared.model_folder import TOKENIZER_FILE
from shared.wire.messages import Capacity
from tests.mesh.long_model import long_model
from tests.mesh.mesh import Mesh, running_mesh
from tests.mesh.thinking_model import make_thinking_model
from tests.services.gateway.apis.messages.events import read_message
from tests.services.tokenizer.chat.samples import QWEN

RECORDED = Path(__file__).parent / "recorded" / "agents"
CLIENTS = ("claude-code", "codex", "opencode")
BLOCK_SIZE = 16
CAPACITY = Capacity(8192, BLOCK_SIZE, 8, 8192, 65536, max_num_steps=4)
MIN_TURNS = 20
SHARE = 0.95
END = "<|im_end|>"
DATA = "data: "

Body = dict[str, Any]
Reply = dict[str, Any]
Change = Callable[[Body, int], Body]
"""Another form of the body with this number."""


def in_blocks(num_tokens: int) -> int:
    return num_tokens // BLOCK_SIZE * BLOCK_SIZE


def num_common(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


@dataclass
class Session:
    """Tokens of each request, in full blocks: ``cached`` ones; ``possible`` ones, a prefix of an
    earlier prompt and its reply; and ``earlier`` ones, the whole last prompt and its reply."""

    cached: list[int] = field(default_factory=list)
    possible: list[int] = field(default_factory=list)
    earlier: list[int] = field(default_factory=list)
    _seen: list[np.ndarray] = field(default_factory=list)

    def add(self, prompt: list[int], reply: list[int], num_cached: int) -> None:
        shared = [num_common(np.array(prompt), each) for each in self._seen]
        self.cached.append(num_cached)
        self.possible.append(in_blocks(max(shared, default=0)))
        self.earlier.append(in_blocks(len(self._seen[-1])) if self._seen else 0)
        self._seen.append(np.array(prompt + reply))

    @property
    def cached_share(self) -> float:
        return sum(self.cached) / sum(self.possible)

    @property
    def kept_share(self) -> float:
        """The share of the history that a prompt repeats token by token."""
        return sum(self.possible) / sum(self.earlier)


def load(client: str) -> dict[str, Any]:
    packed = (RECORDED / f"{client}.json.xz").read_bytes()
    recording: dict[str, Any] = json.loads(lzma.decompress(packed))
    return recording


def written(reply: Reply, thinks: bool) -> str:
    """A reply as the model writes it."""
    thought = f"<think>\n{reply['thought']}\n</think>\n\n" if thinks and reply["thought"] else ""
    calls = [
        f'<tool_call>\n{{"name": "{call["name"]}", "arguments": {call["arguments"]}}}\n</tool_call>'
        for call in reply["calls"]
    ]
    return thought + "\n".join([text for text in (reply["text"], *calls) if text]) + END


def events_of(stream: str) -> list[Any]:
    lines = [line.removeprefix(DATA) for line in stream.splitlines() if line.startswith(DATA)]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def read_reply(path: str, stream: str) -> tuple[Reply, dict[str, Any]]:
    """The reply as the client has it, and its usage."""
    if path.startswith("/v1/messages"):
        message = read_message(stream)
        return reply_of(parts_of_message(message)), message["usage"]
    events = events_of(stream)
    if path == "/v1/responses":
        response = events[-1]["response"]
        return reply_of(parts_of_response(response)), response["usage"]
    return reply_of(parts_of_chat(events)), events[-1]["usage"]


Part = tuple[str, Any]


def parts_of_message(message: dict[str, Any]) -> Iterator[Part]:
    for block in message["content"]:
        match block["type"]:
            case "tool_use":
                yield "calls", (block["name"], json.dumps(block["input"], ensure_ascii=False))
            case "thinking":
                yield "thought", block["thinking"]
            case _:
                yield "text", block["text"]


def parts_of_response(response: dict[str, Any]) -> Iterator[Part]:
    for item in response["output"]:
        match item["type"]:
            case "function_call":
                yield "calls", (item["name"], item["arguments"])
            case "reasoning":
                yield "thought", "".join(part["text"] for part in item["summary"])
            case _:
                yield "text", "".join(part["text"] for part in item["content"])


def parts_of_chat(chunks: list[Any]) -> Iterator[Part]:
    calls: dict[int, list[str]] = {}
    for delta in (choice["delta"] for chunk in chunks for choice in chunk["choices"]):
        yield "text", delta.get("content") or ""
        yield "thought", delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls") or ():
            function = call["function"]
            parts = calls.setdefault(call["index"], [function.get("name") or "", ""])
            parts[1] += function.get("arguments") or ""
    for name, arguments in calls.values():
        yield "calls", (name, arguments)


def reply_of(parts: Iterator[Part]) -> Reply:
    reply: Reply = {"thought": "", "text": "", "calls": []}
    for kind, value in parts:
        if kind == "calls":
            reply["calls"].append({"name": value[0], "arguments": value[1]})
        else:
            reply[kind] += value
    return reply


def num_cached(usage: dict[str, Any]) -> int:
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or usage
    name = "cache_read_input_tokens" if details is usage else "cached_tokens"
    return int(details[name])


def with_our_signatures(value: Any, fingerprint: str) -> Any:
    """A body with the signatures that this model gives its thoughts."""
    if isinstance(value, list):
        return [with_our_signatures(each, fingerprint) for each in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") == "thinking" and "signature" in value:
        signer = Signer(fingerprint)
        signer.add(value["thinking"])
        return value | {"signature": signer.signature()}
    return {name: with_our_signatures(each, fingerprint) for name, each in value.items()}


async def replay(
    mesh: Mesh, client: str, change: Change = lambda body, _: body, thinks: bool = False
) -> Session:
    recording, session = load(client), Session()
    tokenizer = Tokenizer.from_file(str(mesh.model / TOKENIZER_FILE))
    prompts: list[list[int]] = []

    def begin(prompt: list[int], choice: int) -> int:
        prompts[:] = [prompt]
        return 0

    mesh.engine.starts_at = begin
    async with aiohttp.ClientSession(mesh.url()) as http:
        for number, request in enumerate(recording["requests"]):
            expected = request["reply"] if thinks else request["reply"] | {"thought": ""}
            ids = tokenizer.encode(written(expected, thinks), add_special_tokens=False).ids
            mesh.engine.ids = ids
            limit = "max_output_tokens" if "input" in request["body"] else "max_tokens"
            body = change(request["body"], number) | {limit: len(ids)}
            body = with_our_signatures(body, mesh.engine.model_info.fingerprint)
            path = request["path"]
            async with http.post(path, json=body, headers=recording["headers"]) as response:
                stream = await response.text()
            assert response.status == 200, stream
            reply, usage = read_reply(path.partition("?")[0], stream)
            assert reply == expected
            if body.get("tools"):
                session.add(prompts[0], ids, num_cached(usage))
    assert len(session.cached) >= MIN_TURNS
    return session


def with_nonce(body: Body, number: int) -> Body:
    """As most versions of Claude Code send it; the recorded one did not."""
    first, *others = body["system"]
    return body | {"system": [first | {"text": f"{first['text']} cch={number:05x};"}, *others]}


def with_nonce_at_the_end(body: Body, number: int) -> Body:
    header, *texts = (block["text"] for block in with_nonce(body, number)["system"])
    return body | {"system": "\n".join([*texts, header])}


def with_clock(body: Body, number: int) -> Body:
    *others, last = body["system"]
    return body | {"system": [*others, last | {"text": f"{last['text']}\nIt is {number} o'clock."}]}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return long(tmp_path / "shoal-tiny")


@pytest.fixture
def thinking_model(tmp_path: Path) -> Path:
    """Its template repeats the reasoning after the last user's message, as Qwen3's does."""
    thinking = make_thinking_model(tmp_path / "thinking")
    config = json.loads((thinking / "tokenizer_config.json").read_text())
    (thinking / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": QWEN}))
    return long(tmp_path / "shoal-tiny", source=thinking)


def long(folder: Path, **source: Path) -> Path:
    folder.mkdir()
    return long_model(folder, CAPACITY.max_model_len, **source)


@pytest.mark.slow
@pytest.mark.parametrize("client", CLIENTS)
async def test_a_session_finds_its_history_in_the_cache(client: str, model: Path, tmp_path: Path):
    async with running_mesh(tmp_path, CAPACITY, step_s=0, model=model) as mesh:
        session = await replay(mesh, client)
        await mesh.until_idle()
    assert session.cached_share >= SHARE
    assert session.kept_share >= SHARE


@pytest.mark.slow
@pytest.mark.parametrize("change", [with_nonce, with_nonce_at_the_end])
async def test_a_line_that_changes_in_each_request_costs_nothing(
    change: Change, model: Path, tmp_path: Path
):
    async with running_mesh(tmp_path, CAPACITY, step_s=0, model=model) as mesh:
        session = await replay(mesh, "claude-code", change)
    assert session.cached_share >= SHARE
    assert session.kept_share >= SHARE


@pytest.mark.slow
async def test_a_changing_line_of_another_meaning_costs_only_the_tokens_after_it(
    model: Path, tmp_path: Path
):
    async with running_mesh(tmp_path, CAPACITY, step_s=0, model=model) as mesh:
        session = await replay(mesh, "claude-code", with_clock)
    assert session.cached_share >= SHARE
    assert min(session.possible[1:]) > 3000, "the system text before it"


@pytest.mark.slow
@pytest.mark.parametrize("client", CLIENTS)
async def test_a_session_with_reasoning_finds_its_history_in_the_cache(
    client: str, thinking_model: Path, tmp_path: Path
):
    async with running_mesh(tmp_path, CAPACITY, step_s=0, model=thinking_model) as mesh:
        session = await replay(mesh, client, thinks=True)
    assert session.cached_share >= SHARE
    assert session.kept_share >= SHARE
