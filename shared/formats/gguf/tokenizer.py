"""The tokenizer of a GGUF file as the files of a model folder, tokenizer.json among them."""

from collections.abc import Iterator, Mapping
from typing import Any

from shared.formats.gguf.file import GgufFile

PREFIX = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6  # types of tokens
UNMERGED = UNKNOWN, CONTROL, BYTE
SPACE = "▁"  # as sentencepiece writes one
MAX_PIECE_CHARS = 1024  # each of its splits may be a merge
ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Control tokens that end a text, even if no key names them.
END_TEXTS = {
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|end|>"),
    *("<end_of_turn>", "<|return|>", "<|call|>", "<EOT>", "<eos>", "</s>"),
}

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
QWEN2 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
TEKKEN = rf"{_WORDS[0]}|{_WORDS[1]}|\p{{N}}|{_SLASHES}"
GPT4O = rf"{_WORDS[0]}{_ENDINGS}?|{_WORDS[1]}{_ENDINGS}?|\p{{N}}{{1,3}}|{_SLASHES}"
# Names of pre-tokenizers. None is GPT-2's, and DIGITS the same with each digit alone.
DIGITS = "digits"
SPLITS: dict[str, str | None] = {
    **dict.fromkeys(("gpt-2", "gpt2", "phi-2", "olmo", "mpt", "jais", "exaone4"), None),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"), LLAMA3),
    **dict.fromkeys(("smaug-bpe", "dbrx", "midm-2.0"), LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "kormo"), QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), GPT4O),
    "tekken": TEKKEN,
}
# A word that is a token is never merged from parts; a text begins with BOS if no key denies it.
WHOLE_WORDS = {"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "tekken"}
ADDS_BOS = {"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "tekken"}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


class Vocabulary:
    """The tokens of ``file``, of which the model has ``vocab_size``. Raises ConfigError."""

    def __init__(self, file: GgufFile, vocab_size: int) -> None:
        self._file = file
        self.model: str = file.require(f"{PREFIX}model", str)
        self.tokens: list[str] = file.require(f"{PREFIX}tokens", list[str])
        self._types = self._list("token_type", list[int], 1)
        if self.model not in ("gpt2", "llama"):
            raise file.wrong(
                f"{PREFIX}model {self.model} is not supported; supported are gpt2 and llama"
            )
        if len(self.tokens) > vocab_size:
            raise file.wrong(f"{len(self.tokens)} tokens, and embeddings of {vocab_size}")

    @property
    def pre(self) -> str:
        """The name of the pre-tokenizer."""
        name: str = self._file.get(f"{PREFIX}pre", str, "gpt-2")
        if name not in SPLITS:
            raise self._file.wrong(
                f"{PREFIX}pre {name} is not supported; supported are {', '.join(sorted(SPLITS))}"
            )
        return name

    @property
    def is_gemma(self) -> bool:
        """Its scores are no order of merges, and it writes several spaces as such."""
        return str(self._file.get("general.architecture", str)).startswith("gemma")

    def tokenizer(self) -> dict[str, Any]:
        """The content of tokenizer.json."""
        parts = self._byte_level() if self.model == "gpt2" else self._sentencepiece()
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [*self._added()],
            "normalizer": None,
            "pre_tokenizer": None,
            "post_processor": self._post_processor(),
            **parts,
        }

    def tokenizer_config(self) -> dict[str, Any]:
        """The content of tokenizer_config.json."""
        roles = {role: self._id(key) for role, key in ROLES.items()}
        named = {role: None if id is None else self.tokens[id] for role, id in roles.items()}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
        default = self._file.get(TEMPLATE, str)
        names = self._file.get(f"{TEMPLATE}s", list[str], [])
        if default is None or not names:
            return config | {"chat_template": default}
        texts = {name: self._file.require(f"{TEMPLATE}.{name}", str) for name in names}
        templates = [{"name": name, "template": text} for name, text in texts.items()]
        return config | {"chat_template": [{"name": "default", "template": default}, *templates]}

    def end_ids(self) -> list[int]:
        """The ids that end a text or a turn."""
        ids = {self._id(key) for key in END_KEYS} - {None}
        named = {
            number
            for number, (text, kind) in enumerate(zip(self.tokens, self._types, strict=True))
            if kind == CONTROL and text in END_TEXTS
        }
        return sorted(named | {id for id in ids if id is not None})

    def _added(self) -> Iterator[dict[str, Any]]:
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        roles = {self._id(key) for key in ("bos_token_id", "eos_token_id", "eot_token_id")}
        for number, (text, kind) in enumerate(zip(self.tokens, self._types, strict=True)):
            is_special = kind in (CONTROL, UNKNOWN) or number in roles
            if (is_special or kind == USER_DEFINED) and text:
                text = self._spelled(text)
                yield {"id": number, "content": text, "special": is_special, **flags}

    def _byte_level(self) -> dict[str, Any]:
        split = SPLITS[self.pre]
        splitter: dict[str, Any] = {"type": "Split", "behavior": "Isolated", "invert": False}
        if split == DIGITS:
            splitter = {"type": "Digits", "individual_digits": True}
        elif split is not None:
            splitter["pattern"] = {"Regex": split}
        uses_regex = split in (None, DIGITS)
        byte_level = BYTE_LEVEL | {"use_regex": uses_regex}
        several = {"type": "Sequence", "pretokenizers": [splitter, byte_level]}
        merges = self._file.require(f"{PREFIX}merges", list[str])
        pairs = [each.split(" ") for each in merges]
        vocab = self._vocab()
        for number, pair in enumerate(pairs):
            if len(pair) != 2 or not {*pair, "".join(pair)} <= vocab.keys():
                raise self._file.wrong(
                    f"{PREFIX}merges: number {number}, {merges[number]!r}, is no pair of tokens"
                )
        return {
            "normalizer": {"type": "NFC"} if split == QWEN2 else None,
            "pre_tokenizer": byte_level if split is None else several,
            "decoder": BYTE_LEVEL | {"use_regex": True},
            "model": bpe(vocab, pairs, ignore_merges=self.pre in WHOLE_WORDS),
        }

    def _sentencepiece(self) -> dict[str, Any]:
        scores = self._list("scores", list[float], 0.0)
        vocab = self._vocab()
        for text, number in vocab.items():
            if len(text) > MAX_PIECE_CHARS:
                raise self._file.wrong(
                    f"{PREFIX}tokens: number {number}, {text[:20]!r}…, has {len(text)} characters;"
                    f" at most {MAX_PIECE_CHARS} are supported"
                )
        ranks = [float(-number) for number in range(len(scores))] if self.is_gemma else scores
        adds_space = self._file.get(f"{PREFIX}add_space_prefix", bool, not self.is_gemma)
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
        prepend = [{"type": "Prepend", "prepend": SPACE}] if adds_space else []
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if adds_space else []
        back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
        decoders = [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
        unknown = self._id("unknown_token_id")
        if unknown is None:
            unknown = next((i for i, each in enumerate(self._types) if each == UNKNOWN), None)
        return {
            "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": bpe(
                vocab,
                merges_of(
                    vocab, ranks, {i for i, each in enumerate(self._types) if each in UNMERGED}
                ),
                unk_token=None if unknown is None else self.tokens[unknown],
                fuse_unk=True,
                byte_fallback=True,
            ),
        }

    def _post_processor(self) -> dict[str, Any] | None:
        """Adds BOS before a text, and EOS after it, if the file wants them."""
        adds_bos = self.model == "llama" or self.pre in ADDS_BOS
        bos = self._id("bos_token_id")
        if not self._file.get(f"{PREFIX}add_bos_token", bool, adds_bos):
            bos = None
        eos = self._id("eos_token_id")
        if not self._file.get(f"{PREFIX}add_eos_token", bool, False):
            eos = None
        if bos is None and eos is None:
            return None
        texts = {id: self.tokens[id] for id in (bos, eos) if id is not None}

        def around(name: str, kind: int) -> list[dict[str, Any]]:
            marks = [
                [] if id is None else [{"SpecialToken": {"id": texts[id], "type_id": kind}}]
                for id in (bos, eos)
            ]
            return [*marks[0], {"Sequence": {"id": name, "type_id": kind}}, *marks[1]]

        return {
            "type": "TemplateProcessing",
            "single": around("A", 0),
            "pair": [*around("A", 0), *around("B", 1)],
            "special_tokens": {
                text: {"id": text, "ids": [id], "tokens": [text]} for id, text in texts.items()
            },
        }

    def _vocab(self) -> dict[str, int]:
        """Ids by text; of equal texts the first."""
        vocab: dict[str, int] = {}
        for number, text in enumerate(self.tokens):
            vocab.setdefault(self._spelled(text), number)
        return vocab

    def _spelled(self, text: str) -> str:
        is_blank = self.is_gemma and " " in text and not text.strip(" ")
        return text.replace(" ", SPACE) if is_blank else text

    def _id(self, key: str) -> int | None:
        found: int | None = self._file.get(f"{PREFIX}{key}", int)
        if found is not None and not 0 <= found < len(self.tokens):
            raise self._file.wrong(
                f"metadata {PREFIX}{key} {found} is no id of {len(self.tokens)} tokens"
            )
        return found

    def _list(self, key: str, kind: Any, default: Any) -> Any:
        """One for each token."""
        num = len(self.tokens)
        found = self._file.get(f"{PREFIX}{key}", kind, [default] * num)
        if len(found) != num:
            raise self._file.wrong(f"metadata {PREFIX}{key} has {len(found)} elements, not {num}")
        return found


def bpe(vocab: Mapping[str, int], merges: list[list[str]], **options: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": merges,
        **options,
    }


def merges_of(vocab: Mapping[str, int], scores: list[float], others: set[int]) -> list[list[str]]:
    """The merges that sentencepiece would make, best first: the pairs of tokens that are a token.
    ``others`` are ids of tokens that no merge makes."""
    found = []
    for text, number in vocab.items():
        if number in others:
            continue
        pairs = [
            (text[:at], text[at:])
            for at in range(1, len(text))
            if text[:at] in vocab and text[at:] in vocab
        ]
        pairs.sort(key=lambda cut: (vocab[cut[0]], vocab[cut[1]]))
        found += [(scores[number], *cut) for cut in pairs]
    found.sort(key=lambda each: (each[0], len(each[1]), len(each[2])), reverse=True)
    return [[left, right] for _, left, right in found]
