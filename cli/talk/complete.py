"""``shoal complete``: continues a prompt through a server."""

import json
from contextlib import closing

from cli.command import run
from cli.exit_codes import OK
from cli.server import Server
from cli.talk.options import make_parser, read_prompt, sampling
from cli.talk.pieces import text_pieces
from cli.talk.printer import Printer

PATH = "/v1/completions"


def main(arguments: list[str]) -> int:
    return run("complete", lambda: _complete(arguments))


def _complete(arguments: list[str]) -> int:
    parser = make_parser("complete", "Continues a text through an OpenAI-compatible server.")
    parser.add_argument("--echo", action="store_true", help="prints the prompt before its end")
    options = parser.parse_args(arguments)
    prompt = read_prompt(options.prompt)
    server = Server(options.url, options.api_key)
    body = {"model": options.model or server.model(), "prompt": prompt, **sampling(options)}
    if options.probabilities:
        body["logprobs"] = 0
    if options.echo:
        body["echo"] = True
    if options.json:
        print(json.dumps(server.post(PATH, body), ensure_ascii=False))
        return OK
    printer = Printer(options.probabilities)
    with closing(server.stream(PATH, body | {"stream": True})) as events:
        for piece in text_pieces(events):
            printer.write(piece)
    printer.end()
    return OK
