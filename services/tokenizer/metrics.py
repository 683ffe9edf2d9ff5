"""The metrics of a tokenizer."""

from prometheus_client import Counter, Gauge, Histogram

PREPARE_SECONDS = Histogram(
    "shoal_prepare_seconds",
    "Template and encoding of one prompt, on a thread",
    buckets=(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5),
)
ENCODED_TOKENS = Counter("shoal_encoded_tokens", "Tokens of prompts that were prepared")
DECODED_TOKENS = Counter("shoal_decoded_tokens", "Generated tokens that were turned into text")
OPEN_CONVERSIONS = Gauge(
    "shoal_open_conversions", "Conversions of /tokenize and /detokenize that have not ended"
)
