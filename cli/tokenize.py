"""``shoal tokenize``: the tokens of a text, by a model's folder or through a server."""

import argparse
import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from cli.command import run
from cli.console import printable
from cli.exit_codes import OK
from cli.flags import Parser, add_server
from cli.server import Server
from cli.talk.options import read_prompt
from shared.errors import ConfigError, InvalidRequest
from shared.model_folder import read_model_info
from shared.model_location import locate_model

STYLES = ("black on bright_cyan", "black on bright_yellow")


@dataclass(frozen=True, slots=True)
class Tokenized:
    count: int
    tokens: list[int]
    token_strs: list[str]


def main(arguments: list[str]) -> int:
    return run("tokenize", lambda: _tokenize(arguments))


def _tokenize(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    text = read_prompt(options.text, "TEXT")
    if options.decode:
        return _decode(options, text)
    found = _locally(options, text) if options.model else _by_server(options, text)
    if options.json:
        print(json.dumps(asdict(found), ensure_ascii=False))
    elif options.ids:
        print(" ".join(map(str, found.tokens)))
    else:
        _show(found)
    return OK


def _parser() -> Parser:
    parser = Parser(
        "shoal tokenize",
        usage="shoal tokenize [--flag VALUE …] [TEXT …]",
        description="Shows the tokens of a text, by a model's folder (--model) without a server, or"
        " by a server (--url).",
        epilog="Exit codes: 0; 1: the server refused it; 2: a wrong flag, no such model, or no"
        " server at --url.",
    )
    add = parser.add_argument
    add("text", nargs="*", metavar="TEXT", help="standard input is appended, or used alone")
    text = "a Hugging Face folder, or org/name of a model in the Hugging Face cache"
    add("--model", metavar="MODEL", help=text)
    add_server(add)
    add("--chat", action="store_true", help="TEXT is a user message in the chat template")
    add("--no-special", action="store_true", help="without the tokens that begin or end a text")
    add("--decode", action="store_true", help="TEXT holds ids; prints their text")
    add("--ids", action="store_true", help="prints the ids alone, on one line")
    add("--json", action="store_true", help="prints count, tokens and token_strs")
    return parser


def _locally(options: argparse.Namespace, text: str) -> Tokenized:
    model = _text_model(options.model)
    try:
        if options.chat:
            ids = model.encode_chat(_messages(text))
        else:
            ids = model.encode(text, not options.no_special)
    except InvalidRequest as error:
        raise ConfigError(error.message) from None
    written = model.token_bytes
    texts = [written[each].decode(errors="replace") for each in ids.tolist()]
    return Tokenized(len(ids), ids.tolist(), texts)


def _by_server(options: argparse.Namespace, text: str) -> Tokenized:
    body: dict[str, Any] = {"return_token_strs": True}
    if options.chat:
        body |= {"messages": _messages(text)}
    else:
        body |= {"prompt": text, "add_special_tokens": not options.no_special}
    reply = Server(options.url, options.api_key).post("/tokenize", body)
    return Tokenized(reply["count"], reply["tokens"], reply["token_strs"])


def _decode(options: argparse.Namespace, text: str) -> int:
    try:
        ids = np.array([int(each) for each in text.replace(",", " ").split()], np.int64)
    except (ValueError, OverflowError):
        raise ConfigError(f"TEXT: {text[:80]!r} is not a list of ids") from None
    if options.model:
        model = _text_model(options.model)
        try:
            model.check_ids(ids)
        except InvalidRequest as error:
            raise ConfigError(error.message) from None
        decoded = model.decode(ids.tolist(), skips_special_tokens=False)
    else:
        server = Server(options.url, options.api_key)
        decoded = server.post("/detokenize", {"tokens": ids.tolist()})["prompt"]
    print(json.dumps({"text": decoded}, ensure_ascii=False) if options.json else decoded)
    return OK


def _text_model(name: str) -> Any:
    """The tokenizer service's own class, imported only if no server is used."""
    from services.tokenizer.text_model import TextModel

    folder = locate_model(name).folder
    info = read_model_info(folder, [], None)
    return TextModel(folder, info.max_model_len, info.vocab_size)


def _messages(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def _show(found: Tokenized) -> None:
    """At a terminal the text with its tokens in alternating colours; elsewhere a line for each
    token: its id and its text as JSON."""
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        for token, text in zip(found.tokens, found.token_strs, strict=True):
            print(f"{token}\t{json.dumps(text, ensure_ascii=False)}")
        return
    shown = Text()
    for number, text in enumerate(found.token_strs):
        shown.append(printable(text).replace("\n", "⏎\n"), STYLES[number % len(STYLES)])
    console.print(shown)
    console.print(f"{found.count} tokens", style="bold")
    console.print(" ".join(map(str, found.tokens)), style="dim")
