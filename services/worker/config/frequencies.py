"""How fast each pair of a head's elements turns: one class for each kind of rotary positions.

Pure. The fields of a class are the keys of config.json that it needs. Frequencies are radians per
position, in float32 and by the operations of transformers: far positions multiply their rounding.
"""

import math
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor

Positive = Annotated[float, msgspec.Meta(gt=0)]
Positions = Annotated[int, msgspec.Meta(gt=0)]


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Unscaled (arXiv 2104.09864)."""

    rope_theta: Annotated[float, msgspec.Meta(gt=1)]

    def frequencies(self, head_dim: int, length: int) -> Tensor:
        """[head_dim / 2] for sequences of at most ``length`` tokens."""
        return _geometric(self.rope_theta, head_dim)

    @property
    def magnitude(self) -> float:
        """The factor of cosines and sines."""
        return 1.0

    @property
    def temperature(self) -> float:
        """The extra factor of DeepSeek's attention scores."""
        return 1.0


class LinearRope(Rope, frozen=True, kw_only=True):
    """Position interpolation (arXiv 2306.15595): all turn ``factor`` times slower."""

    factor: Positive

    def frequencies(self, head_dim: int, length: int) -> Tensor:
        return _geometric(self.rope_theta, head_dim) / self.factor


class FactorsRope(Rope, frozen=True, kw_only=True):
    """Each pair turns slower by its own one of ``factors`` [head_dim / 2]."""

    factors: list[Positive]

    def frequencies(self, head_dim: int, length: int) -> Tensor:
        return _geometric(self.rope_theta, head_dim) / torch.tensor(self.factors)


class DynamicRope(Rope, frozen=True, kw_only=True):
    """Dynamic NTK (arXiv 2309.00071, section 3.3): the base grows with the sequence's length.

    transformers computes it anew as a sequence grows. A key in a paged cache is rotated already
    and will not be again, so all sequences have the frequencies of the longest that is served.
    Up to ``max_position_embeddings`` tokens, and max-model-len is no more, they are the unscaled.
    """

    factor: Positive
    max_position_embeddings: Positions

    def frequencies(self, head_dim: int, length: int) -> Tensor:
        stretch = max(1.0, length / self.max_position_embeddings)
        growth = self.factor * stretch - (self.factor - 1)
        return _geometric(self.rope_theta * growth ** (head_dim / (head_dim - 2)), head_dim)


class Llama3Rope(Rope, frozen=True, kw_only=True):
    """Llama 3.1 (arXiv 2407.21783; its reference code): slow pairs turn ``factor`` times slower.

    Fast ones, which turn ``high_freq_factor`` times in the original length, are left; those from
    there down to ``low_freq_factor`` times are blended.
    """

    factor: Positive
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_max_position_embeddings: Positions

    def __post_init__(self) -> None:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor {self.high_freq_factor} must be more than"
                f" low_freq_factor {self.low_freq_factor}"
            )

    def frequencies(self, head_dim: int, length: int) -> Tensor:
        fast = _geometric(self.rope_theta, head_dim)
        turns = self.original_max_position_embeddings / (2 * math.pi / fast)
        width = self.high_freq_factor - self.low_freq_factor
        share = ((turns - self.low_freq_factor) / width).clamp(0, 1)
        return (1 - share) * fast / self.factor + share * fast


class YarnRope(Rope, frozen=True, kw_only=True):
    """YaRN (arXiv 2309.00071): as Llama 3.1, blended by the pair's index, and with a temperature.

    ``mscale`` and ``mscale_all_dim`` are DeepSeek's two parts of the temperature.
    """

    factor: Positive
    original_max_position_embeddings: Positions
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def frequencies(self, head_dim: int, length: int) -> Tensor:
        fast = _geometric(self.rope_theta, head_dim)
        first, last = self._blended(head_dim)
        pairs = torch.arange(head_dim // 2, dtype=torch.float32)
        slow_share = ((pairs - first) / (last - first)).clamp(0, 1)
        return fast / self.factor * slow_share + fast * (1 - slow_share)

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._temperature(self.mscale) / self._temperature(self.mscale_all_dim)
        return self._temperature(1.0)

    @property
    def temperature(self) -> float:
        return self._temperature(self.mscale_all_dim or 0.0) ** 2

    def _temperature(self, scale: float) -> float:
        return 0.1 * scale * math.log(max(self.factor, 1.0)) + 1.0

    def _blended(self, head_dim: int) -> tuple[float, float]:
        """The fractional indices of the pairs at the beginning and the end of blending."""
        first = self._pair_of(self.beta_fast, head_dim)
        last = self._pair_of(self.beta_slow, head_dim)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        return first, last + 0.001 * (first == last)

    def _pair_of(self, num_turns: float, head_dim: int) -> float:
        """The pair that turns ``num_turns`` times in the original length."""
        base_turns = self.original_max_position_embeddings / (2 * math.pi * num_turns)
        return head_dim * math.log(base_turns) / (2 * math.log(self.rope_theta))


ROPES: dict[str, type[Rope]] = {
    "default": Rope,
    "dynamic": DynamicRope,
    "factors": FactorsRope,
    "linear": LinearRope,
    "llama3": Llama3Rope,
    "yarn": YarnRope,
}


def read_rope(values: dict[str, Any]) -> Rope:
    """The kind that ``rope_type`` names, or ``type`` in older files. Raises ValueError."""
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in ROPES:
        raise ValueError(f"rope type {kind!r} is not supported; supported are {', '.join(ROPES)}")
    try:
        return msgspec.convert(values, ROPES[kind])
    except msgspec.ValidationError as error:
        raise ValueError(f"rope type {kind!r}: {error}") from None


def _geometric(base: float, head_dim: int) -> Tensor:
    """[head_dim / 2], from 1 down to nearly 1 / ``base``."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / base**exponents
