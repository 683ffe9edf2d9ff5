"""Metrics of stores of KV blocks."""

from prometheus_client import Counter, Gauge

BYTES = Counter("shoal_kv_store_bytes", "Bytes of KV blocks saved and loaded", ["direction"])
SECONDS = Counter(
    "shoal_kv_store_seconds", "Seconds spent on saving and loading KV blocks", ["direction"]
)
LOST = Counter(
    "shoal_kv_store_lost",
    "KV blocks that could not be loaded: another or none is there (other), damaged (damaged), or"
    " not readable (unreadable)",
    ["reason"],
)
UNSAVED = Counter("shoal_kv_store_unsaved", "KV blocks that could not be saved")
UP = Gauge("shoal_kv_store_up", "1 while a worker's store takes KV blocks", ["store"])
