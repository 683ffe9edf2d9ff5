"""The GPU check on a CPU: an error in it would cost GPU time."""

import ast
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu import check, kernel_table, machine, precision
from benchmarks.gpu.carry import LACKING
from benchmarks.gpu.engine_table import Engines, Point
from benchmarks.gpu.results import Results
from benchmarks.gpu.sections import ROOT, Section, Sections, marked_files, run_tests
from benchmarks.gpu.shapes import QWEN3_8B, TINY, token_bytes, weights_bytes, write_model
from benchmarks.gpu.suite import of_test
from benchmarks.gpu.summary import aims
from cli.bench.engine_loop import Job
from services.worker.machine.hardware import compute_exactly
from services.worker.models.registry import read_model_config
from services.worker.weights.load import build_model

# Included in an image with PyTorch and transformers.
IMAGE_MODULES = (
    *("torch", "triton", "numpy", "transformers", "tokenizers", "safetensors", "huggingface_hub"),
    *("aiohttp", "multidict", "yarl", "uvloop", "rich", "prometheus_client", "jinja2", "yaml"),
)
OUR_PACKAGES = ("cli", "kernels", "services", "shared")
ON_DEMAND = {  # for images and videos, or exported traces
    *("films.py", "otlp.py", "reader.py", "upright.py"),
}
ENGINE_ROWS = {
    "batch 1": 1,
    "batch 1, drafts": 4,
    "batches": 1,
    "logprobs": 4,
    "batches, drafts": 4,
    "drafts of some tokens": 3,
    "penalties": 2,
    "eager": 2,
    "other acceptances": 6,
    "codes": 8,
    "offloaded": 6,
    "small model": 2,
    "small model by transformers": 2,
}


OTHER_ROWS = {
    "ceilings": 1,
    "prompts": 2,
    "prompts that join": 3,
    "other configurations": 0,
}
WORDS = ("ceilings", "engine", "prompts", "kernels", "other")
# Sections with processes or profiles of their own, and peers.
SLOW_ROWS = {
    "ceilings": 1,
    "engine, batches": 1,
    "engine, batches, drafts": 4,
    "engine, small model by transformers": 2,
    "mesh": 4,
    "ranks": 4,
    "start": 2,
    "stores": 2,
    "transformers": 1,
}
SLOW_WORDS = ("mesh", "ranks", "start", "stores", "transf", "timeline", "engine, batches")


def checked(folder: Path, *words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.gpu.check", "--dry", "--results", str(folder)]
    command += ["--only", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("gpu-cpu-*.json")
    payload: dict[str, Any] = json.loads(path.read_text())
    return payload


@pytest.mark.slow
def test_every_section_finds_something_and_all_of_it_is_written(tmp_path: Path) -> None:
    payload = checked(tmp_path, *WORDS)
    found = {name: len(section["rows"]) for name, section in payload["results"].items()}
    engine = {f"engine, {name}": num for name, num in ENGINE_ROWS.items()}
    num_kernels = found.pop("kernels")
    assert found == engine | OTHER_ROWS
    rows = payload["results"]["kernels"]["rows"]
    assert num_kernels == len(list(kernel_table.cases(of_test())))
    assert not [row for row in rows if "failed" in row]
    assert len(payload["aims"]) == 6
    assert {"card", "versions", "date", "command"} <= set(payload)
    (text,) = [path.read_text() for path in tmp_path.glob("gpu-cpu-*.md")]
    assert "| of the floor, batch 1 |" in text
    assert "## prompts" in text


@pytest.mark.slow
def test_sections_of_processes_and_profiles_find_something(tmp_path: Path) -> None:
    payload = checked(tmp_path, *SLOW_WORDS)
    results = payload["results"]
    found = {name: len(section["rows"]) for name, section in results.items()}
    assert found.pop("timeline of a step") > 2
    assert found == SLOW_ROWS
    assert [aim["what"] for aim in payload["aims"]] == ["speed through the mesh, batch 2"]
    (text,) = [path.read_text() for path in tmp_path.glob("gpu-cpu-*.md")]
    assert "## mesh" in text
    assert results["ranks"]["rows"][0]["ranks"] == 2
    assert "decode_tokens_per_s" in results["transformers"]["rows"][0]


def test_a_failed_section_reports_the_reason_and_keeps_its_measurements(tmp_path: Path) -> None:
    results = Results(tmp_path, machine.describe(torch.device("cpu"), []))

    def fails(limit_s: float) -> Iterator[dict[str, Any]]:
        yield {"limit": limit_s}
        raise ValueError("no such card")

    def runs(limit_s: float) -> Iterator[dict[str, Any]]:
        yield {"ran": True}

    sections = [Section("one", 1, 3, fails), Section("two", 1000, 2000, runs)]
    check.run(
        [*sections, Section("three", 1, 3, runs)],
        results,
        time.monotonic() + 100,
        torch.device("cpu"),
    )
    payload = json.loads(results.path.read_text())["results"]
    assert payload["one"]["rows"] == [{"limit": 3}]
    assert payload["one"]["failed"] == "ValueError: no such card"
    assert payload["two"]["left out"].endswith("s are left of 1000 needed")
    assert payload["three"]["rows"] == [{"ran": True}]
    text = results.path.with_suffix(".md").read_text()
    assert "failed: ValueError: no such card" in text


def test_ranks_are_left_out_by_name_where_there_is_one_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    suite = replace(of_test(), device=torch.device("cuda"))
    sections = [each for each in Sections(suite, tmp_path, {}) if each.name == "ranks"]
    results = Results(tmp_path, machine.describe(torch.device("cpu"), []))
    check.run(sections, results, time.monotonic() + 100, torch.device("cpu"))
    text = results.path.with_suffix(".md").read_text()
    assert "left out: there is one GPU" in text
    assert "failed" not in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_the_check_exits_with_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main([]) == 2
    assert capsys.readouterr().err == f"gpu-check: torch {torch.__version__} finds no CUDA device\n"


def test_a_step_emits_as_many_tokens_as_drafts_are_declared_accepted(tmp_path: Path) -> None:
    loop = Engines(of_test(), tmp_path).loop("mtp")
    ids = torch.arange(20, dtype=torch.int32).numpy()
    for depth, share in ((3, 1.0), (1, 1.0), (3, 0.0), (0, 1.0)):
        loop.speculate(depth, share)
        steps = loop.run([Job(ids, 12)] * 2, 2, None)
        assert sum(step.num_decoded for step in steps) == 24
        second = [step for step in steps if not step.num_prompt_tokens][1]
        assert second.num_decoded == 2 * (1 + depth * share)


def test_the_bytes_of_a_step_match_the_weights_that_it_reads(tmp_path: Path) -> None:
    config = read_model_config(write_model(tmp_path / "model", TINY))
    model = build_model(config, torch.float32, torch.device("cpu"))
    sizes = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    del sizes["model.embed_tokens.weight.values"]
    norms = "q_norm", "k_norm"  # negligible
    sizes = {name: size for name, size in sizes.items() if not any(n in name for n in norms)}
    assert weights_bytes(TINY, 4) == sum(sizes.values())
    assert weights_bytes(QWEN3_8B, 2) / 1e9 == pytest.approx(15.14, abs=0.01)
    assert token_bytes(QWEN3_8B, 2) == 147456


@pytest.mark.slow
def test_the_marked_tests_are_run_from_the_files_that_have_such() -> None:
    claims = ROOT / "tests" / "gpu" / "test_gpu_claims.py"
    assert claims in marked_files()
    assert Path(__file__) not in marked_files()
    (row,) = run_tests([claims], 60)
    assert row["exit code"] == 0


def test_an_engine_whose_run_broke_off_is_built_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = Engines(of_test(), tmp_path)
    loop, jobs = engines.loop("graphs"), [Job(np.arange(20, dtype=np.int32), 12)]
    monkeypatch.setattr(loop, "_check_ends", raising(RuntimeError("NaN")))
    with pytest.raises(RuntimeError, match="NaN"):
        loop.run(jobs, 1, None)
    assert engines.loop("graphs") is not loop
    assert sum(step.num_decoded for step in engines.loop("graphs").run(jobs, 1, None)) == 12


def raising(error: Exception) -> Callable[[], None]:
    def run() -> None:
        raise error

    return run


def test_parts_are_measured_with_the_ceilings_that_are_known(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    def names(ceilings: dict[str, float], *words: str) -> list[str]:
        sections = Sections(of_test(), tmp_path_factory.mktemp("models"), ceilings)
        return [section.name for section in check._chosen(sections, list(words), is_dry=False)]

    assert names({}, "mesh") == ["ceilings", "mesh"]
    assert names({"read": 3000.0}, "mesh") == ["mesh"]
    assert names({}, "launches") == ["launches"]
    assert names({}, "ceilings") == ["ceilings"]
    assert names({}, "no such thing") == []
    assert "launches" not in names({})


def test_peers_are_measured_as_torch_has_them_by_itself() -> None:
    compute_exactly()
    with precision.as_torch_has_it():
        assert precision.flags() == precision.OF_TORCH
    assert not precision.flags()["allow_bf16_reduced_precision_reduction"]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_exact_gemms_keep_split_k_which_cublas_cannot_do_without(dtype: str) -> None:
    """In torch a 16-bit GEMM on cuBLAS raises an error if split-K is forbidden."""
    name = f"allow_{dtype}_reduced_precision_reduction"
    with precision.as_torch_has_it():
        pass  # sets all flags
    compute_exactly()
    assert not getattr(torch.backends.cuda.matmul, name)
    assert getattr(torch.backends.cuda.matmul, f"{name}_split_k")


@pytest.mark.slow
def test_packages_missing_on_an_image_are_carried() -> None:
    """Covers top-level imports of our packages, not imports inside functions."""
    carried = {*LACKING.values(), "pydantic"}  # pip installs a wheel's dependencies
    known = {*IMAGE_MODULES, *carried, *OUR_PACKAGES, *sys.stdlib_module_names}
    missing = {
        f"{name} in {path.relative_to(ROOT)}"
        for package in OUR_PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if path.name not in ON_DEMAND
        for name in _imported(ast.parse(path.read_text()).body)
        if name not in known
    }
    assert not missing


def _imported(body: Sequence[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.Import):
            yield from (each.name.partition(".")[0] for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def test_aims_are_ratios_of_like_to_like() -> None:
    def row(kind: str, rate: float, **more: Any) -> dict[str, Any]:
        point = Point(kind, 1)._asdict()
        return point | {"decode_tokens_per_s": rate, "expected_tokens_per_s": rate} | more

    drafts = [row("mtp", 90 + 30 * depth, depth=depth, acceptance=0.8) for depth in range(3)]
    sections = {
        "engine, batch 1": {"rows": [row("graphs", 100.0, share_of_floor=0.8)]},
        "engine, drafts": {"rows": [*drafts, row("mtp", 500, depth=3, acceptance=0.9)]},
        "engine, logprobs": {"rows": [row("graphs", 90.0, logprobs=20)]},
        "engine, penalties": {"rows": [row("graphs", 97.0, penalises=True)]},
        "mesh": {
            "rows": [
                {
                    "min_stream_rate": rate,
                    "waves": waves,
                    "num_rows": 1,
                    "decode_tokens_per_s": 98.0,
                }
                for rate, waves in ((0.0, 1), (0.0, 4), (0.5, 1))
            ]
        },
    }
    found = {aim.what: (round(aim.found, 3), aim.is_met) for aim in aims(sections)}
    assert found == {
        "of the floor, batch 1": (0.8, True),
        "speed with 2 drafts, batch 1": (1.667, True),
        "speed with logprobs=20, batch 1": (0.9, False),
        "speed with penalties, batch 1": (0.97, True),
        "speed through the mesh, batch 1": (0.98, True),
    }
    assert list(aims({})) == []
