"""Random bits as a function of seed, token, position, choice and purpose, so that sampling can be
replayed.

Philox4x32-10 (Salmon et al., SC 2011) with the seed as key and (token id, position in the whole
sequence, choice, purpose) as counter. ``reference.py`` defines it in numpy; torch serves every
device with the same bits, ``kernels/cpu/noise.h`` CPUs and ``triton.py`` kernels.
"""

from torch import Tensor

from kernels.random_bits.philox import philox4x32

PURPOSE_SAMPLE, PURPOSE_ACCEPT = 0, 1


def random_bits(
    seeds: Tensor, token_ids: Tensor, positions: Tensor, choices: Tensor, purpose: int
) -> Tensor:
    """32 bits for each element of the broadcast int64 arguments, as int64."""
    counter = (token_ids, positions, choices, seeds.new_tensor(purpose))
    return philox4x32(counter, seeds)[0]
