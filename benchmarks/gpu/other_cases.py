"""Operators between GEMMs and attention, and operators on sampled tokens; no peers."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.rows import Case, num_copies
from benchmarks.gpu.shapes import token_bytes
from benchmarks.gpu.suite import BLOCK_SIZE, Suite
from benchmarks.gpu.timing import Run
from kernels.accept import accept
from kernels.change_logits import change_logits
from kernels.logprobs import logprobs_slots
from kernels.logprobs.num_logprobs import MAX_TOP
from kernels.pieces import pack
from kernels.pieces.layout import pieces_of
from kernels.rms_norm import Norm
from kernels.rope_kv import rope_kv
from kernels.sample.slot_params import SlotParams, device_params
from kernels.sample.slots import sample_slots
from kernels.slot_state import empty_slots

NUM_DRAFTS = 3
FOREVER = 1 << 30
Runs = tuple[list[Run], list[Run]]
# Temperature, top_k, top_p.
WAYS = {"greedy": (0.0, 0, 1.0), "top-k 50, top-p 0.9": (1.0, 50, 0.9), "plain": (1.0, 0, 1.0)}


def cases(suite: Suite) -> Iterator[Case]:
    for num_rows in suite.batches:
        num_bytes = num_rows * suite.model["vocab_size"] * 4
        rows = f"{num_rows} rows"
        yield Case(
            "rope_kv", rows, partial(_rope_kv, suite, num_rows), _heads_bytes(suite, num_rows)
        )
        for name in WAYS:
            make = partial(_sample, suite, num_rows, name)
            yield Case("sample", f"{rows}, {name}", make, num_bytes)
        for num_changed in {0, num_rows}:
            shape = f"{rows}, {num_changed} with penalties and biases"
            moved = 4 * num_changed * num_bytes  # counts, biases and output
            make = partial(_change, suite, num_rows, num_changed)
            yield Case("change_logits", shape, make, moved)
        for num_top in (-2, MAX_TOP):
            shape = f"{rows}, {'none' if num_top < 0 else num_top} asked"
            yield Case("logprobs", shape, partial(_logprobs, suite, num_rows, num_top), num_bytes)
        shape = f"{rows} of {NUM_DRAFTS} drafts"
        yield Case("accept", shape, partial(_accept, suite, num_rows), 4 * num_rows)
    for num_blocks in (1, 7):  # 7 of Qwen3-8B are 16 MiB
        moved = 2 * num_blocks * BLOCK_SIZE * token_bytes(suite.model, suite.dtype.itemsize)
        make = partial(_pack, suite, num_blocks)
        yield Case("pieces", f"{num_blocks} KV blocks", make, moved, peer="index_select")


def _pack(suite: Suite, num_blocks: int) -> Runs:
    """Blocks far from each other; torch needs a launch for each layer."""
    num_layers = suite.model["num_hidden_layers"]
    layer_bytes = BLOCK_SIZE * token_bytes(suite.model, suite.dtype.itemsize) // num_layers
    copies = num_copies(suite, num_blocks * num_layers * layer_bytes)
    num = copies * num_blocks
    memory = torch.zeros(num_layers * num * layer_bytes, dtype=torch.uint8, device=suite.device)
    layers = memory.view(num_layers, num, layer_bytes).unbind()
    pieces = pieces_of(layers)
    places = torch.arange(num, device=suite.device).view(num_blocks, copies).T.contiguous()
    packed = torch.empty(num_blocks * pieces.row_bytes, dtype=torch.uint8, device=suite.device)

    def select(rows: Tensor) -> None:
        for layer in layers:
            layer.index_select(0, rows)

    into = pieces.packed(num_blocks, packed)
    return [partial(pack, pieces, rows, into) for rows in places], [
        partial(select, rows) for rows in places
    ]


def _rope_kv(suite: Suite, num_rows: int) -> Runs:
    config, device = suite.model, suite.device
    num_kv_heads, head_dim = config["num_key_value_heads"], config["head_dim"]
    width = (config["num_attention_heads"] + 2 * num_kv_heads) * head_dim
    norm = Norm(torch.ones(head_dim, dtype=suite.dtype, device=device), 1e-6)
    rotation = torch.randn(2, num_rows, head_dim, device=device)
    shape = (num_rows + 1, BLOCK_SIZE, 2, num_kv_heads, head_dim)
    cache = torch.zeros(shape, dtype=suite.dtype, device=device)
    places = torch.arange(num_rows, device=device) * BLOCK_SIZE
    copies = num_copies(suite, _heads_bytes(suite, num_rows))
    heads = torch.randn(copies, num_rows, width, dtype=suite.dtype, device=device)
    return [
        partial(rope_kv, each, norm, norm, rotation, places, cache, False) for each in heads
    ], []


def _heads_bytes(suite: Suite, num_rows: int) -> int:
    """Bytes read, and written elsewhere."""
    config = suite.model
    num_heads = config["num_attention_heads"] + 2 * config["num_key_value_heads"]
    return int(2 * num_rows * num_heads * config["head_dim"] * suite.dtype.itemsize)


def _sample(suite: Suite, num_rows: int, way: str) -> Runs:
    params, slots, positions = _params(suite, num_rows, way)
    return [
        partial(sample_slots, each, each, params, slots, positions)
        for each in _logits(suite, num_rows)
    ], []


def _change(suite: Suite, num_rows: int, num_changed: int) -> Runs:
    """Each row has its own slot, with drafts before it."""
    sizes = num_rows, suite.model["vocab_size"], NUM_DRAFTS, 1, 1, 0, 1
    state = empty_slots(*sizes, suite.device)
    state.rules.is_changed[:num_changed] = 1
    slots = torch.arange(num_rows, dtype=torch.int32, device=suite.device)
    positions = state.num_tokens[:-1].long() + NUM_DRAFTS
    return [
        partial(change_logits, each, state, slots, positions) for each in _logits(suite, num_rows)
    ], []


def _logprobs(suite: Suite, num_rows: int, num_top: int) -> Runs:
    slots = torch.arange(num_rows, dtype=torch.int32, device=suite.device)
    wants = torch.full_like(slots, num_top)
    tokens = slots.long()
    return [
        partial(logprobs_slots, each, tokens, wants, slots) for each in _logits(suite, num_rows)
    ], []


def _accept(suite: Suite, num_rows: int) -> Runs:
    device = suite.device
    state = empty_slots(num_rows, 2, NUM_DRAFTS, 1, 1, 0, 1, device)
    state.ends.fill_(FOREVER)
    state.is_open.fill_(1)
    slots = torch.arange(num_rows, dtype=torch.int32, device=device)
    num_valid = torch.full_like(slots, 1 + NUM_DRAFTS)
    tokens = torch.ones(num_rows, 1 + NUM_DRAFTS, dtype=torch.int64, device=device)
    eos_ids = torch.zeros(1, dtype=torch.int32, device=device)
    acceptance = torch.full((1,), 0.8, device=device)
    return [partial(accept, state, slots, num_valid, tokens, eos_ids, acceptance)], []


def _logits(suite: Suite, num_rows: int) -> Tensor:
    """[copies, num_rows, V]: somewhat peaked, like a model's."""
    vocab_size = suite.model["vocab_size"]
    copies = num_copies(suite, num_rows * vocab_size * 4)
    return torch.randn(copies, num_rows, vocab_size, device=suite.device) * 3


def _params(suite: Suite, num_rows: int, way: str) -> tuple[SlotParams, Tensor, Tensor]:
    temperature, top_k, top_p = WAYS[way]
    slots = torch.arange(num_rows, dtype=torch.int32, device=suite.device)

    params = device_params(num_rows, suite.device)._replace(seeds=slots.long())
    params.temperature.fill_(temperature)
    params.top_k.fill_(top_k)
    params.top_p.fill_(top_p)
    return params, slots, slots.long()
