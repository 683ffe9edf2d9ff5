"""The logprobs of a prompt as JSON, in vLLM's shape. Pure."""

from collections.abc import Iterator, Sequence
from itertools import count

from services.gateway.chat.replies.logprob_json import Token, number, pieces_of, tokens_of
from services.gateway.mesh.output_collector import ChoiceUpdate
from services.gateway.mesh.token_table import TokenTable


class PromptLogprobs:
    """An object by ids for each token, itself first; null for the first token, which follows
    none."""

    def __init__(self, table: TokenTable, num_top: int) -> None:
        self._texts = table.json_texts
        self._num_top = num_top

    def write(self, updates: Sequence[ChoiceUpdate]) -> Iterator[bytes]:
        yield b"[null"
        for token in tokens_of(updates, self._num_top):
            yield b",{" + self._entry(token.token_id, number(token.logprob), token.rank)
            yield from self._alternatives(token)
            yield b"}"
        yield b"]"

    def _alternatives(self, token: Token) -> Iterator[bytes]:
        ranks = count(1)
        for ids, values in pieces_of(token):
            yield b"".join(
                b"," + self._entry(token_id, value, rank)
                for token_id, value, rank in zip(ids, values, ranks, strict=False)
                if token_id != token.token_id
            )

    def _entry(self, token_id: int, value: bytes, rank: int) -> bytes:
        return b'"%d":{"logprob":%b,"rank":%d,"decoded_token":%b}' % (
            token_id,
            value,
            rank,
            self._texts[token_id],
        )
