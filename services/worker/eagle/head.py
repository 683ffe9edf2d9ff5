"""The head of EAGLE-3 (arXiv 2503.01840): one decoder layer on the inputs of several layers of the
trunk.

The inputs are projected to a state of the model's size. The layer attends to the normed embedding
of the next token beside the normed state; its sum begins with the state. For the next draft its
output takes the place of the state.
"""

from torch import nn

from services.worker.eagle.config import EagleConfig
from services.worker.layers.attention import Attention
from services.worker.layers.embedding import Embedding, LMHead
from services.worker.layers.linear import Linear
from services.worker.layers.norm import RMSNorm
from services.worker.layers.ops import Ops, X
from services.worker.layers.parallel import ALONE
from services.worker.layers.rope import RotaryEmbedding
from services.worker.models.decoder import DecoderLayer, MtpHead
from services.worker.models.parts import Parts


class EagleLayer(DecoderLayer):
    """Its attention reads twice the hidden size."""

    def __init__(self, config: EagleConfig, parts: Parts, attention: Attention) -> None:
        super().__init__(parts, attention, parts.mlp(config.mlp_bias))
        qkv, size = attention.qkv_proj, 2 * config.hidden_size
        attention.qkv_proj = Linear(size, qkv.parts, config.attention_bias)
        self.hidden_norm = parts.norm()
        self._norms_residual = config.norm_before_residual

    def forward_pair(self, ops: Ops[X], state: X, embedded: X) -> X:
        """[T, hidden] each → [T, hidden]. ``state`` is the first input of the pass."""
        normed = ops.norm(state, self.hidden_norm)
        both = ops.join(ops.norm(embedded, self.input_layernorm), normed)
        if self._norms_residual:
            x = self.self_attn.forward(ops, both, residual=normed)
        else:
            x = ops.add_input(self.self_attn.forward(ops, both), 0)
        return self.mlp.forward(ops, x, norm=self.post_attention_layernorm, residual=x)


class EagleModule(nn.Module):
    """The parameters of a head, named as in checkpoints of speculators. ``layer`` is the number of
    its layer, and ``length`` the longest sequence."""

    def __init__(
        self, config: EagleConfig, layer: int, num_tapped: int, length: int, has_embeddings: bool
    ) -> None:
        super().__init__()
        hidden_size, num_inputs = config.hidden_size, num_tapped * config.hidden_size
        self.rotary = RotaryEmbedding(config.rope, config.rotary_dim, length)
        parts, bias = Parts(config, self.rotary, ALONE), config.attention_bias
        attention = parts.attention(layer, has_qkv_bias=bias, has_out_bias=bias)
        self.input_norm = (
            RMSNorm(num_inputs, config.rms_norm_eps) if config.norm_before_fc else None
        )
        self.fc = Linear(num_inputs, hidden_size)
        self.layers = nn.ModuleList([EagleLayer(config, parts, attention)])
        self.norm = parts.norm()
        self.lm_head: LMHead | None = LMHead(config.num_drafted, hidden_size, "lm_head.weight")
        self.embed_tokens = (
            Embedding(config.vocab_size, hidden_size, "embed_tokens.weight")
            if has_embeddings
            else None
        )
        self.norms_output = config.norm_output


class EagleHead(MtpHead):
    """``embed_tokens`` and ``lm_head`` are the model's if ``module`` has none."""

    def __init__(self, module: EagleModule, embed_tokens: Embedding, lm_head: LMHead) -> None:
        self._module = module
        self._embed_tokens = embed_tokens
        self.lm_head = lm_head

    def first_state(self, ops: Ops[X], hidden: X) -> X:
        return ops.linear(hidden, self._module.fc, norm=self._module.input_norm)

    def forward(self, ops: Ops[X], state: X, ids: X) -> X:
        module = self._module
        layer: EagleLayer = module.layers[0]  # type: ignore[assignment]
        out = layer.forward_pair(ops, state, ops.embed(ids, self._embed_tokens))
        return ops.norm(out, module.norm) if module.norms_output else out

    def logits(self, ops: Ops[X], out: X) -> X:
        module = self._module
        norm = None if module.norms_output else module.norm
        return ops.logits(out, self.lm_head, norm=norm)
