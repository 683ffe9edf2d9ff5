"""`shoal chat`, `complete`, `tokenize` and `top` against a gateway over HTTP with a scripted
tokenizer."""

import asyncio
import io
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path

import pytest
from msgspec import structs

from cli.commands import COMMANDS
from services.gateway.service import GatewayService
from shared.model_folder import EMBEDDED_MODEL
from shared.wire.messages import State
from tests.services.gateway.fakes import (
    MODEL,
    FakeTokenizer,
    fake_tokenizer,
    running_gateway,
    until,
)

PROGRAM = """
import signal
from cli.main import main

signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background ignore it
main()
"""


@pytest.fixture
async def tokenizer(tmp_path: Path) -> AsyncIterator[FakeTokenizer]:
    async with fake_tokenizer(tmp_path) as fake:
        yield fake


@pytest.fixture
async def gateway(tmp_path: Path, tokenizer: FakeTokenizer) -> AsyncIterator[GatewayService]:
    async with running_gateway(tmp_path) as service:
        await until(lambda: service.status().state == State.READY)
        yield service


async def run(gateway: GatewayService | None, name: str, *words: str) -> int:
    """Runs a command in a thread, without a terminal."""
    url = () if gateway is None else ("--url", f"http://127.0.0.1:{gateway.port}/v1")
    return await asyncio.to_thread(import_module(COMMANDS[name].module).main, [*url, *words])


@pytest.fixture(autouse=True)
def _no_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))


async def test_a_text_is_continued_and_piped_input_belongs_to_the_prompt(
    gateway: GatewayService, tokenizer: FakeTokenizer, capsys, monkeypatch
):
    monkeypatch.setattr(sys, "stdin", io.StringIO("second\n"))
    running = asyncio.create_task(run(gateway, "complete", "the", "first", "--max-tokens", "5"))
    asked = await tokenizer.answer(" one", " two")
    assert await running == 0
    assert bytes(asked.prompt) == b"the first\n\nsecond"
    assert asked.submit.params.max_tokens == 5
    assert capsys.readouterr().out == " one two\n"


async def test_a_question_is_answered_as_text_or_as_the_servers_reply(
    gateway: GatewayService, tokenizer: FakeTokenizer, capsys
):
    for flags in ((), ("--json",)):
        running = asyncio.create_task(
            run(gateway, "chat", "Who", "leads?", "--system", "Be short.", *flags)
        )
        asked = await tokenizer.answer("No", " fish")
        assert await running == 0
        assert json.loads(bytes(asked.prompt)) == [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "Who leads?"},
        ]
        printed = capsys.readouterr().out
        if flags:
            assert json.loads(printed)["choices"][0]["message"]["content"] == "No fish"
        else:
            assert printed == "No fish\n"


async def test_an_image_goes_with_the_question(tmp_path: Path, capsys) -> None:
    model = structs.replace(MODEL, media=["image"])
    picture, other = tmp_path / "a.png", tmp_path / "b.txt"
    picture.write_bytes(b"\x89PNG and more")
    other.write_bytes(b"words")
    async with fake_tokenizer(tmp_path, model=model) as fake, running_gateway(tmp_path) as service:
        await until(lambda: service.status().state == State.READY)
        running = asyncio.create_task(run(service, "chat", "--image", str(picture), "What?"))
        asked = await fake.answer("A fish.")
        assert await running == 0
        [file] = asked.files
        assert bytes(file) == picture.read_bytes()
        [message] = json.loads(bytes(asked.prompt))
        assert [part["type"] for part in message["content"]] == ["image", "text"]
    for path, why in ((other, "no PNG, JPEG, GIF or WebP"), (tmp_path / "c", "No such file")):
        assert await run(None, "chat", "--image", str(path), "What?") == 2
        assert f"--image: {path}: {why}" in capsys.readouterr().err


async def test_exit_codes_tell_the_cause_of_a_failure(
    gateway: GatewayService, tokenizer: FakeTokenizer, unused_tcp_port: int, capsys
):
    assert await run(gateway, "chat", "hi", "--model", "cat") == 1
    assert 'model is "cat"' in capsys.readouterr().err
    assert await run(gateway, "chat", "hi", "--temperature", "7") == 2
    assert await run(gateway, "complete") == 2
    assert "PROMPT: missing" in capsys.readouterr().err
    assert await run(None, "chat", "hi", "--url", f"http://127.0.0.1:{unused_tcp_port}") == 2
    assert "does not answer" in capsys.readouterr().err
    running = asyncio.create_task(run(gateway, "complete", "x"))
    request = await tokenizer.accepted()
    request.text(" half")
    request.fail(500, "broken", "it broke")
    assert await running == 1
    output = capsys.readouterr()
    assert (output.out, "it broke" in output.err) == (" half", True)


async def test_tokens_are_shown_by_a_server_and_by_a_folder(
    gateway: GatewayService, tokenizer: FakeTokenizer, capsys
):
    assert await run(gateway, "tokenize", "--ids", "AB") == 0
    assert capsys.readouterr().out == "65 66\n"
    assert await run(gateway, "tokenize", "--decode", "65", "66") == 0
    assert capsys.readouterr().out == " w65 w66\n"
    folder = str(EMBEDDED_MODEL)
    assert await run(None, "tokenize", "--model", folder, "--json", "Hello, fish") == 0
    found = json.loads(capsys.readouterr().out)
    assert "".join(found["token_strs"]) == "Hello, fish"
    assert found["count"] == len(found["tokens"])
    ids = [str(each) for each in found["tokens"]]
    assert await run(None, "tokenize", "--model", folder, "--decode", *ids) == 0
    assert capsys.readouterr().out == "Hello, fish\n"
    assert await run(None, "tokenize", "--model", folder, "--decode", "99999999") == 2
    assert await run(None, "tokenize", "--model", folder, "--decode", str(2**70)) == 2
    assert f"'{2**70}' is not a list of ids" in capsys.readouterr().err
    assert await run(None, "tokenize", "--model", "/nowhere", "x") == 2
    capsys.readouterr()
    assert await run(None, "tokenize", "--model", folder) == 2
    assert "TEXT: missing" in capsys.readouterr().err


async def test_a_prompt_of_other_bytes_than_utf_8_is_refused(capsys, monkeypatch):
    given = os.fsdecode(b"a\xff")
    assert await run(None, "tokenize", "--model", str(EMBEDDED_MODEL), given) == 2
    assert "TEXT: not UTF-8: surrogates not allowed" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), "utf-8"))
    assert await run(None, "complete") == 2
    assert "PROMPT: not UTF-8: invalid start byte" in capsys.readouterr().err


async def test_a_client_without_a_key_gets_a_hint(tmp_path: Path, tokenizer: FakeTokenizer, capsys):
    async with running_gateway(tmp_path, api_key=["k"]) as gateway:
        await until(lambda: gateway.status().state == State.READY)
        assert await run(gateway, "top", "--once") == 1
        assert capsys.readouterr().err.endswith("; give it by --api-key or SHOAL_API_KEY\n")
        assert await run(gateway, "top", "--once", "--api-key", "x") == 1
        assert "--api-key" not in capsys.readouterr().err


async def test_the_mesh_is_shown_once(gateway: GatewayService, capsys):
    assert await run(gateway, "top", "--json") == 1, "the tokenizer does not answer"
    mesh = json.loads(capsys.readouterr().out)
    states = {each["role"]: each["state"] for each in mesh["services"]}
    assert states == {"gateway": "ready", "tokenizer": "suspect"}


async def test_a_table_in_a_pipe_has_whole_lines_and_every_figure(
    gateway: GatewayService, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "40")
    assert await run(gateway, "top", "--once", "--interval", "0.1") == 1
    head, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["gateway", "tokenizer"]
    cores = head.index("CORES")
    assert float(lines[0][cores:].split()[0]) >= 0, "two looks say how busy it was"
    assert "it does not answer" in lines[1]
    assert not any(line.endswith(" ") for line in (head, *lines))


class Terminal:
    """The output of a program on a terminal so far."""

    def __init__(self, process: asyncio.subprocess.Process, descriptor: int) -> None:
        self.process = process
        self.written = ""
        self._descriptor = descriptor
        os.set_blocking(descriptor, False)

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    async def until(self, text: str) -> str:
        """The output before ``text``."""
        async with asyncio.timeout(20):
            while text not in self.written:
                try:
                    self.written += os.read(self._descriptor, 4096).decode(errors="replace")
                except (BlockingIOError, OSError):
                    assert self.process.returncode is None, self.written
                    await asyncio.sleep(0.01)
        before, _, self.written = self.written.partition(text)
        return before


@asynccontextmanager
async def at_terminal(*words: str):
    ours, theirs = os.openpty()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM, *words),
        cwd=Path(__file__).parents[2],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "100"},
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        os.close(ours)


async def test_ctrl_c_stops_the_answer_and_the_talk_goes_on(
    gateway: GatewayService, tokenizer: FakeTokenizer
):
    url = f"http://127.0.0.1:{gateway.port}"
    async with at_terminal("chat", "--url", url) as terminal:
        await terminal.until("> ")
        terminal.type("first\n")
        request = await tokenizer.accepted()
        request.text("It\x1b[2J is")
        await terminal.until("It�[2J is")
        terminal.process.send_signal(signal.SIGINT)
        await terminal.until("(stopped)")
        assert (await tokenizer.cancelled.get()).keys[0].request == request.submit.request
        await terminal.until("> ")
        terminal.type("second\n")
        asked = await tokenizer.answer("Done")
        await terminal.until("Done")
        said = [each["content"] for each in json.loads(bytes(asked.prompt))]
        assert said == ["first", "It\x1b[2J is", "second"]
        await terminal.until("> ")
        terminal.type("\x04")
        assert await asyncio.wait_for(terminal.process.wait(), 20) == 0


async def test_hints_beside_a_conversation_fit_80_columns(
    gateway: GatewayService, tokenizer: FakeTokenizer
):
    url = f"http://127.0.0.1:{gateway.port}"
    async with at_terminal("chat", "--url", url) as terminal:
        hint = await terminal.until("> ")
        assert "/system TEXT" in hint
        plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", hint)
        assert max(map(len, plain.splitlines())) < 80
        terminal.type("/system Be short.\n")
        await terminal.until("(forgotten; the system prompt is set)")
        terminal.type("hi\n")
        asked = await tokenizer.answer("Hello")
        said = [each["content"] for each in json.loads(bytes(asked.prompt))]
        assert said == ["Be short.", "hi"]


async def test_tokens_have_colours_by_their_probability(
    gateway: GatewayService, tokenizer: FakeTokenizer
):
    url = f"http://127.0.0.1:{gateway.port}"
    async with at_terminal("chat", "--url", url, "--probabilities", "hi") as terminal:
        request = await tokenizer.accepted()
        assert request.submit.params.logprobs == 0
        request.logprobs(" w7", [7], [[-0.01]])
        request.logprobs(" w8", [8], [[-4.0]])
        request.finish()
        certain = await terminal.until(" w7")
        surprising = await terminal.until(" w8")
        assert "\x1b[" in certain
        assert certain.rpartition("\x1b")[2] != surprising.rpartition("\x1b")[2]


async def test_q_ends_the_live_view_among_other_keys(gateway: GatewayService):
    url = f"http://127.0.0.1:{gateway.port}"
    async with at_terminal("top", "--url", url, "--interval", "0.2") as terminal:
        await terminal.until("tokenizer t1")
        await terminal.until("q ends")
        terminal.type("\x1b[Aq")
        assert await asyncio.wait_for(terminal.process.wait(), 20) == 0
