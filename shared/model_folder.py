"""Facts of a local Hugging Face model folder, without torch."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from shared.errors import ConfigError
from shared.wire.messages import ModelInfo

EMBEDDED_MODEL = Path(__file__).parent.parent / "models" / "shoal-tiny"

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILES = ("tokenizer_config.json", "special_tokens_map.json")
GENERATION_CONFIG_FILE = "generation_config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
FINGERPRINT_CHARS = 32
SAMPLE_BYTES = 64 << 10
MAX_WEIGHTS_HEADER_BYTES = 100_000_000  # the safetensors format's own limit

INFINITY = b"Infinity"
SIZES = "vocab_size", "max_position_embeddings"
PADDED = "roberta", "xlm-roberta"  # positions begin after the padding id's

T = TypeVar("T")


class _Sizes(msgspec.Struct):
    vocab_size: int | None = None
    max_position_embeddings: int | None = None
    model_type: str = ""
    pad_token_id: int | None = 1
    text_config: "_Sizes | None" = None  # of a multimodal model


class _EndConfig(msgspec.Struct):
    eos_token_id: int | list[int] | None = None
    text_config: "_EndConfig | None" = None  # of a multimodal model


class _AddedToken(msgspec.Struct):
    content: str
    id: int | None = None


class _TokenizerConfig(msgspec.Struct):
    eos_token: str | _AddedToken | None = None
    added_tokens_decoder: dict[str, _AddedToken] = {}


class _Tokenizer(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def read_model_info(folder: Path, names: list[str], max_model_len: int | None) -> ModelInfo:
    """Describes the model in ``folder`` for its Hello; only a tokenizer passes ``names``.

    Raises ConfigError if a file is missing or does not parse, or if ``max_model_len`` exceeds the
    model's positions.
    """
    path = find_file(folder, CONFIG_FILE)
    vocab_size, max_position_embeddings = _read_sizes(path)
    return ModelInfo(
        names=names,
        fingerprint=_fingerprint(folder),
        vocab_size=vocab_size,
        max_model_len=_check_length(max_model_len, max_position_embeddings),
        created=int(path.stat().st_mtime),
    )


def _read_sizes(path: Path) -> tuple[int, int]:
    """vocab_size and max_position_embeddings. If config.json lacks one of these names, both come
    from transformers' reading (``n_positions``)."""
    sizes = decode_json(path, _Sizes)
    sizes = sizes.text_config or sizes
    if sizes.vocab_size is not None and sizes.max_position_embeddings is not None:
        return sizes.vocab_size, sizes.max_position_embeddings - _num_unused(path, sizes)
    from shared.foreign_config import read_foreign_config

    config = read_foreign_config(path.parent).get_text_config()
    found: list[Any] = [getattr(config, name, None) for name in SIZES]
    for name, value in zip(SIZES, found, strict=True):
        if not isinstance(value, int):
            raise ConfigError(
                f"model: {path} has no {name}, and transformers knows no other name of it"
            )
    return found[0], found[1]


def _num_unused(path: Path, sizes: _Sizes) -> int:
    """Counts the positions before the first token's."""
    if sizes.model_type not in PADDED:
        return 0
    if sizes.pad_token_id is None:
        raise ConfigError(f"model: {path}: pad_token_id is null; positions begin after it")
    return sizes.pad_token_id + 1


def read_eos_ids(folder: Path, vocab_size: int) -> list[int]:
    """The ids that end a text, from generation_config.json, config.json and the tokenizer, which is
    often the only source in a fine-tuned chat model.

    Ids outside the vocabulary, for example −1 for none, are dropped.
    """
    ids: set[int] = set()
    for name in (CONFIG_FILE, GENERATION_CONFIG_FILE):
        if (folder / name).is_file():
            config = decode_json(folder / name, _EndConfig)
            for each in (config, config.text_config or _EndConfig()):
                value = each.eos_token_id
                ids |= {value} if isinstance(value, int) else set(value or ())
    ids |= _tokenizer_eos_ids(folder)
    return sorted(each for each in ids if 0 <= each < vocab_size)


def _tokenizer_eos_ids(folder: Path) -> set[int]:
    """The id of ``eos_token``, an added token; empty if there is none."""
    paths = [folder / name for name in TOKENIZER_CONFIG_FILES if (folder / name).is_file()]
    configs = [decode_json(path, _TokenizerConfig) for path in paths]
    token = next((each.eos_token for each in configs if each.eos_token is not None), None)
    text = token.content if isinstance(token, _AddedToken) else token
    if text is None:
        return set()
    decoder = {id: token for each in configs for id, token in each.added_tokens_decoder.items()}
    ids = {int(id) for id, token in decoder.items() if token.content == text and id.isdecimal()}
    if ids or not (folder / TOKENIZER_FILE).is_file():
        return ids
    added = decode_json(folder / TOKENIZER_FILE, _Tokenizer).added_tokens
    return {token.id for token in added if token.content == text and token.id is not None}


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files with the model's weights, sorted. Raises ConfigError."""
    if not (folder / INDEX_FILE).is_file():
        return [find_file(folder, SINGLE_FILE)]
    index = decode_json(folder / INDEX_FILE, _Index)
    return [find_file(folder, name) for name in sorted(set(index.weight_map.values()))]


def facts_of_weights(folder: Path) -> list[object]:
    """Names, sizes and times: the fingerprint has samples only. Empty without weights."""
    try:
        files = weight_files(folder)
    except ConfigError:
        return []
    stats = [(file.name, file.stat()) for file in files]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]


def find_file(folder: Path, name: str) -> Path:
    """``folder/name``. Raises ConfigError if there is no such file."""
    path = folder / name
    if Path(name).name != name or not path.is_file():
        raise ConfigError(f"model: {folder} has no file {name}")
    return path


def decode_json(path: Path, kind: type[T]) -> T:
    """The file's content as ``kind``, ignoring other keys. It may have Infinity, which Python
    writes and JSON lacks. Raises ConfigError."""
    try:
        content = path.read_bytes()
        try:
            return msgspec.json.decode(content, type=kind)
        except msgspec.DecodeError:
            if INFINITY not in content:
                raise
            return msgspec.convert(json.loads(content), kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"model: {path}: {error}") from None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigError(f"model: {path} is not JSON: {error}") from None
    except OSError as error:
        raise ConfigError(f"model: {path} cannot be read: {error.strerror}") from None


def _check_length(wanted: int | None, limit: int) -> int:
    if wanted is not None and wanted > limit:
        raise ConfigError(
            f"max-model-len: {wanted} is more than the model's max_position_embeddings = {limit}"
        )
    return wanted or limit


def _fingerprint(folder: Path) -> str:
    """Changes with the architecture, the vocabulary and the weights (samples of them)."""
    digest = hashlib.sha256()
    for part in _fingerprint_parts(folder):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:FINGERPRINT_CHARS]


def _fingerprint_parts(folder: Path) -> Iterator[bytes]:
    yield find_file(folder, CONFIG_FILE).read_bytes()
    if (folder / TOKENIZER_FILE).is_file():  # older folders hold a vocabulary in other files
        yield (folder / TOKENIZER_FILE).read_bytes()
    index = folder / INDEX_FILE
    try:
        files = weight_files(folder)
    except ConfigError:
        return  # a worker that needs weights raises it later; load-format dummy needs none
    yield index.read_bytes() if index.is_file() else _header(files[0])
    for file in files:
        yield f"{file.name} {file.stat().st_size}".encode()
        yield _sample(file)


def _sample(file: Path) -> bytes:
    """Bytes from the middle, since a fine-tuned model differs only in its weights' values."""
    with file.open("rb") as stream:
        stream.seek(file.stat().st_size // 2)
        return stream.read(SAMPLE_BYTES)


def _header(file: Path) -> bytes:
    """The JSON at the start of a safetensors file: names, dtypes, shapes and offsets."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if size > MAX_WEIGHTS_HEADER_BYTES:
            raise ConfigError(f"model: {file} is not a safetensors file")
        return stream.read(size)
