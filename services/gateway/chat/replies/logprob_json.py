"""Logprobs as JSON, in OpenAI's two shapes; large ones come in pieces. Pure."""

import codecs
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, count
from operator import add
from typing import NamedTuple, Protocol

import numpy as np
import orjson

from services.gateway.mesh.output_collector import ChoiceUpdate, Drafts
from services.gateway.mesh.token_table import Spelling, TokenTable
from shared.wire.codec import Array
from shared.wire.messages import ALL_TOKENS, MIN_LOGPROB

PIECE_ENTRIES = 1024

_NONE = np.zeros(0, np.float32)


class LogprobWriter(Protocol):
    """Writes the logprobs of one choice; ``updates`` are consecutive."""

    def write(self, updates: Sequence[ChoiceUpdate]) -> Iterator[bytes]:
        """The ``logprobs`` of a choice with these updates."""


class ChatLogprobs:
    """One object for each token, with its likeliest alternatives."""

    def __init__(self, spelling: Spelling) -> None:
        self._entries = spelling.entries

    def write(self, updates: Sequence[ChoiceUpdate]) -> Iterator[bytes]:
        yield b'{"content":['
        for index, token in enumerate(tokens_of(updates)):
            yield b"," if index else b""
            yield from self.entry(token)
        yield b'],"refusal":null}'

    def entry(self, token: "Token") -> Iterator[bytes]:
        yield b'%b%b,"rank":%d,"top_logprobs":[' % (
            self._entries[token.token_id],
            number(token.logprob),
            token.rank,
        )
        yield from self._alternatives(token)
        yield b"]}"

    def _alternatives(self, token: "Token") -> Iterator[bytes]:
        for index, (ids, values) in enumerate(pieces_of(token)):
            yield b"," if index else b""
            entries = map(self._entries.__getitem__, ids)
            yield b"},".join(map(add, entries, values)) + b"}"


class EchoedPrompt(NamedTuple):
    """The prompt's first token, without a logprob, and the number of alternatives of the others."""

    first_id: int
    num_top: int


class TextLogprobs:
    """Columns, which may begin with the prompt's tokens. ``text_offset`` counts the characters of
    the tokens before, as they are written."""

    def __init__(self, spelling: Spelling, echo: EchoedPrompt | None = None) -> None:
        self._names = spelling.names
        self._keys = spelling.keys
        self._table = spelling.table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0
        self._num_top_of_prompt = echo.num_top if echo is not None else 0
        self._unwritten = [_first_token(echo.first_id)] if echo is not None else []

    def write(self, updates: Sequence[ChoiceUpdate]) -> Iterator[bytes]:
        tokens = [*self._unwritten, *tokens_of(updates, self._num_top_of_prompt)]
        self._unwritten = []
        yield b'{"text_offset":[%b],"token_logprobs":[%b],"tokens":[%b],"top_logprobs":[' % (
            b",".join(b"%d" % self._advance(token.token_id) for token in tokens),
            b",".join(number(token.logprob) for token in tokens),
            b",".join(self._names[token.token_id] for token in tokens),
        )
        for index, token in enumerate(tokens):
            yield b"," if index else b""
            yield from self._alternatives(token) if token.logprob is not None else [b"null"]
        yield b"]}"

    def _alternatives(self, token: "Token") -> Iterator[bytes]:
        """The likeliest of alternatives with the same name, and always the token itself."""
        yield b"{"
        seen: set[bytes] = set()
        own = ([token.token_id], [number(token.logprob)])
        for ids, values in chain(pieces_of(token), [own]):
            keys = [self._keys[each] for each in ids]
            if len({*seen, *keys}) < len(seen) + len(keys):
                firsts = dict(zip(reversed(keys), reversed(values), strict=True))
                keys = [key for key in reversed(firsts) if key not in seen]
                values = [firsts[key] for key in keys]
            if keys:
                yield (b"," if seen else b"") + b",".join(map(add, keys, values))
                seen.update(keys)
        yield b"}"

    def _advance(self, token_id: int) -> int:
        before = self._offset
        self._offset += len(self._decoder.decode(self._table.written(token_id)))
        return before


class Token(NamedTuple):
    """``values`` [k] are logprobs of the alternatives; ``top_ids`` [k] are their ids, descending,
    or None: the values cover the whole vocabulary. ``num_top`` of them are shown. ``logprob`` is
    None for the first token of a prompt."""

    token_id: int
    logprob: float | None
    rank: int
    values: Array
    top_ids: Array | None
    num_top: int


def tokens_of(updates: Sequence[ChoiceUpdate], num_top_of_prompt: int = 0) -> Iterator[Token]:
    """All received alternatives are shown; for tokens of a prompt only ``num_top_of_prompt``."""
    for update in updates:
        if not update.num_tokens:
            continue
        num_tokens, arrays = update.num_tokens, update.arrays
        values = np.maximum(arrays.values, np.float32(MIN_LOGPROB))
        num_values, num_top_ids = update.run.num_values, update.run.num_top_ids
        values = values.reshape(num_tokens, num_values)
        top_ids = arrays.top_ids.reshape(num_tokens, num_top_ids)
        is_whole = num_values > 1 and not num_top_ids
        for index, (token_id, rank) in enumerate(
            zip(arrays.ids.tolist(), arrays.ranks.tolist(), strict=True)
        ):
            row = values[index]
            num_top = num_top_of_prompt if update.of_prompt else len(row) - 1
            top = None if is_whole else top_ids[index]
            yield Token(
                token_id=token_id,
                logprob=row[0],
                rank=rank,
                values=row[1:],
                top_ids=top,
                num_top=num_top,
            )


def _first_token(token_id: int) -> Token:
    return Token(
        token_id=token_id,
        logprob=None,
        rank=0,
        values=_NONE,
        top_ids=_NONE,
        num_top=0,
    )


def pieces_of(token: Token) -> Iterator[tuple[list[int], list[bytes]]]:
    """Ids of the alternatives, likeliest first, of equal ones the lowest, and their logprobs."""
    ids, values = token.top_ids, token.values
    if ids is None:
        ids = np.argsort(-values, kind="stable")
        values = values[ids]
    num_top = len(ids) if token.num_top == ALL_TOKENS else token.num_top
    ids, values = ids[:num_top], values[:num_top]
    for start in range(0, len(ids), PIECE_ENTRIES):
        end = start + PIECE_ENTRIES
        yield ids[start:end].tolist(), numbers(values[start:end])


def numbers(values: Array) -> list[bytes]:
    """The shortest digits that give the same float32."""
    return orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1].split(b",")


def number(value: float | None) -> bytes:
    return b"null" if value is None else str(value).encode()


_BOOLS = (b"false", b"true")


class DraftLogprobs:
    """One object for each draft: its text, its drafter's estimate, its correctness, and the index
    of the completion token that it was for."""

    def __init__(self, spelling: Spelling) -> None:
        self._entries = spelling.entries

    def write(self, several: Iterable[Drafts]) -> Iterator[bytes]:
        yield b'{"content":['
        separator = b""
        for drafts in several:
            for start in range(0, drafts.num, PIECE_ENTRIES):
                piece = b",".join(self._objects(drafts, slice(start, start + PIECE_ENTRIES)))
                yield separator + piece
                separator = b","
        yield b"]}"

    def _objects(self, drafts: Drafts, part: slice) -> Iterator[bytes]:
        arrays = drafts.arrays
        columns = zip(
            arrays.ids[part].tolist(),
            numbers(np.maximum(arrays.values[part], np.float32(MIN_LOGPROB))),
            arrays.ranks[part].tolist(),
            drafts.are_accepted[part].tolist(),
            drafts.positions[part].tolist(),
            strict=True,
        )
        for token_id, logprob, rank, is_accepted, position in columns:
            yield b'%b%b,"rank":%d,"accepted":%b,"position":%d}' % (
                self._entries[token_id],
                logprob,
                rank,
                _BOOLS[is_accepted],
                position,
            )


class LogprobsById:
    """An object by ids for each token, itself first. Those of a prompt have ``num_top_of_prompt``
    alternatives and begin with null for the first token, which has no logprob; None: there is no
    prompt."""

    def __init__(self, table: TokenTable, num_top_of_prompt: int | None = None) -> None:
        self._texts = table.json_texts
        self._num_top_of_prompt = num_top_of_prompt or 0
        self._unwritten = [] if num_top_of_prompt is None else [b"null"]

    def write(self, updates: Sequence[ChoiceUpdate]) -> Iterator[bytes]:
        yield b"[" + b"".join(self._unwritten)
        separator = b"," if self._unwritten else b""
        self._unwritten = []
        for token in tokens_of(updates, self._num_top_of_prompt):
            yield separator + b"{" + self._entry(token.token_id, number(token.logprob), token.rank)
            yield from self._alternatives(token)
            yield b"}"
            separator = b","
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
