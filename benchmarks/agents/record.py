"""Records the requests of a coding agent: runs the real client against a scripted server.

    npm install --prefix clients @anthropic-ai/claude-code @openai/codex opencode-ai
    python -m benchmarks.agents.record claude-code clients/node_modules/.bin/claude raw.json

The client works on a small project in a scratch folder, and may run any command there. Its requests
contain its own texts; ``convert.py`` makes a file from them that may be published.
"""

import argparse
import asyncio
import json
import os
import platform
import subprocess
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from aiohttp import web

from benchmarks.agents.clients import CLIENTS, Client, write_settings
from benchmarks.agents.steps import CHANGED, FILES, SESSION, Call, Reply
from benchmarks.agents.terminal import Terminal
from benchmarks.agents.wire import sse

TIMEOUT_S = 300
MAX_BODY_BYTES = 1 << 28
SIDE_TEXT = "Counts of fish"
"""The reply to a request without tools, such as one for a title."""
KERNEL = "6.0.0"
"""In place of the machine's."""
HEADERS = ("anthropic-beta", "anthropic-version")


class ScriptedServer:
    """Answers requests with tools by the script, and keeps all bodies."""

    def __init__(self, client: Client, root: Path) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: dict[str, str] = {}
        self.client = client
        self.root = root
        self._num_replies = 0

    async def start(self) -> str:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post(self.client.path, self._answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        return f"http://{host}:{port}"

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.headers = {key: request.headers[key] for key in HEADERS if key in request.headers}
        reply = self._next_reply() if body.get("tools") else Reply("", SIDE_TEXT)
        calls = [self._call(*action) for action in reply.actions]
        self.requests.append(
            {
                "path": request.path_qs,
                "body": body,
                "reply": {
                    "thought": reply.thought,
                    "text": reply.text,
                    "calls": [{"name": name, "arguments": text} for name, text in calls],
                },
            }
        )
        events = self.client.stream(reply.thought, reply.text, calls)
        return web.Response(body=sse(events), content_type="text/event-stream")

    def has_replied(self, num_prompts: int) -> bool:
        return self._num_replies == sum(len(replies) for _, replies in SESSION[:num_prompts])

    def _next_reply(self) -> Reply:
        self._num_replies += 1
        return [reply for _, replies in SESSION for reply in replies][self._num_replies - 1]

    def _call(self, action: str, *values: str) -> Call:
        name, arguments = self.client.tools[action](*map(self._path, values))
        return name, json.dumps(arguments, ensure_ascii=False)

    def _path(self, value: str) -> str:
        """Files of the project by their absolute paths, as clients demand."""
        is_path = (self.root / value).is_file() or value.startswith("tests/")
        return str(self.root / value) if is_path else value


def make_project(root: Path) -> None:
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    author = ("-c", "user.name=fish", "-c", "user.email=fish@example.com")
    for command in (("init", "-q"), ("add", "."), (*author, "commit", "-qm", "pond: count fish")):
        subprocess.run(["git", *command], cwd=root, check=True)


def change_file(root: Path) -> None:
    """A user's change between two prompts."""
    path = root / CHANGED
    path.write_text(path.read_text() + f"# {len(path.read_text())}\n")


async def run_process(command: list[str], root: Path, environment: dict[str, str]) -> None:
    process = await asyncio.create_subprocess_exec(
        *command, cwd=root, env=environment, stdin=asyncio.subprocess.DEVNULL
    )
    if await process.wait():
        raise SystemExit(f"{command[0]} ended with {process.returncode}")


async def run_by_commands(
    server: ScriptedServer, program: str, environment: dict[str, str]
) -> None:
    for number, (prompt, _) in enumerate(SESSION):
        command = [program, *server.client.arguments(prompt, number > 0)]
        await run_process(command, server.root, environment)
        change_file(server.root)


async def run_in_terminal(
    server: ScriptedServer, program: str, environment: dict[str, str]
) -> None:
    """Each prompt follows the end of the reply to the one before."""
    terminal = Terminal([program, *server.client.arguments("", False)], server.root, environment)
    await terminal.settle()
    for number, (prompt, _) in enumerate(SESSION, 1):
        await terminal.type_line(prompt)
        await terminal.until(partial(server.has_replied, number))
        await terminal.settle()
        change_file(server.root)
    terminal.end()


async def record(name: str, program: Path) -> dict[str, Any]:
    client = CLIENTS[name]
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        root = Path(folder) / "pond"
        make_project(root)
        server = ScriptedServer(client, root)
        url = await server.start()
        write_settings(Path(folder), root, url)
        variables = {key: value.format(url=url) for key, value in client.environment.items()}
        environment = {"PATH": os.environ["PATH"], "HOME": folder, "TERM": "xterm", **variables}
        run = run_in_terminal if client.is_interactive else run_by_commands
        async with asyncio.timeout(TIMEOUT_S):
            await run(server, str(program.resolve()), environment)
    return {"client": name, "headers": server.headers, "requests": server.requests}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("client", choices=CLIENTS)
    parser.add_argument("program", type=Path, help="the client's command")
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    version = subprocess.check_output([arguments.program, "--version"], text=True).strip()
    recording = asyncio.run(record(arguments.client, arguments.program)) | {"version": version}
    text = json.dumps(recording, ensure_ascii=False).replace(platform.release(), KERNEL)
    arguments.output.write_text(text)
    print(f"{len(recording['requests'])} requests of {version}")


if __name__ == "__main__":
    main()
