"""The metrics exported by services, and those used by a Prometheus query."""

import re
from functools import cache
from importlib import import_module
from types import ModuleType

from prometheus_client import PROCESS_COLLECTOR
from prometheus_client.metrics import MetricWrapperBase

from benchmarks.harness.docker_engine import ROOT

SERVICES = ("gateway", "tokenizer", "scheduler", "worker")
FOLDERS = (*(f"services/{service}" for service in SERVICES), "shared/process")
# Exported by several kinds of service: without a job their values would be added up.
EXPORTED_BY_SEVERAL = {
    "shoal_open_requests",
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
}
SUFFIXES = {
    "counter": ["_total"],
    "gauge": [""],
    "histogram": ["_bucket", "_sum", "_count"],
    "info": ["_info"],
}


def assert_exported(expression: str) -> None:
    """Each metric of the query is exported, with a job if several services export it."""
    asked = selectors(expression)
    assert asked
    assert {name for name, _ in asked} <= exported_names()
    for name, labels in asked:
        assert name not in EXPORTED_BY_SEVERAL or "job=" in labels, f"{name}: of which job?"


@cache
def modules() -> list[ModuleType]:
    """The modules with metrics."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    found = [path for path in paths if "from prometheus_client import" in path.read_text()]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in found]
    return [import_module(name) for name in names]


def exported_names() -> set[str]:
    """The names of all samples our services export, and of the ones that Prometheus adds."""
    values = (value for module in modules() for value in vars(module).values())
    ours = [
        metric
        for each in values
        if isinstance(each, MetricWrapperBase)
        for metric in each.describe()
    ]
    metrics = [*ours, *PROCESS_COLLECTOR.collect()]
    return {"up"} | {metric.name + suffix for metric in metrics for suffix in SUFFIXES[metric.type]}


def selectors(expression: str) -> list[tuple[str, str]]:
    """Each metric with its label matchers. Names have an underscore, or are ``up``; functions
    precede a parenthesis."""
    bare = re.sub(r"\b(by|on|without) \([^)]*\)", "", expression)
    found = re.findall(r"(?<![\w\"])([a-z][\w:]*)\b(?!\s*\()(?:\{([^}]*)\})?", bare)
    return [(name, labels) for name, labels in found if "_" in name or name == "up"]
