"""The operators that models are written in. Each backend has its own way to run them."""

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from torch import Tensor, nn

from kernels.silu_mul import Act
from services.worker.layers.delta_rule import Columns, DeltaRule
from services.worker.layers.embedding import Embedding, LMHead
from services.worker.layers.experts import Experts, Scores
from services.worker.layers.heads import Heads, Latents
from services.worker.layers.linear import Linear
from services.worker.layers.norm import RMSNorm

X = TypeVar("X")


class Ops(ABC, Generic[X]):
    """Operators over T tokens of a step, flattened over its rows.

    ``X`` is the value passed through a forward pass: a tensor [T, size], or its placeholder in a
    program for native code. A ``residual`` is added to in place and must not be used again.
    Raises NotSupported for an operation that the backend does not support.
    """

    def enter(self, layer: nn.Module) -> None:
        """The following operators belong to ``layer``, of the trunk."""
        return

    @abstractmethod
    def embed(self, ids: X, embedding: Embedding) -> X:
        """ids [T] → [T, hidden]"""

    @abstractmethod
    def scale(self, x: X, factor: float | Tensor) -> X:
        """x · factor, a number or a constant tensor [1]; x must not be used again."""

    @abstractmethod
    def add_input(self, x: X, number: int) -> X:
        """x + this input of the pass, if it has as many inputs; x must not be used again."""

    @abstractmethod
    def copy(self, x: X) -> X:
        """x, which later operators may change"""

    @abstractmethod
    def join(self, x: X, y: X) -> X:
        """[T, n] and [T, m] → [T, n + m]"""

    @abstractmethod
    def norm(self, x: X, norm: RMSNorm, *, residual: X | None = None) -> X:
        """norm(x) + residual"""

    @abstractmethod
    def linear(
        self,
        x: X,
        linear: Linear,
        *,
        norm: RMSNorm | None = None,
        residual: X | None = None,
        scale: float = 1.0,
    ) -> X:
        """scale · linear(norm(x)) + residual: [T, inputs] → [T, outputs]

        If it ``is_partial``, the outputs of all ranks are added before bias and residual.
        """

    @abstractmethod
    def gated(self, x: X, gate_up: Linear, *, norm: RMSNorm | None = None, act: Act = "silu") -> X:
        """act(gate) · up, both of norm(x): [T, inputs] → [T, outputs / 2], gates before ups. With
        relu2 there are no gates: [T, outputs]."""

    @abstractmethod
    def experts(
        self,
        x: X,
        experts: Experts,
        *,
        given: X | None = None,
        residual: X | None = None,
        scale: float = 1.0,
    ) -> X:
        """scale · Σ weight · expert(given) over a token's experts, which the router chooses by x,
        + residual: [T, hidden] → [T, size] like ``given``, by default x.

        The sum is in the order of choice. Logits and weights are float32. A pass from embeddings
        may have tokens of images: the last input marks them by 1, others by 0. In one from ids all
        tokens are texts.
        """

    @abstractmethod
    def open(self, x: X, gate: Scores, *, y: X, residual: X) -> X:
        """sigmoid(gate(x)) · y + residual; the gate gives one number of a token"""

    @abstractmethod
    def attend(self, x: X, heads: Heads) -> X:
        """Queries, keys and values [T, (H + 2 H_kv) · D] → the output of attention [T, H · D].

        Queries and keys are normed and rotated, and the KV of the T tokens is written first. ``x``
        must not be used again.
        """

    @abstractmethod
    def latent(self, query: X, latent: X, latents: Latents) -> X:
        """Queries [T, H · query_dim] and latents before their norm, with the heads' common key
        [T, rank + rope_dim] → the output of attention [T, H · value_dim].

        With the expansion's halves U [H, nope_dim, rank] and V [H, value_dim, rank], c a normed
        latent and r a rotated key of a visible token, and q = [n, rotated part] of a head:
        softmax(scale · (n U · c + q_rotated · r)) weighs c, and the weighted sum is multiplied with
        Vᵀ. [c, r] of the T tokens are written first. Neither argument may be used again.
        """

    @abstractmethod
    def short_conv(self, x: X, columns: Columns) -> X:
        """(b, c, u) [T, 3 · size] → c · (the convolution of b · u, and its bias): [T, size]

        b · u of the T tokens is written first. ``x`` must not be used again.
        """

    @abstractmethod
    def gated_delta(self, x: X, gates: X | None, rule: DeltaRule) -> X:
        """(q, k, v, z) of tokens and (b, a) or dt of their heads → [T, num_heads · value_dim], as
        in ``kernels.delta``. The states of the T tokens' sequences are advanced."""

    @abstractmethod
    def gate(self, x: X, gates: X) -> X:
        """sigmoid(gates) · x: [T, size] → [T, size]; x must not be used again."""

    @abstractmethod
    def logits(
        self,
        x: X,
        head: LMHead,
        *,
        norm: RMSNorm | None = None,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> X:
        """scale · head(norm(x)) in float32, each y capped to softcap · tanh(y / softcap) if there
        is a softcap: [S, hidden] → [S, vocab_size]"""


class NotSupported(Exception):
    """A backend cannot run a model, and this is why."""
