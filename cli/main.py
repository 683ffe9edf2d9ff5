"""The console script ``shoal``: the first word names what to run, the rest are its settings."""

import os
import sys

from shared.version import VERSION

SERVICES = ("gateway", "tokenizer", "scheduler", "worker")
USAGE = """\
usage: shoal COMMAND [--setting value …]

  serve         the whole mesh on this machine (the embedded model, or another: --model)
  gateway       one service alone, for a mesh directory shared with the others (--mesh-dir)
  tokenizer
  scheduler
  worker
  run-batch     answers the requests in a file, of OpenAI's batch format (-i IN -o OUT)
  keys DIR      makes the keys that services on several machines need
  probe PATH    checks the health of the service on this machine or in this container
  bench serve   loads an OpenAI-compatible server, this or another, and reports how it answers
  bench engine  times the steps of the engine alone
  bench quality measures what weights in 8 or 4 bits cost in quality

`shoal COMMAND --help` lists the settings; each can also stand as SHOAL_SETTING in the environment
or in a YAML file that --config names."""


def main() -> None:
    command, *arguments = sys.argv[1:] or ["--help"]
    if command == "serve":
        from cli.serve import main as serve

        sys.exit(serve(arguments))
    if command == "run-batch":
        from cli.batch.command import main as run_batch

        sys.exit(run_batch(arguments))
    if command == "keys":
        from cli.keys import main as keys

        sys.exit(keys(arguments))
    if command == "probe":
        from cli.probe import main as probe

        sys.exit(probe(arguments))
    if command == "bench":
        from cli.bench.command import main as bench

        sys.exit(bench(arguments))
    if command in SERVICES:
        os.execv(sys.executable, [sys.executable, "-P", "-m", f"services.{command}", *arguments])
    if command in ("-h", "--help", "help"):
        print(USAGE)
        sys.exit(0)
    if command == "--version":
        print(f"shoal {VERSION}")
        sys.exit(0)
    print(f"shoal: no such command: {command}\n\n{USAGE}", file=sys.stderr)
    sys.exit(2)
