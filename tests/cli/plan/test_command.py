import json
import re
from pathlib import Path

import pytest
import torch

from cli.exit_codes import FAILED, OK, WRONG
from cli.plan.command import main, plan
from cli.plan.options import PROGRAM, parse
from shared.settings.load import load_settings
from shared.settings.worker import WorkerConfig
from tests.services.worker.hybrids import save_hybrid

LOAD = ["--input-len", "40", "--output-len", "8", "--num-played", "20"]


@pytest.fixture(autouse=True)
def _threads():
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def test_a_log_becomes_settings_workers_and_times_measured_here(tmp_path: Path, capsys) -> None:
    log, out = tmp_path / "requests.jsonl", tmp_path / "plan.json"
    lines = [
        {"prompt": f"What is {i} + 2?", "max_tokens": 6, "timestamp": i / 20} for i in range(20)
    ]
    log.write_text("\n".join(map(json.dumps, lines)))
    flags = ["--requests", str(log), "--max-num-seqs", "4", "--device", "cpu", "--json", str(out)]
    assert main([*flags, "--goodput", "ttft=60000", "--price-per-hour", "0.5"]) == OK
    text = capsys.readouterr().out
    for word in ("20 requests", "shoal-tiny: 7.7M", "--max-model-len 256", "workers", "price"):
        assert word in text
    found = json.loads(out.read_text())
    (machine,) = found["machines"]
    assert machine["workers"] >= 1
    assert machine["played"]["num_requests"] == 20
    assert list(machine["step_ms"]) == ["1"]
    assert machine["kv_cache_tokens"] == 4 * 256


@pytest.mark.parametrize("name", ["qwen3.5", "granite 4, tied"])
def test_states_are_planned_for_cpus_and_cards(tmp_path: Path, capsys, name: str) -> None:
    save_hybrid(tmp_path, name)
    common = [str(tmp_path), *LOAD, "--device", "cpu", "--no-measure"]
    assert main([*common, "--max-num-seqs", "8"]) == OK
    text = " ".join(capsys.readouterr().out.split())
    assert "states of 8 sequences and 32 copies" in text
    assert main([*common, "--max-num-seqs", "8", "--card", "h100"]) == OK
    text = " ".join(capsys.readouterr().out.split())
    assert "states of 8 sequences and 32 copies" in text


def test_all_cards_are_compared_from_a_config_alone(tmp_path: Path, capsys) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 1000,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main([str(tmp_path), *LOAD, "--request-rate", "5", "--card", "all"]) == OK
    text = capsys.readouterr().out
    for words in ("h100", "l40s", "an assumed efficiency, not measured"):
        assert words in " ".join(text.split())


def test_steps_are_taken_from_measurements_elsewhere(tmp_path: Path, capsys) -> None:
    measured = tmp_path / "engine.json"
    figures = {"step_ms": {"decode": {"p50": 10.0}}, "prefill_tokens_per_s": 1000.0}
    load = {"concurrency": 1, "input_len": "8", "output_len": "8"}
    measured.write_text(json.dumps({"settings": load, "figures": figures}))
    flags = [
        "--measured",
        str(measured),
        "--concurrency",
        "1",
        "--device",
        "cpu",
        "--max-num-seqs",
        "1",
    ]
    out = tmp_path / "plan.json"
    assert main([*LOAD, *flags, "--json", str(out)]) == OK
    played = json.loads(out.read_text())["machines"][0]["played"]
    assert played["ttft_ms"]["p50"] == pytest.approx(40.0)
    assert played["tpot_ms"]["p50"] == pytest.approx(10.0, rel=0.1)


def test_targets_hold_without_times_too(tmp_path: Path) -> None:
    """Four at once on one worker take 40 ms a token, on two 20 ms."""
    measured, out = tmp_path / "engine.json", tmp_path / "plan.json"
    files = []
    for num_rows in (1, 2, 4):
        figures = {"step_ms": {"decode": {"p50": 10.0 * num_rows}}, "prefill_tokens_per_s": 1e6}
        load = {"concurrency": num_rows, "input_len": "8", "output_len": "8"}
        files.append(measured.with_stem(f"engine{num_rows}"))
        files[-1].write_text(json.dumps({"settings": load, "figures": figures}))
    flags = ["--concurrency", "4", "--device", "cpu", "--json", str(out), "--measured"]
    assert main([*LOAD, *flags, *map(str, files), "--goodput", "tpot=25"]) == OK
    (machine,) = json.loads(out.read_text())["machines"]
    assert machine["workers"] == 2


def test_slow_work_is_announced() -> None:
    said: list[str] = []
    given, rest = parse([*LOAD, "--card", "h100", "--concurrency", "2", "--device", "cpu"])
    plan(given, load_settings(WorkerConfig, rest, PROGRAM), said.append)
    assert said == ["plays requests on h100, workers: 1 …"]


def test_a_config_alone_that_fits_exits_with_0(capsys) -> None:
    assert main([*LOAD, "--device", "cpu", "--no-measure"]) == OK
    text = capsys.readouterr().out
    assert "unknown: steps are measured where the weights are, unless --no-measure is given" in text
    facts = [re.match(r"(model|weights|on|memory|speed) +", line) for line in text.splitlines()]
    assert len({each.end() for each in facts if each}) == 1, "all of them are one table"


def test_a_load_without_room_prints_the_sum_and_exits_with_1(capsys) -> None:
    flags = ["--device", "cpu", "--kv-cache-memory-bytes", "1000", "--no-measure"]
    assert main([*LOAD, *flags]) == FAILED
    assert "kv-cache-memory-bytes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--card", "h1000"], "h1000"),
        (["--requests", "/nowhere.jsonl"], "--requests: cannot read /nowhere.jsonl"),
        (["--measured", "/nowhere.json"], "--measured: /nowhere.json"),
        (["--efficiency", "2"], "'2' is not a number from 0.01 to 1"),
        (["/nowhere"], "/nowhere"),
        (["--pipeline-parallel-size", "2"], "pipeline-parallel-size: 2: plans are for one process"),
        (["--tensor-parallel-size", "2"], "tensor-parallel-size: 2: plans are for one process"),
    ],
)
def test_a_wrong_setting_is_named_and_exits_with_2(flags: list[str], problem: str, capsys) -> None:
    assert main([*flags, *LOAD, "--device", "cpu", "--no-measure"]) == WRONG
    assert problem in capsys.readouterr().err
