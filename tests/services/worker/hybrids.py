"""Tiny random checkpoints with layers with a state, and their computation without an engine."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import (
    GraniteMoeHybridForCausalLM,
    KimiLinearForCausalLM,
    NemotronHForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3NextForCausalLM,
)

from kernels.delta.states import LayerStates, StateRows, States
from kernels.paged_attention import prepare_attention
from services.worker.backends.torch_lm import TorchLM
from services.worker.layers.context import (
    AttentionInputs,
    ForwardContext,
    forward_context,
)
from services.worker.machine.kv_cache import KVCache
from services.worker.models.decoder import DecoderLM
from services.worker.models.registry import read_model_config
from services.worker.weights.load import load_model
from tests.services.worker import ling
from tests.services.worker.checkpoints import EOS_ID, MAX_POSITIONS, VOCAB_SIZE, save_model

CPU = torch.device("cpu")
BLOCK_SIZE, MOST_DRAFTS = 4, 4

SIZES: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "initializer_range": 0.15,  # four layers magnify rounding less
}
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
OF_TEXT: dict[str, Any] = {
    **SIZES,
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "eos_token_id": EOS_ID,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
OF_IMAGES: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 32,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
HYBRIDS: dict[str, tuple[type[PreTrainedModel], dict[str, Any]]] = {
    "qwen3.5": (Qwen3_5ForCausalLM, SIZES),
    "qwen3.5, one key head, biases, tied": (
        Qwen3_5ForCausalLM,
        {
            **SIZES,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 3,
            "linear_conv_kernel_dim": 3,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "layer_types": ["full_attention", "linear_attention"] * 2,
        },
    ),
    "qwen3.5 with images": (
        Qwen3_5ForConditionalGeneration,
        {"text_config": {**OF_TEXT, "intermediate_size": 96}, "vision_config": OF_IMAGES},
    ),
    "qwen3.5 moe": (Qwen3_5MoeForCausalLM, {**SIZES, **EXPERTS}),
    "qwen3.5 moe with images": (
        Qwen3_5MoeForConditionalGeneration,
        {"text_config": {**OF_TEXT, **EXPERTS}, "vision_config": OF_IMAGES},
    ),
    "qwen3-next": (Qwen3NextForCausalLM, {**SIZES, **EXPERTS}),
    "qwen3-next, a layer without experts, weights as they are": (
        Qwen3NextForCausalLM,
        {**SIZES, **EXPERTS, "norm_topk_prob": False, "mlp_only_layers": [1]},
    ),
}


MULTIPLIERS = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.5,
    "residual_multiplier": 0.5,
}
GRANITE: dict[str, Any] = {
    **MULTIPLIERS,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 32,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 48,
}
HYBRIDS |= {
    "granite 4, tied": (
        GraniteMoeHybridForCausalLM,
        {**GRANITE, "tie_word_embeddings": True},
    ),
    "granite 4, rope, two groups": (
        GraniteMoeHybridForCausalLM,
        {
            **GRANITE,
            "mamba_n_groups": 2,
            "mamba_d_conv": 3,
            "mamba_d_head": "auto",
            "position_embedding_type": "rope",
        },
    ),
    "granite 4, experts, biases of other GEMMs": (
        GraniteMoeHybridForCausalLM,
        {
            **GRANITE,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 32,
            "attention_bias": True,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
        },
    ),
    "granite 4, attention alone": (
        GraniteMoeHybridForCausalLM,
        {**GRANITE, "layer_types": ["full_attention"] * 4, "position_embedding_type": "rope"},
    ),
}

NEMOTRON: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 32,
    "n_groups": 2,
    "time_step_min": 1e-9,  # transformers takes it for time_step_limit's lower one
}
NEMOTRON_EXPERTS: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "moe"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
}
HYBRIDS |= {
    "nemotron-h, biases": (
        NemotronHForCausalLM,
        {**NEMOTRON, "mlp_bias": True, "use_bias": True, "use_conv_bias": False, "n_groups": 1},
    ),
    "nemotron 3": (NemotronHForCausalLM, {**NEMOTRON, **NEMOTRON_EXPERTS}),
    "nemotron 3, latents": (
        NemotronHForCausalLM,
        {**NEMOTRON, **NEMOTRON_EXPERTS, "moe_latent_size": 32, "norm_topk_prob": False},
    ),
}
KIMI: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_head_dim": 32,
    "linear_num_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "initializer_range": 0.15,
}
HYBRIDS |= {
    "kimi": (KimiLinearForCausalLM, KIMI),
    "kimi, queries of latents, groups of experts": (
        KimiLinearForCausalLM,
        {
            **KIMI,
            "q_lora_rank": 48,
            "n_group": 4,
            "topk_group": 2,
            "linear_conv_kernel_dim": 3,
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
        },
    ),
}
HYBRIDS |= ling.CASES


def save_hybrid(folder: Path, name: str, **changes: Any) -> None:
    family, shape = HYBRIDS[name]
    save_model(folder, family, "10MB", **(shape | changes))


def load(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> DecoderLM:
    config = read_model_config(folder)
    return load_model(folder, config, dtype, CPU, lambda text, fraction: None, **options)


def zero_states(model: DecoderLM, num: int) -> list[LayerStates]:
    """``num`` states of each layer, and room for their drafts."""
    return [
        LayerStates(
            torch.zeros(num, spec.num_heads, spec.key_dim, spec.value_dim),
            torch.zeros(num, spec.width, spec.channels),
            torch.zeros(num, MOST_DRAFTS, spec.channels + spec.num_gates),
        )
        for spec in model.state_specs()
    ]


class Row(NamedTuple):
    """The next tokens of a sequence."""

    sequence: int
    ids: list[int]


class Sequences:
    """The KV cache and the states of ``num`` sequences, and the model by torch's operators."""

    def __init__(self, model: DecoderLM, num: int) -> None:
        num_blocks = -(-MAX_POSITIONS // BLOCK_SIZE)
        layouts = model.kv_layouts(torch.float32, drafts=model.mtp_head is not None)
        self._cache = KVCache(layouts, num * num_blocks, BLOCK_SIZE, CPU)
        self._tables = np.arange(num * num_blocks).reshape(num, -1)
        self._states = zero_states(model, num)
        self._lengths = np.zeros(num, np.int64)
        self._model = TorchLM(model)

    @torch.inference_mode()
    def step(self, rows: list[Row]) -> list[np.ndarray]:
        """Logits [len(ids), vocab_size] of each row."""
        order = sorted(rows, key=lambda row: (len(row.ids) > 1, self._length(row)))
        positions = self._positions(order)
        ids = torch.tensor([token for row in order for token in row.ids])
        with forward_context(self.context(order, positions)):
            hidden = self._model(ids, torch.from_numpy(positions))
        parts = self._model.logits(hidden).split([len(row.ids) for row in order])
        for row in order:
            self._lengths[row.sequence] += len(row.ids)
        by_sequence = {row.sequence: part for row, part in zip(order, parts, strict=True)}
        return [by_sequence[row.sequence].numpy() for row in rows]

    @torch.inference_mode()
    def draft_logits(self, ids: list[int], drafts: list[int]) -> torch.Tensor:
        """[1 + len(drafts), vocab_size] of the MTP head after the first sequence's ``ids``, and
        after each of ``drafts``."""
        head = self._model.draft_head
        assert head is not None
        rows = [Row(0, ids[:-1])]
        positions = self._positions(rows)
        places = torch.from_numpy(positions)
        with forward_context(self.context(rows, positions)):
            state = head.first_state(self._model(torch.tensor(ids[:-1]), places))
            state = head.forward(state, torch.tensor(ids[1:]), places)[-1:]
        logits = [head.logits(state).of_all]
        for draft in drafts:
            self._lengths[0] += len(rows[0].ids)
            rows = [Row(0, [draft])]
            positions = self._positions(rows)
            with forward_context(self.context(rows, positions)):
                state = head.forward(state, torch.tensor([draft]), torch.from_numpy(positions))
            logits.append(head.logits(state).of_all)
        return torch.cat(logits)

    def _length(self, row: Row, *, after: bool = False) -> int:
        return int(self._lengths[row.sequence]) + after * len(row.ids)

    def _positions(self, rows: list[Row]) -> np.ndarray:
        return np.concatenate(
            [np.arange(self._length(row), self._length(row, after=True)) for row in rows]
        )

    def context(self, rows: list[Row], positions: np.ndarray) -> ForwardContext:
        """Of a step with ``rows`` in the order of attention, at ``positions`` [T]."""
        sequences = np.array([row.sequence for row in rows])
        num_tokens = np.array([len(row.ids) for row in rows])
        tables = self._tables[sequences]
        blocks = tables[np.repeat(np.arange(len(rows)), num_tokens), positions // BLOCK_SIZE]
        attention = prepare_attention(
            num_tokens=num_tokens,
            num_keys=np.array([self._length(row, after=True) for row in rows]),
            block_tables=tables,
            block_size=BLOCK_SIZE,
            dtype=self._cache.dtype,
            device=CPU,
        )
        none = np.zeros(len(rows), np.int64)
        states = StateRows(
            starts=np.concatenate([[0], np.cumsum(num_tokens)]),
            num_drafts=none,
            states=sequences,
            positions=self._lengths[sequences],
            num_kept=none,
            num_seen=none,
            copies=sequences,
            interval=1 << 30,
        )
        slots = torch.from_numpy(blocks * BLOCK_SIZE + positions % BLOCK_SIZE)
        inputs = AttentionInputs(slots, attention)
        return ForwardContext(self._cache.layers, [inputs], States(self._states, states))
