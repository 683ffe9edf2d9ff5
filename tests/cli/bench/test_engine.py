"""`shoal bench engine` from its flags to its figures."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cli.bench.command import main
from cli.bench.engine import figures
from cli.bench.engine_loop import EngineLoop, Job, Step
from shared.model_folder import EMBEDDED_MODEL
from shared.settings.worker import WorkerConfig

WORKER = ["--device", "cpu", "--num-threads", "1", "--num-gpu-blocks-override", "200"]


@pytest.fixture(autouse=True)
def _threads():
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def test_a_run_ends_with_tables_and_everything_as_json(tmp_path: Path, capsys):
    path = tmp_path / "run.json"
    flags = "--concurrency 2 --num-requests 3 --input-len 5 --output-len uniform:4,6 --logprobs 2"
    assert main(["engine", *flags.split(), *WORKER, "--json", str(path)]) == 0
    text = capsys.readouterr().out
    for word in ("shoal-tiny", "3, 2 at once", "prefill", "decode", "scheduling", "GB/s", "P99"):
        assert word in text
    payload = json.loads(path.read_text())
    assert payload["command"].startswith("shoal bench engine --concurrency 2")
    assert {"date", "machine", "versions"} <= set(payload)
    assert payload["settings"]["output_len"] == "uniform:4,6"
    assert payload["worker"]["num_gpu_blocks_override"] == 200
    found = payload["figures"]
    assert found["num_steps"]["prefill"] == 2, "the third prompt waits for a place"
    assert found["num_preemptions"] == 0
    assert 0 < found["scheduling_share"] < 1
    for name in ("prefill_tokens_per_s", "decode_tokens_per_s", "weights_bytes_per_s"):
        assert found[name] > 0
    weights = sum(file.stat().st_size for file in EMBEDDED_MODEL.glob("*.safetensors"))
    assert found["weights_bytes"] > weights / 2


def test_every_token_is_computed_in_some_step():
    config = WorkerConfig(device="cpu", num_threads=1, num_gpu_blocks_override=200)
    loop = EngineLoop(config)
    ids = torch.arange(20, 40, dtype=torch.int32).numpy()
    steps = loop.run([Job(ids, 3), Job(ids[:10], 5), Job(ids, 2)], 2, None)
    assert sum(step.num_prompt_tokens for step in steps) == 50
    assert sum(step.num_decoded for step in steps) == 3 + 5 + 2
    assert all(step.engine_s > 0 and step.scheduling_s > 0 for step in steps)


def test_figures_keep_steps_with_and_without_a_prompt_apart():
    steps = [Step(30, 0, 0.3, 0.05), Step(10, 7, 0.1, 0.05), *[Step(0, 8, 0.02, 0.0)] * 3]
    found = figures(steps, 4_000_000)
    assert found["num_steps"] == {"prefill": 2, "decode": 3}
    assert found["prefill_tokens_per_s"] == pytest.approx(100)
    assert found["decode_tokens_per_s"] == pytest.approx(400)
    assert found["step_ms"]["prefill"]["mean"] == pytest.approx(200)
    assert found["scheduling_share"] == pytest.approx(0.1 / 0.56)
    assert found["weights_bytes_per_s"] == pytest.approx(200e6)


def test_answers_of_one_token_need_no_step_without_a_prompt(capsys):
    assert main(["engine", "--input-len", "5", "--output-len", "1", *WORKER]) == 0
    assert "–" in capsys.readouterr().out
    found = figures([Step(5, 0, 0.1, 0.1)], 1)
    assert found["decode_tokens_per_s"] is found["weights_bytes_per_s"] is None


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--concurrency", "0"], "--concurrency: '0' is not an integer"),
        (["--concurrency", "9", "--max-num-seqs", "8"], "--concurrency: 9 is more than max-num-s"),
        (["--input-len", "2040", "--output-len", "20"], "the context holds 2048 tokens"),
        (["--model", "/no/such"], "/no/such"),
    ],
)
def test_settings_that_do_not_go_together_are_an_error_of_one_line(
    words: list[str], text: str, capsys
):
    assert main(["engine", *WORKER, *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("shoal bench engine: ")
    assert text in error
    assert error.count("\n") == 1


def test_torch_is_imported_by_the_engine_alone():
    code = "import sys, cli.bench.command; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
