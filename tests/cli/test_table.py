"""The output of `shoal serve`, and the model as its first word."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cli.serve import with_model
from cli.table import Screen, facts_of
from shared.settings.load import load_settings
from shared.settings.serve import ServeConfig

INFO = "2026-11-23T22:42:24Z INFO    worker 0.1 scheduler 0.1 is up"
WARNING = "2026-11-23T22:42:24Z WARNING worker 0.1 scheduler 0.1 is down: silent for 2 s"


class Replica:
    """The displayed parts of a child."""

    service, instance = "worker", "0.1"

    def __init__(self, **status: Any) -> None:
        self.status = {"reason": "", **status}

    def __str__(self) -> str:
        return "worker 0.1"


DETAILS = {
    "model": "fish",
    "quantization": "wint4",
    "dtype": "bfloat16",
    "weights_bytes": 3 << 20,
    "kv_cache_bytes": 5 << 20,
    "kv_cache_tokens": 4096,
    "max_model_len": 1024,
    "max_num_seqs": 128,
    "device": "cpu",
    "kernels": "avx2",
    "threads": 2,
}


@pytest.fixture
def show(monkeypatch, capfd):
    """Runs ``act`` with a screen and returns the written lines."""

    def run(is_terminal: bool, flags: Sequence[str], act: Callable[[Screen], None]) -> list[str]:
        monkeypatch.setenv("TTY_COMPATIBLE", str(int(is_terminal)))
        monkeypatch.setenv("COLUMNS", "100")
        with Screen(load_settings(ServeConfig, [*flags], "shoal serve"), Path("/mesh")) as screen:
            act(screen)
        text: str = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capfd.readouterr().out)
        return [line.strip() for line in text.splitlines() if line.strip()]

    return run


def test_a_terminal_shows_unusual_lines_of_the_log(show):
    def log(screen: Screen) -> None:
        for line in (INFO, WARNING):
            screen.print(line)

    assert show(True, [], log) == [WARNING]
    assert show(True, ["--log-level", "info"], log) == [INFO, WARNING]
    assert show(True, ["--log-requests"], log) == [INFO, WARNING]
    assert show(False, [], log) == [INFO, WARNING]


def start(screen: Screen) -> None:
    replica: Any = {"worker-0": Replica(state="not_ready", reason="packing weights 40%")}
    screen.show(replica)
    screen.show(replica)
    replica["worker-0"].status = {"state": "ready", "reason": "", "details": DETAILS}
    screen.show(replica)


def test_elsewhere_each_change_is_a_line_and_a_summary_comes_last(show):
    lines = show(False, ["--port", "9"], start)
    assert lines[:2] == ["worker 0.1: not_ready packing weights 40%", "worker 0.1: ready"]
    names = [line.split()[0] for line in lines[2:]]
    assert names == ["model", "device", "memory", "concurrency", "admin", "ready"]
    assert "http://127.0.0.1:9/v1" in lines[-1]


def test_each_line_of_a_json_log_is_an_object(show):
    def log(screen: Screen) -> None:
        screen.print('{"level": "warning"}')
        screen.print("a library's 100 % warning")

    lines = [json.loads(line) for line in show(False, ["--log-format", "json"], start)]
    assert {each["service"] for each in lines} == {"serve"}
    assert "worker 0.1: ready" in {each["message"] for each in lines}
    first, second = map(json.loads, show(False, ["--log-format", "json"], log))
    assert first == {"level": "warning"}
    assert second["message"] == "a library's 100 % warning"


def test_a_terminal_shows_how_far_the_start_is(show):
    lines = show(True, [], start)
    (progress,) = [line for line in lines if "packing weights 40%" in line]  # drawn once
    assert "━" in progress
    assert any(line.startswith("ready after") for line in lines)


@pytest.mark.parametrize(("reason", "is_red"), [("exit code 0", False), ("SIGKILL", True)])
def test_a_clean_end_is_not_red(monkeypatch, capfd, reason: str, is_red: bool):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    ended: Any = {"worker-0": Replica(state="ended", reason=reason)}
    with Screen(load_settings(ServeConfig, [], "shoal serve"), Path("/mesh")) as screen:
        screen.show(ended)
    assert ("\x1b[31mended" in capfd.readouterr().out) == is_red


def test_the_summary_of_a_worker_has_memory_and_concurrency():
    facts = dict(facts_of({"details": DETAILS}))
    assert facts["model"] == "fish, wint4 weights, bfloat16"
    assert facts["memory"] == "3 MiB of weights, 5 MiB of KV cache"
    assert facts["concurrency"] == "4 requests of 1,024 tokens at once"
    assert facts_of({"state": "starting"}) == []


@pytest.mark.parametrize("word", ["models/fish", "org/fish@main"])
def test_the_first_word_is_the_model(word: str):
    arguments = with_model([word, "--port", "9"])
    config = load_settings(ServeConfig, arguments, "shoal serve")
    assert (config.model, config.port) == (word, 9)
    assert with_model(["--port", "9"]) == ["--port", "9"]


@pytest.mark.parametrize(
    "flags",
    [
        "--port 9",
        "--port=9",
        "--enforce-eager",
        "--no-page",
        "-tp 2",
        "--swap-space 4",
        "--trust-remote-code",
        "--served-model-name=a",
    ],
)
def test_a_last_word_without_a_flag_is_the_model(flags: str):
    arguments = with_model([*flags.split(), "org/fish"])
    assert load_settings(ServeConfig, arguments, "shoal serve").model == "org/fish"


@pytest.mark.parametrize(
    "flags",
    ["--port 9", "--served-model-name a b", "--trust-remote-code true", "--fish 1", "--page"],
)
def test_a_last_word_of_a_flag_stays_its_value(flags: str):
    assert with_model(flags.split()) == flags.split()
