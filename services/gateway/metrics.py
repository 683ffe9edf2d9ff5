"""The gateway's metrics. Names that begin with vllm: have their meaning in vLLM."""

from collections.abc import Iterator

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.registry import Collector

HTTP_REQUESTS = Counter(
    "shoal_http_requests",
    "HTTP requests by route and status; 499: the client left",
    ["route", "status"],
)
BUFFERED_BYTES = Gauge(
    "shoal_buffered_bytes", "Bytes of bodies and replies that open requests hold"
)
STREAM_ERRORS = Counter("shoal_stream_errors", "Replies that ended with an error after status 200")
SLOW_CLIENTS = Counter(
    "shoal_slow_clients", "Connections cut off, for clients that did not read for slow-client-s"
)
CONNECTIONS = Gauge("shoal_connections", "Connections of clients")
SHED_CONNECTIONS = Counter(
    "shoal_shed_connections",
    "Connections ended by the gateway: no request came in time (late); or files ran out, and one"
    " without a request was closed (idle), or a new one got a 503 (refused) or nothing (closed)",
    ["reason"],
)

REPLAYS = Counter("shoal_replays", "Prompts submitted anew after the loss of a service")

KEY_TOKENS = Counter(
    "shoal_key_tokens", "Tokens of an API key, of prompts and generated; key: its id", ["key"]
)
KEY_REFUSALS = Counter(
    "shoal_key_refusals", "Requests of an API key that a limit of its own refused", ["key", "limit"]
)

_MODEL = ["model_name"]
PROMPT_TOKENS = Counter("vllm:prompt_tokens", "Prompt tokens of accepted requests", _MODEL)
GENERATION_TOKENS = Counter("vllm:generation_tokens", "Tokens that clients were sent", _MODEL)
FINISHED_REQUESTS = Counter(
    "vllm:request_success", "Choices that have ended", [*_MODEL, "finished_reason"]
)
# fmt: off
TIME_TO_FIRST_TOKEN = Histogram(
    "vllm:time_to_first_token_seconds", "From the request to its first token", _MODEL,
    buckets=(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10,
             20, 40, 80, 160, 640, 2560),
)
REQUEST_LATENCY = Histogram(
    "vllm:e2e_request_latency_seconds", "From the request to its last token", _MODEL,
    buckets=(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960,
             1920, 7680),
)
INTER_TOKEN_LATENCY = Histogram(
    "vllm:inter_token_latency_seconds",
    "Between two deliveries of one choice, by the tokens of the later; once for a delivery", _MODEL,
    buckets=(0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1,
             2.5, 5, 7.5, 10, 20, 40, 80),
)
NUM_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000,
              100_000, 200_000, 500_000, 1_000_000)
REQUEST_PROMPT_TOKENS = Histogram(
    "vllm:request_prompt_tokens", "Tokens of all prompts of a request that has ended", _MODEL,
    buckets=NUM_TOKENS,
)
REQUEST_GENERATION_TOKENS = Histogram(
    "vllm:request_generation_tokens", "Tokens of all choices of a request that has ended", _MODEL,
    buckets=NUM_TOKENS,
)
# fmt: on


class KeyView(Collector):
    """All metrics, but of API keys only the key ``key_id``: other keys' use is private, and their
    ids are parts of hashes, against which guesses of a key could be tested."""

    def __init__(self, key_id: str) -> None:
        self._key_id = key_id

    def collect(self) -> Iterator[Metric]:
        for metric in REGISTRY.collect():
            metric.samples = [each for each in metric.samples if self._shows(each.labels)]
            yield metric

    def _shows(self, labels: dict[str, str]) -> bool:
        return labels.get("key", self._key_id) == self._key_id


def registry_of(key_id: str) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(KeyView(key_id))
    return registry
