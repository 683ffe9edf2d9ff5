"""The keys of config.json that all families read."""

from typing import Annotated, Any, ClassVar, Self

import msgspec

from services.worker.config.frequencies import Rope, read_rope

DEFAULT_ROPE_THETA = 10000.0
Num = Annotated[int, msgspec.Meta(ge=1)]
Window = Num | None  # this number of last keys; None: all of them


class ModelConfig(msgspec.Struct, frozen=True):
    """The keys that every family has, by their own names. A family's Config inherits these and adds
    its own; other keys are ignored."""

    rotates_partly: ClassVar[bool] = False  # partial_rotary_factor counts
    norm_offset: ClassVar[float] = 0.0  # added to the norms of a checkpoint

    architectures: list[str]
    vocab_size: Num
    hidden_size: Num
    intermediate_size: int
    num_hidden_layers: Num
    num_attention_heads: Num
    max_position_embeddings: Num
    rms_norm_eps: float
    num_kv_heads: int | None = msgspec.field(default=None, name="num_key_value_heads")
    head_size: int | None = msgspec.field(default=None, name="head_dim")
    hidden_act: str = "silu"
    rope_theta: float | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float | None = None
    tie_word_embeddings: bool | None = None
    quantization_config: dict[str, Any] | None = None

    def for_texts(self) -> Self:
        """Without parts that only images need."""
        return self

    @property
    def head_dim(self) -> int:
        return self.head_size or self.hidden_size // self.num_attention_heads

    @property
    def rotary_dim(self) -> int:
        """The number of a head's rotated elements, from the first on."""
        factor = self.rope_values["partial_rotary_factor"] if self.rotates_partly else None
        return self.head_dim if factor is None else int(self.head_dim * factor)

    @property
    def num_key_value_heads(self) -> int:
        return self.num_kv_heads or self.num_attention_heads

    @property
    def rope(self) -> Rope:
        """Raises ValueError if its keys do not match."""
        return read_rope(self.rope_values)

    @property
    def local_rope(self) -> Rope | None:
        """The Rope of layers with a window, if they have their own. Raises ValueError."""
        return None

    @property
    def rope_values(self) -> dict[str, Any]:
        """The keys about rotary positions, which are in ``rope_parameters`` since transformers 5.

        Before, some were in ``rope_scaling`` and the others at the top level.
        """
        nested = self.rope_scaling or self.rope_parameters or {}
        return self.with_rope_defaults(nested, self.rope_theta or DEFAULT_ROPE_THETA)

    def with_rope_defaults(self, nested: dict[str, Any], theta: float) -> dict[str, Any]:
        """``nested`` keys about rotary positions, with the ones at the top level."""
        beside = {
            "rope_theta": theta,
            "original_max_position_embeddings": self.max_position_embeddings,
            "partial_rotary_factor": self.partial_rotary_factor,
        }
        given = {key: value for key, value in nested.items() if value is not None}
        own = {"max_position_embeddings": self.max_position_embeddings}
        if self.original_max_position_embeddings is not None:
            own["original_max_position_embeddings"] = self.original_max_position_embeddings
        return beside | given | own

    def problems(self) -> list[str]:
        """The unsupported features of the model. A family adds the problems of its own keys."""
        problems = [*self.rope_problems(), *self.act_problems()]
        if self.num_attention_heads % self.num_key_value_heads:
            problems.append(
                f"num_attention_heads {self.num_attention_heads} is no multiple of"
                f" num_key_value_heads {self.num_key_value_heads}"
            )
        return problems

    def act_problems(self) -> list[str]:
        if self.hidden_act == "silu":
            return []
        return [f"hidden_act {self.hidden_act!r} is not supported; only 'silu' is"]

    def rope_problems(self) -> list[str]:
        problems = []
        values = self.rope_values
        factor = values["partial_rotary_factor"]
        if not self.rotates_partly and factor not in (None, 1.0):
            problems.append(f"partial_rotary_factor {factor} is not supported; only 1.0 is")
        if self.head_dim % 2:
            problems.append(f"head_dim {self.head_dim} is odd")
        elif not 0 < self.rotary_dim <= self.head_dim or self.rotary_dim % 2:
            problems.append(
                f"partial_rotary_factor {factor} of head_dim {self.head_dim}:"
                f" {self.rotary_dim} numbers cannot be rotated in pairs"
            )
        for key, value in values.items():
            if isinstance(value, dict):
                problems.append(f"rope parameters of their own for {key!r} are not supported")
        try:
            read_rope(values)
        except ValueError as error:
            problems.append(str(error))
        return problems
