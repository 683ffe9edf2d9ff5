"""Metrics of images."""

from prometheus_client import Counter

ENCODE_SECONDS = Counter("shoal_worker_encode_seconds", "Seconds spent on features of images")
ENCODED_TOKENS = Counter(
    "shoal_worker_encoded_tokens", "Tokens of images whose features were computed"
)
