"""Compares the models of two peers, and the settings that change a model's output."""

from shared.wire.messages import Hello

FIELDS_OF_ALL = {
    "fingerprint": "model",
    "vocab_size": "vocab_size",
    "max_model_len": "max-model-len",
    "runner": "runner",
    "pooling": "pooler-config",
}
FIELDS_OF_ONE_SERVICE = FIELDS_OF_ALL | {
    "names": "served-model-name",
    "defaults": "generation-config",
    "dtype": "dtype",
    "load_format": "load-format",
    "logprobs_mode": "logprobs-mode",
    "tool_parser": "tool-call-parser",
    "reasoning_parser": "reasoning-parser",
    "quantization": "quantization",
    "lm_head_quantization": "lm-head-quantization",
    "embedding_quantization": "embedding-quantization",
    "kv_cache_dtype": "kv-cache-dtype",
    "activation_dtype": "activation-dtype",
}


def difference(hello: Hello, other: Hello) -> str | None:
    """A setting in which the models of two peers differ, with both values, or None.

    A field that one of them does not send, as a peer of an older version, is no difference.
    """
    fields = FIELDS_OF_ONE_SERVICE if hello.service == other.service else FIELDS_OF_ALL
    for field, setting in fields.items():
        value, expected = (getattr(each.model, field, None) for each in (hello, other))
        if value and expected and value != expected:
            return f"{setting} is {value}, but {expected} at {other.service} {other.instance}"
    return None
