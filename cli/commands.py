"""All commands of ``shoal``. A command is a module with ``main(arguments)``, which returns the exit
code; it is imported on demand."""

from typing import NamedTuple


class Command(NamedTuple):
    """``words`` follow the name in the usage."""

    module: str
    words: str
    text: str


COMMANDS = {
    "serve": Command("cli.serve", "[MODEL]", "serves a model with a whole mesh on this machine"),
    "chat": Command("cli.talk.chat", "[PROMPT]", "talks with a model through a server"),
    "complete": Command("cli.talk.complete", "[PROMPT]", "continues a text through a server"),
    "tokenize": Command("cli.tokenize", "[TEXT]", "shows the tokens of a text"),
    "models": Command("cli.models.command", "[FOLDER …]", "lists models and their support"),
    "top": Command("cli.top.command", "", "shows the services of a mesh and their load, live"),
    "trace": Command("cli.trace.command", "[ID]", "draws the timeline of a request"),
    "plan": Command("cli.plan.command", "[MODEL]", "plans memory, settings and workers of a model"),
    "run-batch": Command("cli.batch.command", "-i IN -o OUT", "answers the requests in a file"),
    "bench": Command("cli.bench.command", "WHAT", "measures a server, the engine or quality"),
    "keys": Command("cli.keys", "DIR", "makes the keys of a mesh on several machines"),
    "doctor": Command("cli.doctor.command", "", "checks this machine, and names changes that help"),
    "probe": Command("cli.probe", "[PATH]", "checks the health of a service of this machine"),
    "collect-env": Command("cli.collect_env", "", "prints versions and settings for a bug report"),
}
# One service alone, for a mesh directory or addresses shared with the others.
SERVICES = ("gateway", "tokenizer", "scheduler", "worker")
