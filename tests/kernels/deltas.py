"""Sequences under the gated delta rule, Mamba-2's, Kimi's or lightning attention, computed in steps
with drafts, and at once in float64."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.delta import (
    DeltaWeights,
    DeviceRows,
    LayerStates,
    LightningTerms,
    ScanTerms,
    StateRows,
)
from kernels.delta.device import device_rows
from kernels.paged_attention import ChunkRows, DecodeRows

INTERVAL, MOST_DRAFTS = 16, 3
NUM_POSITIONS = 128
# x, gates, states and rows → outputs, as of ``kernels.delta.gated_delta``.
Compute = Callable[[Tensor, Tensor, LayerStates, StateRows], Tensor]


class Shape(NamedTuple):
    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    width: int
    scans: bool = False
    has_bias: bool = False
    is_by_channel: bool = False
    num_rotated: int = 0  # more is lightning attention
    num_groups: int = 1

    @property
    def num_gates(self) -> int:
        if self.num_rotated:
            return 0
        return self.num_decays if self.scans else self.num_heads + self.num_decays

    @property
    def num_decays(self) -> int:
        return self.num_heads * (self.key_dim if self.is_by_channel else 1)

    @property
    def channels(self) -> int:
        return 2 * self.num_key_heads * self.key_dim + self.inner

    @property
    def inner(self) -> int:
        return self.num_heads * self.value_dim

    def weights(self) -> DeltaWeights:
        """Decays are from about 0.02 to 1."""
        if self.num_rotated:
            return self._lightning()
        bias = torch.randn(self.channels) / 2 if self.has_bias else None
        return DeltaWeights(
            self.num_key_heads,
            conv=torch.randn(self.channels, self.width) / self.width**0.5,
            decay=torch.randn(self.num_heads),
            dt_bias=torch.randn(self.num_decays) - 2,
            norm=1 + torch.randn(self.inner if self.scans else self.value_dim) / 5,
            eps=1e-6,
            scan=ScanTerms(torch.randn(self.num_heads), bias, (0.05, 0.8)) if self.scans else None,
        )

    def _lightning(self) -> DeltaWeights:
        angles = torch.outer(torch.arange(NUM_POSITIONS), torch.rand(self.num_rotated // 2))
        cos, sin = angles.cos(), angles.sin()
        rotation = torch.stack([torch.cat([cos, cos], 1), torch.cat([-sin, sin], 1)])
        return DeltaWeights(
            self.num_key_heads,
            conv=torch.ones(self.channels, 1),
            decay=torch.randn(self.num_heads),
            dt_bias=torch.empty(0),
            norm=1 + torch.randn(self.inner) / 5,
            eps=1e-6,
            scan=LightningTerms(1 + torch.randn(2, self.key_dim) / 5, rotation, self.num_groups),
        )

    def states(self, num: int, num_kept: int) -> LayerStates:
        """Random ones, as of another sequence."""
        return LayerStates(
            torch.randn(num, self.num_heads, self.key_dim, self.value_dim),
            torch.randn(num, self.width, self.channels),
            torch.randn(num_kept, MOST_DRAFTS, self.channels + self.num_gates),
        )

    def inputs(self, num: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(num, self.channels + self.inner)
        return x, 2 * torch.randn(num, self.num_gates)


SHAPES = [
    Shape(2, 4, 32, 48, 4),
    Shape(1, 3, 16, 16, 1),
    Shape(3, 3, 64, 144, 2),
    Shape(1, 2, 128, 128, 4),
    Shape(1, 1, 256, 256, 8),
    Shape(1, 19, 32, 48, 4, scans=True, has_bias=True),
    Shape(2, 4, 16, 64, 3, scans=True),
    Shape(2, 2, 32, 48, 4, is_by_channel=True),
    Shape(4, 4, 32, 32, 1, num_rotated=16, num_groups=2),
    Shape(9, 9, 16, 16, 1, num_rotated=16),
]


class Part(NamedTuple):
    """Tokens of a sequence in a step; drafts follow them, of which the first are accepted. A step
    ``repeats`` the token before them."""

    num_tokens: int
    num_drafts: int = 0
    num_accepted: int = 0
    repeats: bool = False


def random_parts(length: int, rng: np.random.Generator) -> Iterator[Part]:
    """The last one has no drafts, so that the state has seen all tokens."""
    may_repeat = False
    while length:
        repeats = may_repeat and bool(rng.integers(0, 2))
        if repeats and rng.integers(0, 2):
            yield Part(0, repeats=True)
        num = min(int(rng.choice([1, 1, 2, 7, 20])), length)
        length -= num
        num_drafts = int(rng.integers(0, MOST_DRAFTS + 1)) if length else 0
        num_accepted = min(int(rng.integers(0, num_drafts + 1)), max(length - 1, 0))
        length -= num_accepted
        yield Part(num, num_drafts, num_accepted, repeats)
        may_repeat = not num_accepted


class Sequence:
    """The inputs of its tokens, and its progress. Its state has its number, and its copies are in
    another one."""

    def __init__(self, x: Tensor, gates: Tensor, state: int, copy: int) -> None:
        self.x, self.gates, self.state, self.copy = x, gates, state, copy
        self.outputs = x.new_empty(len(x), 0)
        self.num_seen = self.num_kept = self.num_copied = 0

    def step(self, part: Part) -> tuple[Tensor, Tensor]:
        """Inputs of tokens and drafts; refused drafts are random."""
        first = self.num_seen + self.num_kept - part.repeats
        num_right = part.repeats + part.num_tokens + part.num_accepted
        num_wrong = part.num_drafts - part.num_accepted
        given = self.x, self.gates
        own = [each[first : first + num_right] for each in given]
        wrong = [torch.randn(num_wrong, each.shape[1]) for each in given]
        x, gates = (torch.cat(pair) for pair in zip(own, wrong, strict=True))
        return x, gates

    def absorb(self, part: Part, outputs: Tensor, tolerance: float) -> None:
        if not self.outputs.shape[1]:
            self.outputs = outputs.new_full((len(self.x), outputs.shape[1]), torch.nan)
        first, end = self.num_seen + self.num_kept, self.num_seen + self.num_kept + part.num_tokens
        own = slice(first - part.repeats, end + part.num_accepted)
        again = self.outputs[first - 1 : first] if part.repeats else outputs[:0]
        rounding: dict[str, Any] = {"atol": tolerance, "rtol": tolerance}
        torch.testing.assert_close(again, outputs[: len(again)], **rounding)
        self.outputs[own] = outputs[: own.stop - own.start]
        last = end // INTERVAL * INTERVAL
        self.num_copied = last if last > self.num_seen else self.num_copied
        self.num_seen, self.num_kept = end, part.num_accepted


def run(
    compute: Compute,
    sequences: list[Sequence],
    parts: list[list[Part]],
    states: LayerStates,
    tolerance: float = 0.0,
) -> None:
    """Step n computes the n-th part of each sequence that has one. A repeated token has the output
    of the first time, within ``tolerance``."""
    for number in range(max(map(len, parts))):
        step = [
            (sequence, own[number])
            for sequence, own in zip(sequences, parts, strict=True)
            if number < len(own)
        ]
        inputs = [sequence.step(part) for sequence, part in step]
        nums = [len(x) for x, _ in inputs]
        rows = StateRows(
            starts=np.cumsum([0, *nums]),
            num_drafts=np.array([part.num_drafts for _, part in step]),
            states=np.array([sequence.state for sequence, _ in step]),
            positions=np.array([sequence.num_seen for sequence, _ in step]),
            num_kept=np.array([sequence.num_kept for sequence, _ in step]),
            num_seen=np.array([int(part.repeats) for _, part in step]),
            copies=np.array([sequence.copy for sequence, _ in step]),
            interval=INTERVAL,
        )
        x, gates = (torch.cat(each) for each in zip(*inputs, strict=True))
        outputs = compute(x, gates, states, rows).split(nums)
        for (sequence, part), own in zip(step, outputs, strict=True):
            sequence.absorb(part, own, tolerance)


# x, gates, states and rows on a device → outputs.
ComputeOnDevice = Callable[[Tensor, Tensor, LayerStates, DeviceRows], Tensor]
NUM_PADDED = 3


class Laid(NamedTuple):
    """Rows as a device has them, among padding: rows that decode, then others, each with the tokens
    of the host in ``tokens``; -1 is padding."""

    tokens: np.ndarray  # [T]
    rows: DeviceRows

    @classmethod
    def of(cls, host: StateRows, num_slots: int, device: torch.device) -> "Laid":
        nums = np.diff(host.starts)
        decodes = (host.num_kept > 0) | (host.num_drafts > 0) | (nums == 1)
        decoding, others = np.flatnonzero(decodes), np.flatnonzero(~decodes)
        width, num_padded = int(nums[decoding].max(initial=1)), max(1, len(decoding) // 2)
        padded = np.full((len(decoding) + num_padded, width), -1)
        for place, row in enumerate(decoding.tolist()):
            padded[place, : nums[row]] = np.arange(host.starts[row], host.starts[row + 1])
        chunks = [np.arange(host.starts[row], host.starts[row + 1]) for row in others]
        tokens = np.concatenate([padded.ravel(), *chunks, np.full(NUM_PADDED, -1)])
        starts = host.positions + host.num_kept - host.num_seen
        pads, null_slot = np.zeros(num_padded, np.int64), num_slots

        def ints(*parts: np.ndarray | list[int]) -> Tensor:
            return torch.from_numpy(np.concatenate(parts).astype(np.int32)).to(device)

        decode = DecodeRows(
            width,
            ints(host.states[decoding], pads + null_slot),
            ints(starts[decoding], pads),
            ints([0]),
        )
        ends = padded.size + np.cumsum([0, *nums[others], NUM_PADDED, 0])
        host_starts = np.concatenate([starts[others], [0, 0]])
        chunk_rows = ChunkRows(
            slots=ints(host.states[others], [null_slot, null_slot]),
            token_starts=ints(ends),
            starts=ints(host_starts),
            tile_rows=ints([0]),
            tile_starts=ints([0]),
            host_starts=host_starts,
            host_token_starts=ends,
        )
        positions = np.zeros(num_slots + 1)
        positions[host.states] = host.positions
        copies = np.full(num_slots + 1, -1)
        copies[host.states] = host.copies
        of_slots = ints(positions), ints(copies), host.interval
        rows = device_rows(decode, ints(nums[decoding], pads), chunk_rows, len(tokens), *of_slots)
        # Decode rows of an engine have one token before their drafts.
        num_drafts = ints(host.num_drafts[decoding], pads, host.num_drafts[others], [0, 0])
        return cls(tokens, rows._replace(num_drafts=num_drafts))


def on_device(compute: ComputeOnDevice, device: torch.device) -> Compute:
    """``compute`` on rows of the host. Padding has no output, and positions are advanced."""

    def computed(x: Tensor, gates: Tensor, layer: LayerStates, host: StateRows) -> Tensor:
        laid = Laid.of(host, len(layer.kept), device)
        tokens = torch.from_numpy(laid.tokens).clamp(min=0).to(device)
        out = compute(x.to(device)[tokens], gates.to(device)[tokens], layer, laid.rows).cpu()
        is_token = laid.tokens >= 0
        assert not out[~is_token].any()
        outputs = torch.empty(len(x), out.shape[1])
        outputs[laid.tokens[is_token]] = out[is_token]
        ends = host.positions + host.num_kept - host.num_seen + np.diff(host.starts)
        positions = laid.rows.positions.cpu().numpy()
        assert (positions[host.states] == ends - host.num_drafts).all()
        assert positions[-1] == 0
        return outputs

    return computed


def exact(
    x: Tensor, gates: Tensor, weights: DeltaWeights, states: LayerStates, state: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The outputs [T, H · value_dim] of one sequence, its matrices and columns, in float64."""
    if isinstance(weights.scan, LightningTerms):
        return exact_lightning(x, weights, weights.scan, states, state)
    if weights.scan is not None:
        return exact_scan(x, gates, weights, weights.scan, states, state)
    conv, decay, dt_bias, norm = (each.double() for each in weights[1:5])
    matrices, columns = states.matrices[state].double(), states.columns[state].double()
    num_heads, key_dim, value_dim = matrices.shape
    (channels, width), num_keys = conv.shape, weights.num_key_heads
    seen, outputs = torch.cat([columns[1:], x[:, :channels].double()]), []
    for token, own in enumerate(gates.double()):
        b, a = own.split([num_heads, len(dt_bias)])
        steps = (1 + (a + dt_bias).exp()).log().view(num_heads, -1)
        mixed = (conv * seen[token : token + width].T).sum(1)
        mixed = mixed / (1 + (-mixed).exp())
        z = x[token, channels:].double().view(num_heads, value_dim)
        for head in range(num_heads):
            key_head = head // (num_heads // num_keys)
            query, key = mixed[: 2 * num_keys * key_dim].view(2, num_keys, key_dim)[:, key_head]
            query = query / (query.square().sum() + 1e-6).sqrt() / key_dim**0.5
            key = key / (key.square().sum() + 1e-6).sqrt()
            value = mixed[2 * num_keys * key_dim :].view(num_heads, value_dim)[head]
            rates = decay[head].exp() * steps[head]  # one, or of each channel
            matrix = (-rates).exp()[:, None] * matrices[head]
            beta = 1 / (1 + (-b[head]).exp())
            matrices[head] = matrix + torch.outer(key, beta * (value - matrix.T @ key))
            y = matrices[head].T @ query
            normed = norm * y / (y.square().mean() + weights.eps).sqrt()
            opened = 1 if weights.is_by_channel else z[head]
            outputs.append(normed * opened / (1 + (-z[head]).exp()))
    after = torch.cat([columns, x[:, :channels].double()])[len(x) :]
    return torch.cat(outputs).view(len(x), -1), matrices, after


def exact_lightning(
    x: Tensor, weights: DeltaWeights, terms: LightningTerms, states: LayerStates, state: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The same by lightning attention: pairs turn as complex numbers."""
    decays, half = (-weights.decay.double().exp()).exp(), terms.rotation.shape[2] // 2
    cos, sines = terms.rotation.double()[:, :, half:]
    matrices, outputs = states.matrices[state].double(), []
    num_heads, key_dim, _ = matrices.shape
    for position, token in enumerate(x.double()):
        query, key, value, z = token.view(4, num_heads, key_dim)
        turned = []
        for part, norm in zip((query, key), terms.norms, strict=True):
            part = norm * part / (part.square().mean(1, keepdim=True) + weights.eps).sqrt()
            pairs = torch.complex(part[:, :half], part[:, half : 2 * half])
            pairs = pairs * torch.complex(cos[position], sines[position])
            turned.append(torch.cat([pairs.real, pairs.imag, part[:, 2 * half :]], 1))
        heads = []
        for head, (query, key) in enumerate(zip(*turned, strict=True)):
            matrices[head] = decays[head] * matrices[head] + torch.outer(key, value[head])
            heads.append(matrices[head].T @ query / key_dim**0.5)
        groups = torch.cat(heads).view(terms.num_groups, -1)
        normed = groups / (groups.square().mean(1, keepdim=True) + weights.eps).sqrt()
        outputs.append(weights.norm * normed.ravel() / (1 + (-z.ravel()).exp()))
    return torch.stack(outputs), matrices, x[-1:, : len(weights.conv)].double()


def exact_scan(
    x: Tensor,
    gates: Tensor,
    weights: DeltaWeights,
    scan: ScanTerms,
    states: LayerStates,
    state: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same by Mamba-2's rule."""
    num_groups = weights.num_key_heads
    conv, decay, dt_bias, norm = (each.double() for each in weights[1:5])
    bias = torch.zeros(len(conv)) if scan.bias is None else scan.bias
    matrices, columns = states.matrices[state].double(), states.columns[state].double()
    num_heads, key_dim, value_dim = matrices.shape
    channels, width = conv.shape
    seen, outputs = torch.cat([columns[1:], x[:, :channels].double()]), []
    for token, dt in enumerate(gates.double()):
        mixed = bias + (conv * seen[token : token + width].T).sum(1)
        mixed = mixed / (1 + (-mixed).exp())
        z = x[token, channels:].double().view(num_heads, value_dim)
        queries, keys = mixed[: 2 * num_groups * key_dim].view(2, num_groups, key_dim)
        values = mixed[2 * num_groups * key_dim :].view(num_heads, value_dim)
        gated = []
        for head in range(num_heads):
            group = head // (num_heads // num_groups)
            step = (1 + (dt[head] + dt_bias[head]).exp()).log().clamp(*scan.limits)
            change = torch.outer(keys[group], step * values[head])
            matrices[head] = (-decay[head].exp() * step).exp() * matrices[head] + change
            y = matrices[head].T @ queries[group] + scan.skip[head] * values[head]
            gated.append(y * z[head] / (1 + (-z[head]).exp()))
        groups = torch.cat(gated).view(num_groups, -1)
        normed = groups / (groups.square().mean(1, keepdim=True) + weights.eps).sqrt()
        outputs.append(norm * normed.ravel())
    after = torch.cat([columns, x[:, :channels].double()])[len(x) :]
    return torch.stack(outputs), matrices, after
