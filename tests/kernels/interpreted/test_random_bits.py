"""Coins and their noise in Triton's kernels."""

from tests.kernels.test_random_bits import test_kernels_throw_the_same_coins_and_make_their_noise

__all__ = ["test_kernels_throw_the_same_coins_and_make_their_noise"]
