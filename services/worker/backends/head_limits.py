"""The heads that native code can compute. Others raise NotSupported with the reason."""

from collections.abc import Mapping

from kernels.cpu.delta import MAX_KEY_DIM, MAX_VALUE_DIM, MAX_WIDTH
from kernels.cpu.operators import (
    LANES,
    MAX_GROUP_SIZE,
    MAX_HEAD_DIM,
    MAX_NOPE_DIM,
    MAX_RANK,
    MAX_ROPE_DIM,
)
from kernels.delta import ScanTerms
from services.worker.layers.delta_rule import DeltaRule
from services.worker.layers.heads import Heads, Latents
from services.worker.layers.ops import NotSupported

# Keys of config.json.
DELTA_NAMES = "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"
CHANNEL_NAMES = "linear_head_dim", "linear_head_dim", "linear_conv_kernel_dim"
SCAN_NAMES = (
    *("mamba_d_state or ssm_state_size", "mamba_d_head or mamba_head_dim"),
    "mamba_d_conv or conv_kernel",
)
LIGHTNING_NAMES = "head_dim", "head_dim", ""


def check_heads(heads: Heads) -> None:
    spec, name = heads.spec, f"attention of layer {heads.layer}"
    _check_sizes({"head_dim": (spec.head_dim, MAX_HEAD_DIM)}, name)
    if (group := spec.num_heads // spec.num_kv_heads) > MAX_GROUP_SIZE:
        raise NotSupported(
            f"{name}: {group} query heads share a KV head; {MAX_GROUP_SIZE} are the most"
        )


def check_latents(latents: Latents) -> None:
    spec, name = latents.spec, f"attention of layer {latents.layer}"
    sizes = {
        "kv_lora_rank": (spec.rank, MAX_RANK),
        "qk_nope_head_dim": (spec.nope_dim, MAX_NOPE_DIM),
        "qk_rope_head_dim": (spec.rope_dim, MAX_ROPE_DIM),
        "v_head_dim": (spec.value_dim, None),
    }
    _check_sizes(sizes, name)


def check_delta(rule: DeltaRule) -> None:
    name = f"the delta rule of state {rule.layer}"
    names = CHANNEL_NAMES if rule.weights.is_by_channel else DELTA_NAMES
    if rule.scan is not None:
        names = SCAN_NAMES if isinstance(rule.scan, ScanTerms) else LIGHTNING_NAMES
    of_key, of_value, of_width = names
    sizes = {of_key: (rule.key_dim, MAX_KEY_DIM), of_value: (rule.value_dim, MAX_VALUE_DIM)}
    _check_sizes(sizes, name)
    if (width := rule.conv.shape[1]) > MAX_WIDTH:
        raise NotSupported(f"{name}: {of_width} {width} is above {MAX_WIDTH}")


def _check_sizes(sizes: Mapping[str, tuple[int, int | None]], name: str) -> None:
    for key, (size, most) in sizes.items():
        if size % LANES:
            raise NotSupported(f"{name}: {key} {size} is no multiple of {LANES}")
        if most is not None and size > most:
            raise NotSupported(f"{name}: {key} {size} is above {most}")
