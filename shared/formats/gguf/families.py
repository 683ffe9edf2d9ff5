"""Architectures of GGUF files: their tensors by our names, and their metadata as a config.json."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shared.formats.gguf.file import BLOCKS, QUANTIZED, GgufFile, StoredBlocks, linked_name

ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
MLP = {
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA_NORMS = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# An expert's number is put in place of the star.
QWEN_EXPERTS = {
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
}
MIXTRAL_EXPERTS = {
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.*.w1",
    "ffn_up_exps": "block_sparse_moe.experts.*.w3",
    "ffn_down_exps": "block_sparse_moe.experts.*.w2",
}
MAY_HAVE_BIAS = ("attn_q", "attn_k", "attn_v", "attn_output")
EMBEDDING, FINAL_NORM, HEAD, FACTORS = "token_embd", "output_norm", "output", "rope_freqs.weight"
OUTSIDE = {EMBEDDING: "model.embed_tokens", FINAL_NORM: "model.norm", HEAD: "lm_head"}
GELU = {"hidden_activation": "gelu_pytorch_tanh"}
EPSILON = "attention.layer_norm_rms_epsilon"
ROPE_FACTORS = "rope.scaling.factor", "rope.scale_linear"  # the first counts
# Layers of the models of 27B, which scale scores by the width and not by the heads.
GEMMA2_27B, GEMMA3_27B = 46, 62


@dataclass(frozen=True, slots=True)
class Family:
    """``architecture`` has the tensors ``names`` in each layer. The rows of queries and keys are
    ``interleaved``: elements that rotate together are neighbours. Norms of a family with
    ``norm_offset`` have it added in the file. ``extra`` keys of config.json are constant."""

    architecture: str
    names: Mapping[str, str]
    interleaved: bool = False
    norm_offset: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)


MIXTRAL = Family("MixtralForCausalLM", ATTENTION | MIXTRAL_EXPERTS, interleaved=True)
FAMILIES = {
    "llama": Family("LlamaForCausalLM", ATTENTION | MLP, interleaved=True),
    "qwen2": Family("Qwen2ForCausalLM", ATTENTION | MLP),
    "qwen3": Family("Qwen3ForCausalLM", ATTENTION | HEAD_NORMS | MLP),
    "qwen3moe": Family(
        "Qwen3MoeForCausalLM",
        ATTENTION | HEAD_NORMS | QWEN_EXPERTS,
        extra={"norm_topk_prob": True},
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM", ATTENTION | MLP | GEMMA_NORMS, norm_offset=1.0, extra=GELU
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        ATTENTION | HEAD_NORMS | MLP | GEMMA_NORMS,
        norm_offset=1.0,
        extra=GELU,
    ),
}


class Entry(NamedTuple):
    """A tensor by our name, in ``file``: rows of blocks from ``start`` on. Rows of ``heads``, if
    any, are interleaved; ``offset`` is to be subtracted."""

    name: str
    file: str
    kind: str
    shape: list[int]
    start: int
    heads: int = 0
    offset: float = 0.0


class Layout:
    """The model in all ``files``, by the metadata of ``first`` and by their tensors. Raises
    ConfigError."""

    def __init__(self, first: GgufFile, files: list[GgufFile]) -> None:
        self._first = first
        self._tensors: dict[str, tuple[GgufFile, StoredBlocks]] = {}
        for file in files:
            for name, stored in file.tensors.items():
                if name in self._tensors:
                    raise file.wrong(f"tensor {name} is in another part too")
                self._tensors[name] = file, stored
        self.arch: str = first.require("general.architecture", str)
        if self.arch not in FAMILIES:
            raise first.wrong(
                f"architecture {self.arch} is not supported; supported are {', '.join(FAMILIES)}"
            )
        self._num_layers = self._number("block_count", least=0)
        self._num_experts = self._number("expert_count", 0, least=0)
        is_mixtral = self.arch == "llama" and self._num_experts
        self._family = MIXTRAL if is_mixtral else FAMILIES[self.arch]
        self._heads = self._number("attention.head_count")
        self._kv_heads = self._number("attention.head_count_kv", self._heads)
        self._hidden_size = self._number("embedding_length")
        self._head_dim = self._number("attention.key_length", self._hidden_size // self._heads)

    def entries(self) -> list[Entry]:
        """Every tensor that the model needs. A ConfigError names a missing or an unknown one."""
        found = [entry for name in self._tensors for entry in self._entries_of(name)]
        known = {each.name.rpartition(".")[0] for each in found if not each.name.endswith("bias")}
        for name, ours in self._expected():
            if ours not in known:
                raise self._first.wrong(f"the architecture {self.arch} lacks tensor {name}")
        return found

    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        is_quantized = any(stored.kind in QUANTIZED for _, stored in self._tensors.values())
        attention_bias = "blk.0.attn_q.bias" in self._tensors
        self._first.require(f"{self.arch}.{EPSILON}", float)
        config = {
            "architectures": [self._family.architecture],
            "model_type": self.arch,
            "vocab_size": self.vocab_size,
            "hidden_size": self._hidden_size,
            "intermediate_size": self._number("feed_forward_length"),
            "num_hidden_layers": self._num_layers,
            "num_attention_heads": self._heads,
            "num_key_value_heads": self._kv_heads,
            "head_dim": self._head_dim,
            "max_position_embeddings": self._number("context_length"),
            "rms_norm_eps": self._positive(EPSILON),
            "tie_word_embeddings": f"{HEAD}.weight" not in self._tensors,
            "attention_bias": attention_bias,
        }
        config |= self._rope() | self._sparse() | self._gemma() | {**self._family.extra}
        return config | ({"quantization_config": {"quant_method": "gguf"}} if is_quantized else {})

    @property
    def vocab_size(self) -> int:
        if f"{EMBEDDING}.weight" not in self._tensors:
            raise self._first.wrong(f"the architecture {self.arch} lacks tensor {EMBEDDING}.weight")
        return self._tensors[f"{EMBEDDING}.weight"][1].shape[0]

    def _expected(self) -> Iterator[tuple[str, str]]:
        for part in (EMBEDDING, FINAL_NORM):
            yield f"{part}.weight", OUTSIDE[part]
        for layer in range(self._num_layers):
            for part, ours in self._family.names.items():
                first = ours.replace("*", "0")
                yield f"blk.{layer}.{part}.weight", f"model.layers.{layer}.{first}"

    def _entries_of(self, name: str) -> Iterator[Entry]:
        file, stored = self._tensors[name]
        part, _, suffix = name.rpartition(".")
        layer = ""
        if part.startswith("blk."):
            _, layer, part = part.split(".", 2) if part.count(".") >= 2 else ("", "", part)
        elif name == FACTORS:
            return
        names = self._family.names if layer else OUTSIDE
        is_known = suffix == "weight" or (suffix == "bias" and part in MAY_HAVE_BIAS)
        if part not in names or not is_known or (layer and not self._is_layer(layer)):
            raise file.wrong(f"the architecture {self.arch} has no tensor {name}")
        ours = f"model.layers.{layer}.{names[part]}" if layer else names[part]
        heads = {"attn_q": self._heads, "attn_k": self._kv_heads}.get(part, 0)
        if heads and stored.shape[0] != heads * self._head_dim:
            raise file.wrong(f"tensor {name} {stored.shape}: {heads} heads of {self._head_dim}")
        whole = Entry(
            name=f"{ours}.{stored.kind if stored.kind in QUANTIZED else suffix}",
            file=linked_name(file.path),
            kind=stored.kind,
            shape=stored.shape,
            start=stored.start,
            heads=heads if self._family.interleaved else 0,
            offset=self._family.norm_offset if part.endswith("norm") else 0.0,
        )
        yield from self._experts(whole) if "*" in ours else [whole]

    def _experts(self, whole: Entry) -> Iterator[Entry]:
        """An entry for each expert of a stack."""
        block, (num, *shape) = BLOCKS[whole.kind], whole.shape
        if len(shape) != 2 or num != self._num_experts:
            raise self._first.wrong(
                f"tensors for {whole.name} {whole.shape}: {self._num_experts} experts"
            )
        num_bytes = math.prod(shape) // block.size * block.num_bytes
        for number in range(num):
            name = whole.name.replace("*", str(number))
            yield whole._replace(name=name, shape=shape, start=whole.start + number * num_bytes)

    def _is_layer(self, number: str) -> bool:
        return number.isdecimal() and int(number) < self._num_layers

    def _rope(self) -> dict[str, Any]:
        if self._number("attention.value_length", self._head_dim) != self._head_dim:
            raise self._first.wrong("attention.value_length differs from attention.key_length")
        num_rotated = self._number("rope.dimension_count", self._head_dim)
        if num_rotated != self._head_dim:
            raise self._first.wrong(
                f"{self.arch}.rope.dimension_count {num_rotated} of {self._head_dim} elements is"
                " not supported"
            )
        rope = {"rope_theta": self._positive("rope.freq_base", 10000.0, above=1.0)}
        if FACTORS in self._tensors:
            return rope | {"rope_scaling": {"rope_type": "factors", "factors": self._factors()}}
        kind = self._key("rope.scaling.type", str, "linear")
        keys = (each for each in ROPE_FACTORS if self._key(each, float) is not None)
        key = next(keys, "")
        if kind == "none" or not key or self._key(key, float) in (0.0, 1.0):
            return rope
        factor = self._positive(key, above=1.0 if kind == "yarn" else 0.0)
        scaling = {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            length = self._number("rope.scaling.original_context_length")
            scaling["original_max_position_embeddings"] = length
            if (share := self._positive("rope.scaling.attn_factor")) is not None:
                scaling["attention_factor"] = share * (0.1 * math.log(factor) + 1)
        elif kind != "linear":
            raise self._first.wrong(
                f"{self.arch}.rope.scaling.type {kind} is not supported; supported are none,"
                " linear and yarn"
            )
        return rope | {"rope_scaling": scaling}

    def _factors(self) -> list[float]:
        file, stored = self._tensors[FACTORS]
        if stored.kind != "F32" or stored.shape != [self._head_dim // 2]:
            raise file.wrong(
                f"tensor {FACTORS} is {stored.kind} {stored.shape}, not F32 {[self._head_dim // 2]}"
            )
        factors = file.floats(stored)
        if not all(0 < each < math.inf for each in factors):
            raise file.wrong(f"tensor {FACTORS} has numbers that are not positive")
        return factors

    def _sparse(self) -> dict[str, Any]:
        if not self._num_experts:
            return {}
        return {
            "num_local_experts": self._num_experts,
            "num_experts_per_tok": self._number("expert_used_count"),
            "moe_intermediate_size": self._number("expert_feed_forward_length", 1),
        }

    def _gemma(self) -> dict[str, Any]:
        if not self.arch.startswith("gemma"):
            return {}
        caps = (50.0, 30.0) if self.arch == "gemma2" else (None, None)
        is_27b = self._num_layers == (GEMMA2_27B if self.arch == "gemma2" else GEMMA3_27B)
        return {
            "query_pre_attn_scalar": (
                self._hidden_size // self._heads if is_27b else self._head_dim
            ),
            "sliding_window": self._number("attention.sliding_window", 4096),
            "attn_logit_softcapping": self._positive("attn_logit_softcapping", caps[0]),
            "final_logit_softcapping": self._positive("final_logit_softcapping", caps[1]),
            "rope_local_base_freq": self._positive("rope.freq_base_swa", 10000.0, above=1.0),
        }

    def _key(self, key: str, kind: type, default: Any = None) -> Any:
        return self._first.get(f"{self.arch}.{key}", kind, default)

    def _positive(self, key: str, default: float | None = None, *, above: float = 0.0) -> Any:
        found = self._key(key, float, default)
        if found is not None and not above < found < math.inf:
            raise self._first.wrong(
                f"metadata {self.arch}.{key}: {found} is no number above {above:g}"
            )
        return found

    def _number(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A list of equal numbers, one for each layer, is one number."""
        name = f"{self.arch}.{key}"
        values = self._first.metadata.get(name)
        if isinstance(values, list) and values and len({*values}) == 1:
            self._first.metadata[name] = values[0]
        elif isinstance(values, list):
            raise self._first.wrong(f"metadata {name}: a number for each layer is not supported")
        found = self._first.get(name, int, default)
        if found is None:
            found = self._first.require(name, int)
        if found < least:
            raise self._first.wrong(f"metadata {name}: {found} is less than {least}")
        return int(found)
