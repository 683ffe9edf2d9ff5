"""All definitions of Philox4x32-10, bit for bit, and against the vectors of its authors."""

import ctypes

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu.library import load_library, variants
from kernels.dispatch import IS_INTERPRETED
from kernels.random_bits import philox4x32, random_bits, reference
from kernels.random_bits.triton import random_bits as random_bits_in_kernels
from kernels.sample.reference import noise
from kernels.sample.triton.row import perturbed

INT64 = st.integers(-(2**63), 2**63 - 1)
WORD = st.integers(0, 2**32 - 1)

# Random123's kat_vectors: counter, key, result
VECTORS = [
    ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF,) * 4,
        0xFFFFFFFFFFFFFFFF,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        0x299F31D0A4093822,
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_known_answers(
    device: torch.device, counter: tuple[int, ...], key: int, expected: tuple[int, ...]
) -> None:
    words = [np.array([word], np.uint64) for word in counter]
    ours = reference.philox4x32(tuple(words), np.array([key], np.uint64))  # type: ignore[arg-type]
    assert tuple(int(word[0]) for word in ours) == expected
    tensors = [torch.from_numpy(word.view(np.int64)).to(device) for word in words]
    seeds = torch.from_numpy(np.array([key], np.uint64).view(np.int64)).to(device)
    theirs = philox4x32(tuple(tensors), seeds)  # type: ignore[arg-type]
    assert tuple(int(word) for word in theirs) == expected


@settings(max_examples=100)
@given(seed=INT64, position=WORD, choice=WORD, purpose=WORD, token=WORD)
def test_torch_and_numpy_agree_bit_for_bit(
    seed: int, position: int, choice: int, purpose: int, token: int
) -> None:
    tokens = (token + np.arange(20)) & 0xFFFFFFFF
    expected = reference.random_bits(
        np.array(seed), tokens, np.array(position), np.array(choice), purpose
    )
    actual = random_bits(
        torch.tensor(seed),
        torch.from_numpy(tokens),
        torch.tensor(position),
        torch.tensor(choice),
        purpose,
    )
    np.testing.assert_array_equal(actual.numpy().astype(np.uint64), expected)


@pytest.mark.parametrize("variant", variants())
@settings(max_examples=100)
@given(seed=INT64, position=WORD, choice=WORD, purpose=WORD, token=WORD)
def test_native_code_and_numpy_agree_bit_for_bit(
    variant: str, seed: int, position: int, choice: int, purpose: int, token: int
) -> None:
    tokens = (token + np.arange(48)) & 0xFFFFFFFF
    expected = reference.random_bits(
        np.array(seed), tokens, np.array(position), np.array(choice), purpose
    )
    drawn = np.empty(48, np.uint32)
    load_library(variant)["shoal_random_bits"](
        *(ctypes.c_int64(word) for word in (seed, position, choice, purpose)),
        *(ctypes.c_uint32(token), len(drawn), ctypes.c_void_p(drawn.ctypes.data)),
    )
    np.testing.assert_array_equal(drawn, expected)


@pytest.mark.parametrize("variant", variants())
def test_native_noise_is_exact_to_the_last_digits_of_float32(variant: str) -> None:
    """Over the whole range of random bits including its ends; logarithms are within 2 units."""
    ends = np.arange(0, 1 << 16, 8, dtype=np.uint32)
    random_bits = np.concatenate([ends, ~ends, np.arange(0, 1 << 32, 1 << 12).astype(np.uint32)])
    noise = np.empty(len(random_bits), np.float32)
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (random_bits, noise)]
    load_library(variant)["shoal_noise"](pointers[0], len(random_bits), pointers[1])
    exact = -np.log(-np.log(np.maximum(random_bits >> 8, 0.5) * 2.0**-24))
    np.testing.assert_allclose(noise, exact, rtol=2.5e-7, atol=2.5e-7)


@triton.jit
def _make_random_bits(p_seed, p_position, p_choice, p_random_bits, p_noise, num: tl.constexpr):
    """Stores the random bits of ``num`` tokens, and their noise for scores of 0."""
    o_token = tl.program_id(0) * num + tl.arange(0, num)
    seed, position, choice = tl.load(p_seed), tl.load(p_position), tl.load(p_choice)
    drawn = random_bits_in_kernels(seed, o_token, position, choice, 0)
    zeros, is_kept = tl.zeros([num], tl.float32), o_token >= 0
    tl.store(p_random_bits + o_token, drawn.to(tl.int64))
    tl.store(
        p_noise + o_token, perturbed(zeros, o_token, is_kept, 0.0, 1.0, seed, position, choice)
    )


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63), 12345678901234])
def test_kernels_make_the_same_random_bits_and_their_noise(
    triton_device: torch.device, seed: int
) -> None:
    """A million tokens on a GPU, so that the noise includes its ends."""
    position, choice, block = 2**31 + seed % 1000, seed % 7, 1 << 12
    num_tokens = block << (2 if IS_INTERPRETED else 8)
    words = (
        torch.tensor([value], dtype=dtype, device=triton_device)
        for value, dtype in ((seed, torch.int64), (position, torch.int64), (choice, torch.int32))
    )
    drawn = torch.empty(num_tokens, dtype=torch.int64, device=triton_device)
    found = torch.empty(num_tokens, dtype=torch.float32, device=triton_device)
    _make_random_bits[(num_tokens // block,)](*words, drawn, found, num=block)
    expected = reference.random_bits(
        np.array(seed), np.arange(num_tokens), np.array(position), np.array(choice), 0
    )
    np.testing.assert_array_equal(drawn.cpu().numpy(), expected.astype(np.int64))
    exact = noise(num_tokens, seed, position, choice)
    np.testing.assert_allclose(found.cpu().numpy(), exact, rtol=1e-6, atol=1e-6)


def test_every_argument_matters() -> None:
    base = {"seeds": 1, "token_ids": 2, "positions": 3, "choices": 4}
    variants = [base] + [base | {name: value + 1} for name, value in base.items()]
    variants.append(base | {"seeds": 1 + 2**40})
    drawn = {
        int(random_bits(**{k: torch.tensor(v) for k, v in each.items()}, purpose=purpose))
        for each in variants
        for purpose in (0, 1)
    }
    assert len(drawn) == 2 * len(variants)
