"""Accepted and refused services, with the words of refusals."""

import re
from typing import Any

import msgspec
import pytest

from services.scheduler.block_pool import BlockPool, PrefixIndex
from services.scheduler.intake import why_refused
from shared.wire.messages import (
    MAX_BLOCKS,
    Capacity,
    Group,
    Hello,
    ModelInfo,
    PoolingInfo,
    SamplingDefaults,
)

CAPACITY = Capacity(1000, 16, 128, 512, 2048, 8192)
MODEL = ModelInfo(["fish"], "f1", vocab_size=8192, max_model_len=2048, created=1)
OF_WORKER = msgspec.structs.replace(
    MODEL,
    names=[],
    dtype="bfloat16",
    load_format="safetensors",
    logprobs_mode="raw_logprobs",
    quantization="none",
    kv_cache_dtype="auto",
)
TOKENIZER = Hello(1, 0, "tokenizer", "t1", MODEL)
WORKER = Hello(1, 0, "worker", "w1", OF_WORKER, CAPACITY)


def tokenizer(**changes: Any) -> Hello:
    return Hello(1, 0, "tokenizer", "t2", msgspec.structs.replace(MODEL, **changes))


def worker(**changes: Any) -> Hello:
    """``changes`` of the model, and of the capacity if it has the field."""
    of_model = {key: value for key, value in changes.items() if key in ModelInfo.__struct_fields__}
    of_capacity = {
        key: value for key, value in changes.items() if key in Capacity.__struct_fields__
    }
    model = msgspec.structs.replace(OF_WORKER, **of_model)
    return Hello(1, 0, "worker", "w2", model, msgspec.structs.replace(CAPACITY, **of_capacity))


@pytest.mark.parametrize(
    "hello",
    [
        tokenizer(created=2),
        worker(num_blocks=1, block_size=32, max_num_seqs=1, max_num_batched_tokens=9),
        worker(num_speculative_tokens=3, adapts_depth=True, stall_s=600.0, num_blocks=MAX_BLOCKS),
        worker(
            dtype="", load_format="", logprobs_mode="", quantization="", kv_cache_dtype=""
        ),  # an older version
    ],
)
def test_workers_may_differ_in_size_and_in_untold_properties(hello: Hello):
    assert why_refused(hello, [TOKENIZER, WORKER]) is None


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (tokenizer(fingerprint="f2"), "model is f2, but f1 at tokenizer t1"),
        (tokenizer(vocab_size=5), "vocab_size is 5, but 8192 at tokenizer t1"),
        (tokenizer(max_model_len=99), "max-model-len is 99, but 2048 at tokenizer t1"),
        (tokenizer(names=["cat"]), r"served-model-name is \['cat'\], but \['fish'\] at tokenizer"),
        (tokenizer(defaults=SamplingDefaults(top_k=7)), "generation-config is .*top_k=7"),
        (worker(max_model_len=1), "max-model-len is 1, but 2048 at tokenizer t1"),
        (worker(fingerprint="f2"), "model is f2, but f1 at tokenizer t1"),
        (worker(dtype="float32"), "dtype is float32, but bfloat16 at worker w1"),
        (worker(load_format="dummy"), "load-format is dummy, but safetensors at worker w1"),
        (
            worker(logprobs_mode="processed_logprobs"),
            "logprobs-mode is processed_logprobs, but raw",
        ),
        (worker(quantization="wint8"), "quantization is wint8, but none at worker w1"),
        (worker(kv_cache_dtype="int8"), "kv-cache-dtype is int8, but auto at worker w1"),
    ],
)
def test_properties_that_requests_depend_on_must_be_equal_everywhere(hello: Hello, reason: str):
    assert re.match(reason, why_refused(hello, [TOKENIZER, WORKER]) or "")
    assert why_refused(hello, []) is None, "the first service defines the model"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_num_seqs", 1 << 27),
        ("max_num_seqs", 0),
        ("num_blocks", 1 << 27),
        ("block_size", 0),
        ("max_num_batched_tokens", 1 << 27),
        ("num_speculative_tokens", 1 << 27),
        ("num_speculative_tokens", -1),
        ("max_model_len", 1 << 27),
        ("vocab_size", 0),
        ("stall_s", float("nan")),
    ],
)
def test_a_capacity_that_cannot_be_is_refused_before_anything_is_made_of_it(field: str, value: Any):
    reason = why_refused(worker(**{field: value}), [])
    assert reason is not None
    assert reason.startswith(f"{field} is {value}, which is not between ")


def test_a_capacity_must_go_with_its_model():
    model = msgspec.structs.replace(OF_WORKER, vocab_size=5)
    assert why_refused(msgspec.structs.replace(WORKER, model=model), []) is not None
    assert why_refused(msgspec.structs.replace(WORKER, capacity=None), []) is not None
    assert why_refused(msgspec.structs.replace(TOKENIZER, model=None), []) is not None


def test_layers_without_a_window_are_one_group_the_first_one():
    assert why_refused(worker(groups=(Group(), Group(64), Group(64))), []) is None
    assert why_refused(worker(groups=(Group(64),)), []) is None
    for groups in ((Group(64), Group()), (Group(), Group())):
        refusal = "a group of the capacity after the first one has no window"
        assert why_refused(worker(groups=groups), []) == refusal


def test_the_largest_pool_holds_no_list_of_its_blocks():
    pool = BlockPool(MAX_BLOCKS, PrefixIndex("w", {}))
    assert pool.try_allocate(3) == [0, 1, 2]
    pool.free([1, 2])
    assert pool.try_allocate(3) == [1, 2, 3]
    assert pool.num_free == MAX_BLOCKS - 4


def test_a_worker_that_pools_says_so_of_its_model_and_of_its_capacity() -> None:
    pooling = PoolingInfo("embed", "last", "normalize", 64)
    pooled = {"runner": "pooling", "pooling": pooling}
    assert why_refused(worker(**pooled, pooled_size=64), []) is None
    assert why_refused(worker(**pooled, pooled_size=64), [tokenizer(**pooled)]) is None
    for size in (0, 65):
        refusal = f"pooled_size of the capacity is {size}, but 64 of the model"
        assert why_refused(worker(**pooled, pooled_size=size), []) == refusal
    texts = tokenizer(runner="generate")
    refusal = why_refused(worker(**pooled, pooled_size=64), [texts])
    assert refusal == "runner is pooling, but generate at tokenizer t2"
