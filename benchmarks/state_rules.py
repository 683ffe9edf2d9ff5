"""Decode steps of the rules of layers with a state, native code, against the bytes of the states.

The gated delta rule and Mamba-2's have the sizes of the checkpoints ``states`` and ``mamba`` of
``benchmarks.checkpoints``; their GEMMs are not part of it. All layers of a model run one after the
other, so that states come from memory. Rounds of both alternate. A copy, the bound, is torch's
``copy_`` of as many bytes.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.checkpoints import MAMBA_INTERVAL, SHAPES
from benchmarks.report import spread, write
from kernels.cpu.delta import PackedDelta
from kernels.cpu.library import load_library, variants
from kernels.cpu.operators import Kind, Operator
from kernels.cpu.packing import NativeLibrary
from kernels.cpu.program import Buffer, NativeProgram
from kernels.delta import LayerStates, ScanTerms, StateRows
from kernels.delta.states import States

NUMS_ROWS = (1, 8, 32)
EPS = 1e-6
PAUSE_S = 0.3  # torch's threads spin while they wait for work


class Rule:
    """A model's rules with random weights and states."""

    def __init__(self, library: NativeLibrary, name: str, num_rows: int) -> None:
        shape = SHAPES[name]
        self.scans = "mamba_n_heads" in shape
        prefix = "mamba_n" if self.scans else "linear_num_value"
        self.num_heads = shape[f"{prefix}_heads"]
        self.num_keys = 1 if self.scans else shape["linear_num_key_heads"]
        self.key_dim = shape["mamba_d_state" if self.scans else "linear_key_head_dim"]
        self.value_dim = shape["mamba_d_head" if self.scans else "linear_value_head_dim"]
        self.width = shape["mamba_d_conv" if self.scans else "linear_conv_kernel_dim"]
        self.inner = self.num_heads * self.value_dim
        self.channels = 2 * self.num_keys * self.key_dim + self.inner
        self.num_gates = self.num_heads * (1 if self.scans else 2)
        num_layers = shape["num_hidden_layers"]
        interval = shape.get("full_attention_interval", MAMBA_INTERVAL)
        layers = [self._states(num_rows) for _ in range(num_layers - num_layers // interval)]
        self._states_of_step = States(layers, _decode_rows(num_rows))
        self._program = self._compile(library, len(layers))
        widths = self.channels + self.inner, self.num_gates
        self._inputs = [torch.randn(num_rows, width) for width in widths]
        self.num_bytes = 4 * sum(each.matrices.numel() + each.columns.numel() for each in layers)

    def __call__(self) -> None:
        self._program.run(self._inputs, states=self._states_of_step)

    def _states(self, num: int) -> LayerStates:
        return LayerStates(
            torch.randn(num, self.num_heads, self.key_dim, self.value_dim),
            torch.randn(num, self.width, self.channels),
            torch.zeros(num, 1, self.channels + self.num_gates),
        )

    def _compile(self, library: NativeLibrary, num_layers: int) -> NativeProgram:
        sizes = self.channels + self.inner, self.num_gates, self.inner
        operators = [
            Operator(
                kind=Kind.GATED_DELTA,
                source=0,
                second=1,
                out=2,
                size=sizes[0],
                layer=layer,
                delta=self._packed(),
            )
            for layer in range(num_layers)
        ]
        return NativeProgram(library, operators, [Buffer(s, torch.float32) for s in sizes], 2, 2)

    def _packed(self) -> PackedDelta:
        scan = ScanTerms(torch.randn(self.num_heads), None, (0.0, float("inf")))
        return PackedDelta(
            num_key_heads=self.num_keys,
            key_dim=self.key_dim,
            conv=torch.randn(self.width, self.channels) / 2,
            rates=torch.rand(self.num_heads),
            dt_bias=torch.zeros(self.num_heads),
            norm=torch.ones(self.inner if self.scans else self.value_dim),
            eps=EPS,
            scan=scan if self.scans else None,
        )


def _decode_rows(num: int) -> StateRows:
    """One token of each sequence, behind the hundredth."""
    none = np.zeros(num, np.int64)
    return StateRows(
        starts=np.arange(num + 1),
        num_drafts=none,
        states=np.arange(num),
        positions=none + 100,
        num_kept=none,
        num_seen=none,
        copies=none - 1,
        interval=1 << 30,
    )


def _ms(run: Callable[[], Any], num_steps: int) -> float:
    started_s = time.perf_counter()
    for _ in range(num_steps):
        run()
    return 1000 * (time.perf_counter() - started_s) / num_steps


def _copy(num_bytes: int) -> Callable[[], Tensor]:
    source = torch.ones(num_bytes // 4)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def measure(num_rounds: int, num_threads: int) -> dict[str, Any]:
    torch.set_num_threads(num_threads)
    library = NativeLibrary(load_library(variants()[0]), torch.float32, num_threads)
    points: dict[str, Any] = {}
    for num_rows in NUMS_ROWS:
        rules = {name: Rule(library, name, num_rows) for name in ("states", "mamba")}
        copies = {name: _copy(rule.num_bytes) for name, rule in rules.items()}
        num_steps = max(2, 64 // num_rows)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in rules}
        for _ in range(num_rounds):
            for name, rule in rules.items():
                rule()
                own = _ms(rule, num_steps)
                copies[name]()
                times[name].append((own, _ms(copies[name], num_steps)))
                time.sleep(PAUSE_S)
        for name, found in times.items():
            points[f"{name} × {num_rows}"] = {
                "MB read, and as many written": round(rules[name].num_bytes / 1e6, 1),
                "ms a step": spread([own for own, _ in found]),
                "copy / rule": spread([copy / own for own, copy in found]),
            }
    return points


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    write("state_rules", measure(arguments.rounds, arguments.threads))
