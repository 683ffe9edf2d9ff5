"""Random bits and their noise in Triton's kernels."""

from tests.kernels.test_random_bits import test_kernels_make_the_same_random_bits_and_their_noise
