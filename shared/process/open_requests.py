"""A metric of gateways, which count HTTP requests, and of tokenizers, which count prompts. Services
that import this file show it."""

from prometheus_client import Gauge

OPEN_REQUESTS = Gauge("shoal_open_requests", "Generation requests that have not ended")
