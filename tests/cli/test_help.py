"""The help of commands: it fits a screen, and docs/cli.md has it."""

import pytest

from cli.commands import COMMANDS, SERVICES
from cli.main import usage
from cli.manual import PAGE, PARTS, help_of, page
from cli.settings_help import FIRST, help_text, show_help, wanted_help
from cli.settings_help import SERVICES as SETTINGS
from shared.settings.serve import ServeConfig
from shared.settings.worker import WorkerConfig

COLUMNS, LINES = 80, 24
COMMON = (
    "chat",
    "complete",
    "tokenize",
    "models",
    "top",
    "trace",
    "plan",
    "run-batch",
    "keys",
    "doctor",
    "probe",
    "collect-env",
)


def test_docs_cli_md_matches_the_output_of_the_commands():
    assert PAGE.read_text() == page(), "the help of a command changed: run `make docs`"


@pytest.mark.parametrize("name", ["", "serve", *COMMON, *SERVICES])
def test_the_help_of_common_commands_fits_a_screen(name: str):
    if name in SERVICES:
        lines = help_text(SETTINGS[name], f"shoal {name}", "").splitlines()
    else:
        lines = (help_of(name) if name else usage()).splitlines()
    assert len(lines) < LINES
    if name != "probe":
        assert max(map(len, lines)) <= COLUMNS
    assert "xit code" in " ".join(" ".join(lines).split()) or not name


def test_settings_are_found_by_service_by_a_part_of_their_name_and_all_together():
    assert set(FIRST) <= set(ServeConfig.model_fields)
    scheduler = help_text(ServeConfig, "shoal serve", "scheduler")
    assert "--max-waiting " in scheduler
    assert "--max-num-seqs " not in scheduler
    found = help_text(WorkerConfig, "shoal worker", "kv-cache")
    assert [line.split()[0] for line in found.splitlines() if line.startswith("  --")] == [
        "--kv-cache-dtype",
        "--kv-cache-memory-bytes",
    ]
    everything = help_text(ServeConfig, "shoal serve", "all")
    assert "--gateways " in everything
    assert "--instance " not in everything, "a whole mesh lacks the flag"
    assert "no setting of shoal serve has fish" in help_text(ServeConfig, "shoal serve", "fish")


def test_help_is_wanted_wherever_it_stands(capsys):
    assert wanted_help(["--port", "1"]) is None
    assert wanted_help(["--port", "1", "-h"]) == ""
    assert wanted_help(["--help=all", "--port", "1"]) == "all"
    with pytest.raises(SystemExit) as ended:
        show_help(WorkerConfig, "shoal worker", ["--help", "stall"])
    assert ended.value.code == 0
    assert "--stall-s  number (60)" in capsys.readouterr().out


def test_every_command_has_a_line_in_the_usage():
    assert all(f"\n  {name} " in usage() for name in COMMANDS)


@pytest.mark.parametrize("words", [(name, part) for name in PARTS for part in PARTS[name]])
def test_the_help_of_a_command_explains_its_exit_codes(words: tuple[str, str]):
    assert "xit code" in help_of(*words)
