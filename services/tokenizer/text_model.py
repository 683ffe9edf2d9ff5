"""The textual half of a model folder: vocabulary, special tokens and chat templates."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tokenizers import AddedToken, Encoding, Tokenizer

from services.tokenizer.chat.prompt import render_prompt
from services.tokenizer.chat.template import ChatTemplate, TooMuchText
from services.tokenizer.chat.template_files import read_json, read_special_tokens, read_templates
from services.tokenizer.chat.template_options import check_defaults
from services.tokenizer.chat.templates import ChatTemplates
from services.tokenizer.detokenize import (
    NUM_SEAM_IDS,
    SPACE,
    Seam,
    partial_ids,
    seam_of,
    token_bytes,
)
from services.tokenizer.observer import Measure, unmeasured
from services.tokenizer.output_formats import AUTO, PromptEnd, find_formats
from services.tokenizer.pairs.template import find_pair_template
from shared.errors import ConfigError, InvalidRequest
from shared.model_folder import TOKENIZER_FILE, find_file, read_eos_ids
from shared.text.utf8 import MAX_CHAR_BYTES
from shared.wire.codec import Array
from shared.wire.messages import ChatOptions, Convert, OutputStart, PromptKind, TextOptions

Of = TypeVar("Of")


@dataclass(frozen=True, slots=True)
class Truncation:
    """A prompt keeps its last ``num_ids``, or its first ones if it ``keeps_start``."""

    num_ids: int
    keeps_start: bool = False

    def cut(self, ids: Array) -> Array:
        if len(ids) <= self.num_ids:
            return ids
        return ids[: self.num_ids] if self.keeps_start else ids[len(ids) - self.num_ids :]

    def cut_encoding(self, encoding: Encoding, of_tokens: list[Of]) -> list[Of]:
        """The rest of the tokens' values (such as ids) after the cut; the special tokens that the
        tokenizer puts around a text stay."""
        added, num = encoding.special_tokens_mask, len(of_tokens)
        begin = added.index(0) if 0 in added else num
        end = num - (added[::-1].index(0) if 0 in added else 0)
        room = max(self.num_ids - begin - (num - end), 0)
        text = of_tokens[begin:end]
        kept = text[:room] if self.keeps_start else text[max(len(text) - room, 0) :]
        return [*of_tokens[:begin], *kept, *of_tokens[end:]][: self.num_ids]


def truncation_of(options: TextOptions | Convert) -> Truncation | None:
    """None: the prompt stays as it is."""
    if options.max_prompt_tokens is None:
        return None
    return Truncation(options.max_prompt_tokens, options.keeps_prompt_start)


FIND_PAIR_TEMPLATE: tuple[Callable[[Mapping[str, str], bool, bool], ChatTemplate | None], ...] = (
    find_pair_template,
    lambda sources, is_set, by_token: None,
)
"""The first one is used."""
NO_OPTIONS = ChatOptions()


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """The operator's settings: a file with a ``template`` instead of the folder's, permission for
    templates in requests, the formats of output, ``auto``, ``none`` or a name, the score of a pair
    as a token's probability, and default variables of templates."""

    template: Path | None = None
    trusts_requests: bool = False
    tool_parser: str = AUTO
    reasoning_parser: str = AUTO
    classifies_by_token: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


DEFAULTS = ChatSettings()


class TextModel:
    """Text ⇄ ids. Its methods may be called from several threads.

    A text that must have more than ``max_model_len`` tokens is refused before it is encoded, which
    for megabytes takes seconds. All ids are below ``vocab_size``; ``end_ids`` end a text, and
    tokens of ``partial_ids`` are not whole characters; ``token_bytes`` has each id as text.
    ``tools`` and ``reasoning`` are the model's formats for tool calls and reasoning.
    ``num_token_ids`` counts the ids of the tokenizer, some of which the model may lack.
    ``description`` is the folder's description of the tokenizer. ``pair_template`` writes a query
    and a document; None: they are encoded side by side.
    """

    def __init__(
        self, folder: Path, max_model_len: int, vocab_size: int, settings: ChatSettings = DEFAULTS
    ) -> None:
        config = read_json(folder / "tokenizer_config.json")
        self._tokenizer = _load_tokenizer(folder)
        self._tokenizer.no_truncation()  # some folders store it, and it would cut in silence
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self._added_texts = {skips: _added_texts(added, skips) for skips in (True, False)}
        self.token_bytes = token_bytes(self._tokenizer, vocab_size)
        self.partial_ids = frozenset(partial_ids(self.token_bytes))
        self.end_ids = read_eos_ids(folder, vocab_size)
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        vocabulary = self._tokenizer.get_vocab()
        self.num_token_ids = max(vocabulary.values()) + 1
        self.max_chars = max_model_len * max(map(len, vocabulary))
        self.special_tokens = read_special_tokens(folder, config)
        sources = read_templates(folder, config, settings.template)
        self.templates = ChatTemplates(sources, settings.trusts_requests)
        self._template_kwargs = check_defaults(settings.template_kwargs, self.special_tokens)
        self.description = _description(config, self.templates.source)
        is_set, by_token = settings.template is not None, settings.classifies_by_token
        self.pair_template = FIND_PAIR_TEMPLATE[0](sources, is_set, by_token)
        self.added_ids = {each.content: i for i, each in added.items() if i < vocab_size}
        self.tools, self.reasoning = find_formats(
            settings.tool_parser, settings.reasoning_parser, self.templates.source, self.added_ids
        )
        special_ids = [token_id for token_id, each in added.items() if each.special]
        self._prompt_end = PromptEnd(self.reasoning, self.added_ids, special_ids, self.decode_many)

    def encode(
        self, text: str, adds_special_tokens: bool = True, truncation: Truncation | None = None
    ) -> np.ndarray:
        """Ids of a plain prompt, with the special tokens the model's tokenizer adds: [n] int32."""
        encoding = self.encoding(text, adds_special_tokens)
        ids = encoding.ids
        if truncation is not None:
            ids = truncation.cut_encoding(encoding, ids)
        return np.array(ids, np.int32)

    def offsets(
        self, text: str, adds_special_tokens: bool, truncation: Truncation | None = None
    ) -> np.ndarray:
        """Where in ``text`` each of its tokens begins and ends, in characters: [2 n] int64. Both
        are 0 for special tokens around it."""
        encoding = self.encoding(text, adds_special_tokens)
        pairs = encoding.offsets
        if truncation is not None:
            pairs = truncation.cut_encoding(encoding, pairs)
        return np.array(pairs, np.int64).ravel()

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        options: ChatOptions = NO_OPTIONS,
        adds_special_tokens: bool = False,
        truncation: Truncation | None = None,
        measure: Measure = unmeasured,
        written: Callable[[str], str] = str,
    ) -> np.ndarray:
        """Ids of a conversation; templates mostly write the special tokens: [n] int32."""
        with measure("template"):
            text = written(self.render(messages, options))
        with measure("encode"):
            return self.encode(text, adds_special_tokens, truncation)

    def render(self, messages: list[dict[str, Any]], options: ChatOptions = NO_OPTIONS) -> str:
        """A conversation as the text that the model reads."""
        try:
            return render_prompt(
                templates=self.templates,
                special_tokens=self.special_tokens,
                messages=messages,
                options=options,
                max_chars=self.max_chars,
                defaults=self._template_kwargs,
            )
        except TooMuchText as error:
            raise self.too_long(f"has {error}") from None

    def output_start(self, prompt: Array, chat: ChatOptions | None) -> OutputStart:
        """The part of the output that begins after ``prompt``; ``chat`` is None for plain text."""
        continues = chat is not None and chat.continues_final_message
        return self._prompt_end.start(prompt, chat is not None, continues)

    def seam(self, prompt: Array) -> Seam:
        """Where a text goes on from ``prompt``."""
        return seam_of(prompt[-NUM_SEAM_IDS:].tolist(), self.token_bytes)

    def encode_exactly(self, text: str) -> list[int]:
        """The ids of a short text and of nothing else."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_words(self, words: list[str]) -> list[list[int]]:
        """The ids of each word, at the start of a text and, if they differ, after a space."""
        variants = [variant for word in words for variant in (word, f" {word.lstrip()}")]
        encodings = self._tokenizer.encode_batch(variants, add_special_tokens=False)
        distinct = dict.fromkeys(tuple(encoding.ids) for encoding in encodings if encoding.ids)
        # A tokenizer may know more ids than the model can write.
        return [list(ids) for ids in distinct if max(ids) < self.vocab_size]

    def check_size(self, kind: PromptKind, prompt: Array, is_cut: bool = False) -> None:
        """Raises InvalidRequest for a prompt whose size alone makes it too long. A chat is never
        refused here: its template may leave out most of it. Nor are ids that will be cut."""
        if kind == "text":
            self._check_num_chars(prompt.nbytes // MAX_CHAR_BYTES)
        elif kind == "ids" and not is_cut and len(prompt) > self.max_model_len:
            raise self.too_long(f"has {len(prompt)}")

    def check_ids(self, ids: np.ndarray) -> None:
        """Raises InvalidRequest for an id that the model does not have."""
        if len(ids) and (ids.max() >= self.vocab_size or ids.min() < 0):
            raise InvalidRequest(
                f"the prompt holds token ids from {ids.min()} to {ids.max()}; the model has"
                f" {self.vocab_size}",
                param="prompt",
            )

    def added_texts(self, skips_special_tokens: bool) -> dict[int, str]:
        """The text written for each added token, by id."""
        return self._added_texts[skips_special_tokens]

    def to_json(self) -> str:
        """The content of a tokenizer.json."""
        return str(self._tokenizer.to_str())

    def encoding(self, text: str | tuple[str, str], adds_special_tokens: bool) -> Encoding:
        self._check_num_chars(len(text) if isinstance(text, str) else sum(map(len, text)))
        # Batches are encoded and decoded without the GIL, single texts are not.
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=adds_special_tokens)
        return encoding

    def decode(self, ids: Sequence[int], skips_special_tokens: bool = True) -> str:
        """Decodes a few ids; it holds the GIL meanwhile."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=skips_special_tokens))

    def decode_many(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, special tokens included."""
        (text,) = self._tokenizer.decode_batch([ids], skip_special_tokens=False)
        return str(text)

    def _check_num_chars(self, num: int) -> None:
        if num > self.max_chars:
            raise self.too_long(f"has {num} characters")

    def too_long(self, length: str) -> InvalidRequest:
        return InvalidRequest(
            f"the context holds {self.max_model_len} tokens (max-model-len): the prompt {length},"
            " that leaves no room for output",
            param="prompt",
            code="context_length_exceeded",
        )


def _load_tokenizer(folder: Path) -> Tokenizer:
    """Raises ConfigError if the folder has none, or a broken one."""
    # Else batches go to threads that all of them share, and a long text holds up a short one.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    path = find_file(folder, TOKENIZER_FILE)
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library has no type for it
        raise ConfigError(f"model: {path}: {error}") from None


def _description(config: dict[str, Any], template: str) -> dict[str, Any]:
    """tokenizer_config.json with the chat template that is used."""
    found = {"tokenizer_class": "PreTrainedTokenizerFast"} | config
    return found | {"chat_template": template} if template else found


def _added_texts(added: dict[int, AddedToken], skips_special_tokens: bool) -> dict[int, str]:
    """Without tokens of blanks, because they mark nothing and some vocabularies have dozens."""
    return {
        token_id: "" if skips_special_tokens and token.special else token.content
        for token_id, token in added.items()
        if token.content.replace(SPACE, " ").strip()
    }
