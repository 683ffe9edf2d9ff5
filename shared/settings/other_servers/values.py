"""Values of our settings under the names of vLLM, SGLang and FastDeploy."""

import logging
from typing import Any

log = logging.getLogger(__name__)

WEIGHT_SYNONYMS = {  # vLLM's and FastDeploy's
    "bitsandbytes": "nf4",
    "block_wise_fp8": "fp8_block",
    "fp8_per_block": "fp8_block",
    "fp8_per_channel": "fp8",
    "fp8_per_tensor": "fp8",
    "w4a8": "wint4",
    "wfp8afp8": "fp8",
    "int8_per_channel_weight_only": "wint8",
}
CACHE_SYNONYMS = {  # vLLM's; Shoal's have a scale for each token and head
    "int8_per_token_head": "int8",
    "fp8_ds_mla": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_per_token_head": "fp8",
    "bfloat16": "none",
    "float16": "none",
}
ROLE_SYNONYMS = {"mixed": "both", "null": "both"}  # FastDeploy's and SGLang's
DTYPE_SYNONYMS = {"float": "float32", "half": "float16"}  # vLLM's
# vLLM's and SGLang's, for checkpoints that name their own format.
CHECKPOINT_FORMS = {
    *("auto-round", "awq", "awq_marlin", "compressed-tensors", "gptq", "gptq_marlin", "modelopt"),
    *("modelopt_fp4", "modelopt_fp8", "moe_wna16", "mxfp4", "mxfp8", "nvfp4", "quark", "torchao"),
    *("ascend", "w8a8_fp8", "w8a8_int8"),
}
# vLLM's and SGLang's loaders of the same safetensors.
LOADERS = {
    *("bitsandbytes", "fastsafetensors", "instanttensor", "layered", "mistral", "runai_streamer"),
    *("runai_streamer_sharded", "remote"),
}
FOREIGN_METHODS = {
    *("dflash", "draft_model", "dspark", "eagle", "extract_hidden_states", "medusa"),
    *("mlp_speculator", "suffix"),
}
FOREIGN_KEYS = {
    *("attention_backend", "draft_sample_method", "draft_tensor_parallel_size", "enforce_eager"),
    *("max_model_len", "moe_backend", "quantization", "rejection_sample_method"),
    *("revision", "benchmark_mode", "num_model_steps"),
}
"""Keys of draft models or of kernels."""
SYNONYMS = {
    "quantization": WEIGHT_SYNONYMS,
    "kv_cache_dtype": CACHE_SYNONYMS,
    "worker_role": ROLE_SYNONYMS,
    "dtype": DTYPE_SYNONYMS,
}
# Values without effect, by setting: the value used instead, and the reason.
IGNORED = {
    "quantization": (CHECKPOINT_FORMS, "none", "a quantized checkpoint says so itself"),
    "load_format": (LOADERS, "auto", "safetensors are read from the folder"),
}


def value_of(setting: str, value: Any) -> Any:
    """A ``value`` of our ``setting``, under our name."""
    if not isinstance(value, str):
        return value
    names, instead, reason = IGNORED.get(setting, (set(), "", ""))
    if value in names:
        log.warning("%s has no effect: %s", value, reason)
        return instead
    return SYNONYMS.get(setting, {}).get(value, value)


def speculation_of(given: dict[str, Any]) -> dict[str, Any]:
    """vLLM, SGLang and FastDeploy name MTP heads by family. Draft models of other kinds than
    EAGLE-3 and Gemma 4's assistants, which are known by their names too, do not change the
    output, so they are ignored."""
    method, model = given.get("method"), str(given.get("model")).lower()
    if method is None and "eagle3" in model:
        method = "eagle3"
    if method in (None, "draft_model") and "gemma" in model and "assistant" in model:
        method = "mtp"
    if isinstance(method, str) and method.endswith("_mtp"):
        method = "mtp"
    if method in FOREIGN_METHODS or (method is None and "model" in given):
        log.warning(
            "speculative-config has no effect: of draft models only eagle3 and assistants of"
            " Gemma 4 work"
        )
        return {"method": "none"}
    others = FOREIGN_KEYS if method in ("eagle3", "mtp") else {*FOREIGN_KEYS, "model"}
    ours = {key: each for key, each in given.items() if key not in others}
    return ours | {"method": method} if method else ours
