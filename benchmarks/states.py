"""First tokens of chats with a model of mostly layers with a state, beside llama.cpp.

Chats of five turns take turns on whole servers, as in ``benchmarks.windows``. Both have the memory
for all of them.
"""

import argparse
from pathlib import Path

import uvloop

from benchmarks import servers
from benchmarks.checkpoints import checkpoint
from benchmarks.report import write
from benchmarks.windows import MAX_LEN, NUM_CHATS, llama, measure

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama", type=Path, required=True, help="the program llama-server")
    parser.add_argument("--gguf", type=Path, required=True, help="the model, by its own converter")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chats", type=int, default=NUM_CHATS)
    arguments = parser.parse_args()
    flags = "--max-model-len", str(MAX_LEN), "--enable-prompt-tokens-details"
    every = [
        servers.shoal(checkpoint("states"), *flags),
        llama(arguments.llama, arguments.gguf, arguments.chats),
    ]
    write("states", uvloop.run(measure(every, arguments.rounds, arguments.chats)))
