"""Where a model folder has its chat templates, and the special tokens that they write."""

from pathlib import Path
from typing import Any

import msgspec

from shared.errors import ConfigError
from shared.model_folder import decode_json

DEFAULT, TOOL_USE = "default", "tool_use"
FILE = "chat_template.jinja"
FOLDER = "additional_chat_templates"


def read_templates(folder: Path, config: dict[str, Any], setting: Path | None) -> dict[str, str]:
    """Sources by name; only ``default`` and ``tool_use`` are ever used.

    ``setting`` is a file that replaces all templates of the folder; in the folder, files come
    before the ``chat_template`` of ``config``, tokenizer_config.json. Raises ConfigError.
    """
    if setting is not None:
        return {DEFAULT: _read(setting, "chat-template")}
    found = {path.stem: _read(path) for path in sorted(folder.glob(f"{FOLDER}/*.jinja"))}
    if (folder / FILE).is_file():
        return found | {DEFAULT: _read(folder / FILE)}
    return _configured(config) | found


def _configured(config: dict[str, Any]) -> dict[str, str]:
    """The template may be a text, or several of them by name."""
    value = config.get("chat_template") or {}
    try:
        match value:
            case str():
                value = {DEFAULT: value}
            case list():
                value = {each["name"]: each["template"] for each in value}
        return msgspec.convert(value, dict[str, str])
    except (KeyError, TypeError, msgspec.ValidationError):
        raise ConfigError(
            "model: chat_template in its tokenizer_config.json is neither a text nor a list of"
            " objects with name and template"
        ) from None


def read_special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """``bos_token`` and the like by name; older folders write each as an object with its content,
    or have them in a file of their own."""
    older = read_json(folder / "special_tokens_map.json")
    extra = config.get("extra_special_tokens")
    more = _tokens_of(extra) if isinstance(extra, dict) else {}
    return _tokens_of(older) | _tokens_of(config) | more


def _tokens_of(config: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file, empty if there is no file. Raises ConfigError."""
    return decode_json(path, dict[str, Any]) if path.is_file() else {}


def _read(path: Path, setting: str = "model") -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{setting}: {path} cannot be read: {error}") from None
