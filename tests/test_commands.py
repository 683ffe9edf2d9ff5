"""The commands on our pages use existing flags."""

import re
from collections.abc import Iterator
from pathlib import Path

from cli.commands import COMMANDS
from cli.manual import PAGE, PARTS, help_of
from cli.settings_help import SERVICES as SETTINGS
from shared.settings.serve import ServeConfig
from shared.settings.worker import WorkerConfig
from tests.test_links import PAGES

COMMAND = re.compile(r"(?:^|`|\$ |&& )(?:\.venv/bin/)?shoal ([a-z][^`#\n|]*)", re.MULTILINE)
FLAG = re.compile(r"--(?:no-)?[a-z][a-z-]*")
# Commands that also take the settings of services.
TAKEN = {
    "serve": ServeConfig,
    "doctor": ServeConfig,
    "run-batch": ServeConfig,
    "plan": WorkerConfig,
    "bench": WorkerConfig,
}


def test_every_flag_of_a_command_on_our_pages_exists() -> None:
    shown = {(page.name, words) for page in PAGES if page != PAGE for words in commands_on(page)}
    assert len(shown) > 50
    unknown = [
        f"{page}: shoal {words}: {flag}"
        for page, words in sorted(shown)
        for flag in FLAG.findall(words)
        if not has_flag(words, flag)
    ]
    assert not unknown


def commands_on(page: Path) -> Iterator[str]:
    yield from COMMAND.findall(page.read_text().replace("\\\n", " "))


def has_flag(words: str, flag: str) -> bool:
    name, *rest = words.split()
    config = SETTINGS[name] if name in SETTINGS else TAKEN.get(name)
    setting = flag.removeprefix("--").replace("-", "_")
    if config and {setting, setting.removeprefix("no_")} & set(config.model_fields):
        return True
    if flag == "--help" or name not in COMMANDS:
        return flag == "--help"
    parts = PARTS.get(name, ())
    return flag in help_of(name, *(rest[:1] if rest and rest[0] in parts else ()))
