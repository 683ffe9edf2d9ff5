"""``shoal chat``: talks with a model through a server, at a terminal or in a pipe."""

import json
import sys
from base64 import b64encode
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from cli.command import run
from cli.exit_codes import OK
from cli.flags import argument_type
from cli.server import RefusedError, Server
from cli.talk.options import is_piped, make_parser, not_empty, read_prompt, sampling
from cli.talk.pieces import chat_pieces
from cli.talk.printer import Printer
from shared.errors import ConfigError

PATH = "/v1/chat/completions"
DESCRIPTION = (
    "Talks with a model through a server, at a terminal until Ctrl-D: Ctrl-C stops an answer, /new"
    " forgets, /system TEXT sets the system prompt."
)
HINT = (
    "Ctrl-C stops an answer, Ctrl-D ends\n"
    "/new forgets what was said, /system TEXT does too and sets the system prompt"
)

BEGINNINGS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}


def main(arguments: list[str]) -> int:
    return run("chat", lambda: _chat(arguments))


def _chat(arguments: list[str]) -> int:
    parser = make_parser("chat", DESCRIPTION)
    parser.add_argument("--system", type=not_empty, metavar="TEXT", help="system prompt")
    text = "image for the first question; may be repeated"
    parser.add_argument(
        "--image", type=_image_part, action="append", default=[], metavar="FILE", help=text
    )
    options = parser.parse_args(arguments)
    server = Server(options.url, options.api_key)
    is_one_question = bool(options.prompt) or is_piped()
    if options.json and not is_one_question:
        raise ConfigError("--json: needs one question, as PROMPT or on standard input")
    question = read_prompt(options.prompt) if is_one_question else ""
    body = {"model": options.model or server.model(), **sampling(options)}
    if options.probabilities:
        body["logprobs"] = True
    talk = Talk(server, body, Printer(options.probabilities), options.system, options.image)
    if not is_one_question:
        talk.note(f"{body['model']} at {server.url}\n{HINT}")
        return talk.at_terminal()
    if options.json:
        print(json.dumps(talk.reply_to(question), ensure_ascii=False))
    else:
        talk.answer(question)
    return OK


@argument_type
def _image_part(path: str) -> dict[str, Any]:
    """Raises ValueError for a file that is no image, or cannot be read."""
    try:
        file = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    kinds = (kind for beginning, kind in BEGINNINGS.items() if file.startswith(beginning))
    if (kind := next(kinds, None)) is None:
        raise ValueError(f"{path}: no PNG, JPEG, GIF or WebP")
    url = f"data:image/{kind};base64,{b64encode(file).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


class Talk:
    """The messages so far, and the next question. ``body`` has the other fields of a request;
    ``images`` are parts of the first question."""

    def __init__(
        self,
        server: Server,
        body: dict[str, Any],
        printer: Printer,
        system: str | None,
        images: list[dict[str, Any]],
    ) -> None:
        self._server = server
        self._body = body
        self._printer = printer
        self._images = images
        self.note = printer.note
        self._begin(system)

    def _begin(self, system: str | None) -> None:
        first = [{"role": "system", "content": system}] if system else []
        self._messages: list[dict[str, Any]] = first
        self._system = system

    def at_terminal(self) -> int:
        """Reads lines until the end of the input."""
        with suppress(ImportError):
            import readline  # noqa: F401, with it input() has keys for editing and for the past
        while True:
            try:
                line = input("> ").strip()
            except KeyboardInterrupt:
                print()
                continue
            except EOFError:
                print()
                return OK
            if line:
                self._take(line)

    def _take(self, line: str) -> None:
        """Sends a line; after a refusal the question is dropped."""
        if line == "/new":
            self._begin(self._system)
            self.note("(forgotten)")
        elif line.startswith("/system "):
            self._begin(line.removeprefix("/system ").strip())
            self.note("(forgotten; the system prompt is set)")
        elif line.startswith("/"):
            self.note(HINT)
        else:
            try:
                self.answer(line, is_stoppable=True)
            except (RefusedError, ConfigError) as error:
                print(f"shoal chat: {error}", file=sys.stderr)

    def reply_to(self, question: str) -> Any:
        """The server's complete reply."""
        return self._server.post(PATH, self._request(question))

    def answer(self, question: str, is_stoppable: bool = False) -> None:
        """Writes the answer as it arrives, and appends question and answer to the messages. If it
        ``is_stoppable`` Ctrl-C ends only the answer, and its written part is kept."""
        request, text = self._request(question) | {"stream": True}, ""
        try:
            with closing(self._server.stream(PATH, request)) as events:
                for piece in chat_pieces(events):
                    self._printer.write(piece)
                    text += "" if piece.is_reasoning else piece.text
        except KeyboardInterrupt:
            if not is_stoppable:
                raise
            self._printer.end()
            self.note("(stopped)")
        self._printer.end()
        self._messages = [*request["messages"], {"role": "assistant", "content": text}]

    def _request(self, question: str) -> dict[str, Any]:
        content: Any = question
        if self._images and all(each["role"] == "system" for each in self._messages):
            content = [*self._images, {"type": "text", "text": question}]
        return self._body | {"messages": [*self._messages, {"role": "user", "content": content}]}
