"""A real tokenizer with a defect: ``python -m tests.mesh.breaking_tokenizer``.

A prompt with the id that SHOAL_TEST_POISON names breaks an invariant of it.
"""

import os

from services.tokenizer.service import TokenizerService
from shared.codec import Array
from shared.config.tokenizer import TokenizerConfig
from shared.messages import Message, Submit
from shared.peer import Peer
from shared.service import main

POISON = int(os.environ.get("SHOAL_TEST_POISON", "-1"))


class BreakingTokenizer(TokenizerService):
    def on_message(self, peer: Peer, message: Message, arrays: list[Array]) -> None:
        if isinstance(message, Submit) and POISON in arrays[0]:
            raise RuntimeError("a broken invariant")
        super().on_message(peer, message, arrays)


if __name__ == "__main__":
    main("tokenizer", TokenizerConfig, BreakingTokenizer)
