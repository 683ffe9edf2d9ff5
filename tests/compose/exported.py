"""The metrics exported by services, and those used by a Prometheus query."""

import re

from prometheus_client import PROCESS_COLLECTOR
from prometheus_client.metrics import MetricWrapperBase

from services.gateway import metrics as gateway_metrics
from services.gateway.http import client as gateway_client
from services.scheduler import metrics as scheduler_metrics
from services.tokenizer import metrics as tokenizer_metrics
from services.worker import metrics as worker_metrics
from shared.process import metrics as shared_metrics
from shared.process import open_requests

MODULES = (
    *(gateway_client, gateway_metrics, scheduler_metrics, tokenizer_metrics, worker_metrics),
    *(shared_metrics, open_requests),
)
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


def exported_names() -> set[str]:
    """The names of all samples our services export, and of those Prometheus adds."""
    values = (value for module in MODULES for value in vars(module).values())
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
