import json

import pytest

from cli.bench.lengths import Lengths
from cli.bench.options import parse
from shared.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_API_KEY", raising=False)


def test_without_options_the_load_is_a_closed_loop():
    settings = parse([])
    assert settings.url == "http://127.0.0.1:8000"
    assert (settings.max_open, settings.rate, settings.is_open_loop) == (8, None, False)
    assert settings.num_measured(None) == 100
    assert settings.input_len == settings.output_len == Lengths("fixed", 128)
    assert settings.ignore_eos
    assert settings.api_key is None


def test_a_rate_opens_the_loop_and_may_have_a_cap():
    settings = parse(["--request-rate", "3"])
    assert (settings.max_open, settings.rate, settings.is_open_loop) == (None, 3, True)
    assert parse(["--request-rate", "3", "--concurrency", "2"]).max_open == 2


def test_a_verdict_loads_with_half_as_much_again():
    settings = parse(["--verdict", "4"])
    assert settings.rate == 6
    assert settings.max_open is None
    assert settings.num_measured(None) == 360
    assert parse(["--verdict", "0.01", "--duration", "5"]).num_measured(None) == 3


def test_requests_of_a_trace_after_the_warm_up_count():
    settings = parse(["--trace", "t", "--warmup", "3"])
    assert settings.num_measured(10) == 7
    with pytest.raises(ConfigError, match="--trace: 3 to warm up and 1 to count are more than its"):
        settings.num_measured(3)
    with pytest.raises(ConfigError, match="more than its 10 lines"):
        parse(["--trace", "t", "--num-requests", "11"]).num_measured(10)


def test_the_key_may_stand_in_the_environment_and_is_never_written(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SHOAL_API_KEY", "secret")
    assert parse([]).api_key == "secret"
    settings = parse(["--api-key", "other-secret"])
    assert settings.api_key == "other-secret"
    assert "secret" not in json.dumps(settings.as_dict())


WRONG = [
    ("--url ftp://x", "--url: 'ftp://x' is not a URL"),
    ("--url http://x:99999", "--url: 'http://x:99999' is not a URL"),
    ("--url http://", "--url: 'http://' is not a URL"),
    ("--endpoint embeddings", "--endpoint: invalid choice: 'embeddings'"),
    ("--num-requests 0", "--num-requests: '0' is not an integer from 1 to 10000000"),
    ("--num-requests 2.5", "--num-requests: '2.5' is not an integer"),
    ("--concurrency 0", "--concurrency: '0' is not an integer from 1 to 100000"),
    ("--request-rate 0", "--request-rate: '0' is not a number from 1e-06 to 1000000"),
    ("--request-rate nan", "--request-rate: 'nan' is not a number"),
    ("--request-rate inf", "--request-rate: 'inf' is not a number"),
    ("--burstiness 0", "--burstiness: '0' is not a number from 0.1 to 1000000"),
    ("--seed -1", "--seed: '-1' is not an integer from 0"),
    ("--input-len 0", "--input-len: '0': 0 is not from 1 to 1000000"),
    ("--output-len uniform:9,3", "--output-len: 'uniform:9,3': 3 is not from 9 to 1000000"),
    ("--vocab-size 10", "--vocab-size: '10' is not an integer from 11"),
    ("--num-prefixes 2", "--num-prefixes: 2 needs --prefix-len"),
    ("--temperature -1", "--temperature: '-1' is not a number from 0 to 100"),
    ("--extra-body [1]", "--extra-body: '[1]' is not a JSON object"),
    ("--extra-body {", "--extra-body: '{' is not a JSON object"),
    ('--extra-body {"stream":false}', "--extra-body: stream is set by this program"),
    ("--goodput ttf=3", "--goodput: 'ttf' is not one of ttft, tpot, e2e"),
    ("--goodput ttft=0", "--goodput: '0' is not a number from 0.001"),
    ("--replay", "--replay: needs --trace"),
    ("--trace t --replay --request-rate 2", "--replay: the trace sets the times"),
    ("--trace t --replay --verdict 2", "--replay: the trace sets the times"),
    ("--verdict 2 --request-rate 3", "--request-rate: --verdict sets its own"),
    ("--verdict 2 --num-requests 3", "--num-requests: --verdict sets its own"),
    ("--verdict 2 --concurrency 3", "--concurrency: --verdict sets its own"),
    ("--duration 5", "--duration: 5 needs --verdict"),
    ("--rows", "--rows: needs --json"),
    ("--json /", "--json: / is not a path for a file"),
    ("--json /no/such/file", "--json: /no/such/file is not a path for a file"),
    ("--num-request 3", "unrecognized arguments: --num-request"),
    ("--model", "--model: expected one argument"),
]


@pytest.mark.parametrize(("flags", "message"), WRONG, ids=[flags for flags, _ in WRONG])
def test_a_wrong_setting_is_one_line_that_names_flag_value_and_limit(flags: str, message: str):
    with pytest.raises(ConfigError) as caught:
        parse(flags.split())
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_help_is_shown_for_each_flag(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        parse(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert all(f"--{name.replace('_', '-')}" in text for name in parse([]).as_dict())
