"""Writes the settings into the Helm chart's values.schema.json (``make docs``)."""

import json
from pathlib import Path
from typing import Any

from cli.settings_help import SERVICES

SCHEMA = Path(__file__).parents[1] / "compose" / "helm" / "shoal" / "values.schema.json"
# Set by the chart or its images; API keys and tokens belong into a Secret.
SET_BY_CHART = {
    *("config", "mesh_dir", "instance", "admin_host", "admin_port", "admin_token", "keys"),
    *("insecure_tcp", "listen_address", "tokenizer_address", "scheduler_address", "model"),
    *("host", "port", "uds", "reuse_port", "api_key", "api_key_file", "reasoning_key"),
    *("gpu_claims", "rank", "leader"),
    *("nnodes", "node_rank", "master_addr", "master_port", "kv_transfer_address"),
    "encoder_address",
}
CHECKED = {"type", "enum", "anyOf", "minimum", "maximum", "exclusiveMinimum", "pattern"}


def main() -> None:
    SCHEMA.write_text(with_settings(SCHEMA.read_text()))


def with_settings(text: str) -> str:
    """The schema ``text`` with the current settings."""
    schema = json.loads(text)
    schema["properties"]["settings"]["properties"] = settings_schema()
    return json.dumps(schema, indent=2) + "\n"


def settings_schema() -> dict[str, Any]:
    """The JSON schema of each setting allowed in the chart's YAML file."""
    declared: dict[str, dict[str, Any]] = {}
    for config in SERVICES.values():
        declared |= config.model_json_schema()["properties"]
    return {
        name.replace("_", "-"): _one(declared[name])
        for name in sorted(declared.keys() - SET_BY_CHART)
    }


def _one(declared: dict[str, Any]) -> dict[str, Any]:
    """A list may also be text with commas between its parts."""
    if declared.get("type") == "array":
        return {"type": ["array", "string"], "description": declared["description"]}
    checks = {key: value for key, value in declared.items() if key in CHECKED}
    return {**checks, "description": declared["description"]}


if __name__ == "__main__":
    main()
