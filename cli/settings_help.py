"""Help of commands with settings as flags: the common ones on one screen, the others by service, by
word, or all."""

import os
import sys
import textwrap
import types
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from cli.exit_codes import OK
from shared.settings.base import Settings
from shared.settings.gateway import GatewayConfig
from shared.settings.scheduler import SchedulerConfig
from shared.settings.serve import SETTINGS_OF_ONE_SERVICE, ServeConfig
from shared.settings.tokenizer import TokenizerConfig
from shared.settings.worker import RANK_SETTINGS, WorkerConfig

SERVICES: dict[str, type[Settings]] = {
    "worker": WorkerConfig,
    "scheduler": SchedulerConfig,
    "tokenizer": TokenizerConfig,
    "gateway": GatewayConfig,
}
TITLES = {
    "worker": "Model and worker",
    "scheduler": "Scheduler",
    "tokenizer": "Tokenizer",
    "gateway": "Gateway",
    "serve": "`shoal serve`",
    "all": "Every service",
}
WIDTH = 80
INDENT = 26
# The most common settings, in texts of one line.
FIRST = {
    "model": "a Hugging Face folder, GGUF file, or cached org/name",
    "served_model_name": "model names for clients",
    "host": "HTTP address (127.0.0.1)",
    "port": "HTTP port (8000)",
    "api_key_file": "file with the accepted API keys",
    "max_model_len": "longest prompt plus output, in tokens",
    "max_num_seqs": "sequences that run at once (128)",
    "quantization": "weights in 8 or 4 bits: wint8, wint4, nf4, fp8 …",
    "kv_cache_dtype": "KV cache in 8 bits: int8, fp8",
    "gpu_memory_utilization": "share of the device's memory (0.9)",
    "speculative_config": "how tokens are drafted (JSON)",
    "workers": "workers, or auto: one per GPU or NUMA node (1)",
    "scheduler_address": "schedulers on other machines, tcp://HOST",
    "tokenizer_address": "tokenizers on other machines, tcp://HOST",
    "listen_address": "address for services on other machines, tcp://HOST",
    "keys": "folder of mesh keys, written by `shoal keys`",
    "config": "YAML file with any of these",
    "log_level": "debug, info, warning or error (info)",
}
EVERYTHING = "all"
COMMON = "every"  # the section of all services, called all in docs/settings.md


def wanted_help(arguments: Sequence[str]) -> str | None:
    """The word after ``--help``, or empty; None without ``--help``."""
    for index, each in enumerate(arguments):
        if each.startswith("--help="):
            return each.partition("=")[2]
        if each in ("-h", "--help"):
            return next(iter(arguments[index + 1 : index + 2]), "")
    return None


def show_help(cls: type[Settings], prog: str, arguments: Sequence[str]) -> None:
    """Prints ``help_text`` and exits if ``arguments`` ask for it; the reader may close the pipe
    early, as `head` does."""
    word = wanted_help(arguments)
    if word is None:
        return
    try:
        print(help_text(cls, prog, word), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(OK)


def help_text(cls: type[Settings], prog: str, word: str) -> str:
    """``word`` is empty, ``all``, a section's name, or a part of settings' names."""
    if not word:
        return _first(cls, prog)
    names = [name for name in _named(word) if _has(cls, name)]
    if not names:
        return f"no setting of {prog} has {word} in its name; {prog} --help all lists them"
    return "\n".join(_described(name) for name in names)


def _first(cls: type[Settings], prog: str) -> str:
    lines = [f"  {_flag(name):{INDENT}}{text}" for name, text in FIRST.items() if _has(cls, name)]
    sections = [name for name in TITLES if any(_has(cls, each) for each in fields_of(name))]
    more = " | ".join([*(name for name in sections if name != EVERYTHING), COMMON, EVERYTHING])
    return "\n".join(
        [
            f"usage: {prog} {'[MODEL] ' if cls is ServeConfig else ''}[--setting VALUE …]",
            "",
            *lines,
            "",
            f"More: --help {more},",
            "or a part of a setting's name. Each can also be set as SHOAL_SETTING in the",
            "environment, or in the YAML file.",
            "Exit codes: 0 after a drain; 1: it broke or could not start; 2: a wrong setting.",
        ]
    )


def _has(cls: type[Settings], name: str) -> bool:
    """True if ``cls`` has the flag; a whole mesh lacks the flags of single services."""
    is_of_one = cls is ServeConfig and name in SETTINGS_OF_ONE_SERVICE
    return name in cls.model_fields and not is_of_one


def _named(word: str) -> Iterable[str]:
    """The settings' names, in the order of docs/settings.md."""
    everything = [name for section in TITLES for name in fields_of(section)]
    if word == EVERYTHING:
        return everything
    if word == COMMON:
        return fields_of(EVERYTHING)
    if word in TITLES:
        return fields_of(word)
    part = word.lstrip("-").replace("-", "_")
    return [name for name in everything if part in name]


def _described(name: str) -> str:
    field = next(fields[name] for section in TITLES if name in (fields := fields_of(section)))
    values = values_of(field.annotation).replace("`", "")
    default = default_of(name, field).replace("`", "")
    head = f"  {_flag(name)}  {values}" + (f" ({default})" if default else "")
    indent = " " * 6
    text = textwrap.fill(
        field.description or "", WIDTH, initial_indent=indent, subsequent_indent=indent
    )
    return f"{head}\n{text}"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def fields_of(section: str) -> dict[str, FieldInfo]:
    """The settings of a section; a setting of several services is in the first one's."""
    common = Settings.model_fields
    if section == "all":
        return common
    if section == "serve":
        return {
            name: field
            for name, field in ServeConfig.model_fields.items()
            if not any(name in config.model_fields for config in SERVICES.values())
        }
    before = [SERVICES[name] for name in list(SERVICES)[: list(SERVICES).index(section)]]
    return {
        name: field
        for name, field in SERVICES[section].model_fields.items()
        if name not in common.keys() | RANK_SETTINGS
        and not any(name in config.model_fields for config in before)
    }


def values_of(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is Annotated:
        return values_of(arguments[0])
    if origin in (Union, types.UnionType):
        return ", ".join(values_of(kind) for kind in arguments if kind is not type(None))
    if origin is list:
        return f"{values_of(arguments[0])} list"
    return {
        bool: "boolean",
        int: "integer",
        float: "number",
        Path: "path",
        str: "text",
        SecretStr: "secret",
    }.get(annotation, "JSON object")


def default_of(name: str, field: FieldInfo) -> str:
    if name == "model":
        return "the embedded model"
    if name == "mesh_dir":
        return "`/tmp/shoal-UID/default`"
    if field.default_factory is not None:
        return "made for each process"
    value = field.default
    if value is None or value in ([], ""):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ", ".join(str(one) for one in value)
    if isinstance(value, float):
        return f"{value:,g}"
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 else f"{value}"
