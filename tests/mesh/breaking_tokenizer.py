"""A real tokenizer with a defect: ``python -m tests.mesh.breaking_tokenizer``.

A prompt with the id that TEST_POISON names breaks an invariant of it.
"""

import os

from services.tokenizer.service import TokenizerService
from shared.link.peer import Peer
from shared.process.service import main
from shared.settings.tokenizer import TokenizerConfig
from shared.wire.codec import Array
from shared.wire.messages import Message, Submit

POISON = int(os.environ.get("TEST_POISON", "-1"))


class BreakingTokenizer(TokenizerService):
    def on_message(self, peer: Peer, message: Message, arrays: list[Array]) -> None:
        if isinstance(message, Submit) and POISON in arrays[0]:
            raise RuntimeError("a broken invariant")
        super().on_message(peer, message, arrays)


if __name__ == "__main__":
    main("tokenizer", TokenizerConfig, BreakingTokenizer)
