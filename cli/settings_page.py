"""Writes docs/settings.md from the declared settings (``make docs``)."""

from pathlib import Path

from pydantic.fields import FieldInfo

from cli.settings_help import TITLES, default_of, fields_of, values_of
from shared.settings.serve import SETTINGS_OF_ONE_SERVICE

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
SEE = {
    "activation_dtype": "quantization.md#activations-in-eight-bits",
    "api_key_file": "keys.md#api-keys",
    "batch_dir": "batches.md",
    "cpu_offload_gb": "gpu.md#layers-in-the-hosts-memory",
    "embedding_quantization": "quantization.md#the-embeddings",
    "enable_expert_distribution_metrics": "operate.md#loads-of-experts",
    "enable_expert_parallel": "parallel.md#whole-experts",
    "keys": "keys.md#mesh-keys",
    "kv_cache_dtype": "quantization.md#the-kv-cache",
    "kv_offloading_size": "operate.md#a-store-of-kv-blocks",
    "later_priority_share": "decisions/062-time-share-for-low-priority.md",
    "lm_head_quantization": "quantization.md#the-output-head",
    "max_tokens_per_minute_per_key": "keys.md#api-keys",
    "num_threads": "cpu.md#threads-and-numa",
    "otlp_traces_endpoint": "traces.md#opentelemetry",
    "min_stream_rate": "keys.md#promises",
    "nnodes": "parallel.md#several-hosts",
    "numa_node": "cpu.md#threads-and-numa",
    "pipeline_parallel_size": "parallel.md#pipelines",
    "pooler_config": "pooling.md",
    "quantization": "quantization.md",
    "quarantine_s": "operate.md#requests-that-break-services",
    "response_store": "operate.md#stored-responses",
    "runner": "pooling.md",
    "speculative_config": "speculation.md",
    "tensor_parallel_size": "parallel.md",
    "tool_call_parser": "api.md#tools",
    "tpot_ms": "keys.md#promises",
    "trace_store_bytes": "traces.md",
    "ttft_ms": "keys.md#promises",
}
OPENING = """\
# Settings

<!-- Written by `make docs` from shared/settings; a test compares. -->

All settings of the services, with values, defaults and meaning. `shoal serve` takes all of them
except the ones marked †, which are for a single service.

A setting is a line of a YAML file (`--config FILE`), an environment variable
(`SHOAL_MAX_MODEL_LEN=4096`) or a flag (`--max-model-len 4096`); variables override the file, flags
override both. `--no-` turns a boolean flag off. Lists have commas between their parts. Names are
vLLM's where the meaning is the same; [other names](coming_from.md) of vLLM, SGLang and FastDeploy
are taken too. A wrong value is refused with the value and the limit. Quantization at the start,
ranks, expert metrics and `cpu-offload-gb` are for [our own architectures](models.md#our-own).
"""


def main() -> None:
    PAGE.write_text(page())


def page() -> str:
    """The text of docs/settings.md."""
    return "\n".join([OPENING, *(_section(name) for name in TITLES)])


def _section(name: str) -> str:
    rows = [_row(setting, field) for setting, field in fields_of(name).items()]
    head = "| setting | values | default | meaning |\n|---|---|---|---|"
    return f"## {TITLES[name]}\n\n{head}\n" + "\n".join(rows) + "\n"


def _row(name: str, field: FieldInfo) -> str:
    of_one = " †" if name in SETTINGS_OF_ONE_SERVICE else ""
    see = f" ([more]({SEE[name]}))" if name in SEE else ""
    cells = (
        f"`{name.replace('_', '-')}`{of_one}",
        values_of(field.annotation),
        default_of(name, field),
        f"{field.description}{see}",
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    main()
