"""A metric of gateways (HTTP requests) and tokenizers (prompts). Services that import this module
export it."""

from prometheus_client import Gauge

OPEN_REQUESTS = Gauge("shoal_open_requests", "Generation requests that have not ended")
