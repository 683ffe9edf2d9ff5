"""A decoder by the operators of ``kernels``: torch's on CPUs, Triton's on GPUs.

On a GPU the host needs to know only the number of tokens, so that a graph of the operators can be
captured.
"""

from collections.abc import Callable, Sequence, Set
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from kernels.codes import Codes, decoded_rows
from kernels.delta import gated_delta
from kernels.experts import Additions, Biases
from kernels.experts import experts as expert_products
from kernels.latent import latent_queries, latent_values, write_latents
from kernels.linear import gated as gated_product
from kernels.linear import linear as product
from kernels.paged_attention import AttentionBatch, AttentionOptions, DeviceAttention, attend
from kernels.programmatic_launch import one_by_one
from kernels.rms_norm import Norm, rms_norm
from kernels.rope_kv import rope_kv
from kernels.short_conv import previous_places, short_conv
from kernels.silu_mul import Act
from services.worker.backends.check import ON_DEVICES, ON_HOSTS, check_model
from services.worker.layers.context import current_context
from services.worker.layers.delta_rule import Columns, DeltaRule
from services.worker.layers.embedding import Embedding, LMHead
from services.worker.layers.experts import Experts, Scores, biases_of
from services.worker.layers.gated import GatedProducts
from services.worker.layers.heads import Heads, Latents
from services.worker.layers.linear import Linear
from services.worker.layers.norm import RMSNorm
from services.worker.layers.offloaded import Offloaded
from services.worker.layers.ops import Ops
from services.worker.layers.parallel import ALONE, Parallel
from services.worker.layers.rope import RotaryEmbedding
from services.worker.layers.weights import Dense, Weight
from services.worker.models import DraftLogits, TorchCausalLM, parts_of
from services.worker.models.decoder import DecoderLM, MtpHead

Add = Callable[[Tensor], None]  # to a product, in place
# Options of steps prepared by the host, and of steps with lengths known only to the device.
HOST, DEVICE = ON_HOSTS, ON_DEVICES


class TorchOps(Ops[Tensor]):
    """Operators on the tokens of a step at ``positions`` [T]. Logits are written to ``out``
    [S, vocab_size] float32, if there is one. Layers with ``offloaded`` weights wait for them.
    ``parallel`` computes the sums over ranks. ``inputs`` are all inputs of the pass."""

    def __init__(
        self,
        positions: Tensor | None = None,
        out: Tensor | None = None,
        offloaded: Offloaded | None = None,
        parallel: Parallel = ALONE,
        inputs: Sequence[Tensor] = (),
    ) -> None:
        self._positions = positions
        self._out = out
        self._offloaded = offloaded
        self._parallel = parallel
        self._inputs = inputs
        self._rotations: dict[RotaryEmbedding, Tensor] = {}  # computed once for all layers
        self._places: dict[int, Tensor] = {}  # of convolutions, by group: layers have one width

    def enter(self, layer: nn.Module) -> None:
        if self._offloaded is not None:
            self._offloaded.enter(layer)

    def embed(self, ids: Tensor, embedding: Embedding) -> Tensor:
        vocab = embedding.vocab
        if vocab.num == vocab.total:
            return _rows(embedding.weight, ids)
        places = ids - vocab.start
        is_ours = (places >= 0) & (places < vocab.num)
        found = _rows(embedding.weight, places.clamp(0, vocab.num - 1))
        return self._parallel.sum(found * is_ours[:, None])

    def scale(self, x: Tensor, factor: float | Tensor) -> Tensor:
        return x * factor

    def add_input(self, x: Tensor, number: int) -> Tensor:
        return x.add_(self._inputs[number]) if number < len(self._inputs) else x

    def copy(self, x: Tensor) -> Tensor:
        return x.clone()

    def join(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x, y], 1)

    def norm(self, x: Tensor, norm: RMSNorm, *, residual: Tensor | None = None) -> Tensor:
        normed = rms_norm(x, norm.weight, norm.eps)
        return normed if residual is None else residual.add_(normed)

    def linear(
        self,
        x: Tensor,
        linear: Linear,
        *,
        norm: RMSNorm | None = None,
        residual: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        weight, bias, operand = weight_of(linear), linear.bias, _operand(norm)
        if linear.is_partial:
            total = self._parallel.sum(self._part(x, linear, norm))
            return _added(total, bias, residual, scale)
        if scale == 1.0:
            return product(x, weight, bias, norm=operand, residual=residual)
        scaled = product(x, weight, bias, norm=operand) * scale
        return scaled if residual is None else residual.add_(scaled)

    def adder(self, x: Tensor, of: nn.Module, norm: RMSNorm | None = None) -> Add:
        """Changes the product of norm(x) with the weight of a router or a head."""
        return lambda y: None

    def additions(self, experts: Experts) -> Additions | None:
        return None

    def _part(self, x: Tensor, linear: Linear, norm: RMSNorm | None) -> Tensor:
        """This rank's part of a sum over ranks."""
        return product(x, weight_of(linear), norm=_operand(norm))

    def gated(
        self,
        x: Tensor,
        gate_up: Linear,
        *,
        norm: RMSNorm | None = None,
        act: Act = "silu",
        add: Add | None = None,
    ) -> Tensor:
        weight, operand = weight_of(gate_up), _operand(norm)
        return gated_product(x, weight, gate_up.bias, norm=operand, act=act, add=add)

    def marks(self) -> Tensor | None:
        """[T] bool: the tokens of images; None: there are none."""
        return self._inputs[-1][:, 0] != 0 if len(self._inputs) > 1 else None

    def experts(
        self,
        x: Tensor,
        experts: Experts,
        *,
        given: Tensor | None = None,
        residual: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        gate, of_images = experts.gate, experts.of_images
        marks = None if of_images is None else self.marks()
        if of_images and marks is None:
            assert residual is not None
            return residual
        chosen, weights = gate.choose(x, self.adder(x, gate))
        if marks is not None:  # these get an expert that is on no rank
            others = ~marks if of_images else marks
            chosen = chosen.masked_fill(others[:, None], gate.num_experts)
        if experts.counts is not None:
            _count(chosen, experts.counts)
        gate_up, down, biases = experts.stacks or _each(experts.products)
        shares = weights if scale == 1.0 else weights * scale
        is_partial = experts.is_partial
        has_all = len(experts.products) == gate.num_experts and marks is None
        part = expert_products(
            *(x if given is None else given, chosen, shares, gate_up, down),
            residual=None if is_partial else residual,
            biases=biases,
            act=experts.act,
            first=None if has_all else experts.first,
            additions=self.additions(experts),
        )
        return _added(self._parallel.sum(part), None, residual) if is_partial else part

    def open(self, x: Tensor, gate: Scores, *, y: Tensor, residual: Tensor) -> Tensor:
        openings = product(x.float(), gate.weight).sigmoid()
        return (residual + openings * y).to(y.dtype)

    def attend(self, x: Tensor, heads: Heads) -> Tensor:
        context, spec = current_context(), heads.spec
        kv, inputs = context.kv_caches[heads.layer], context.groups[heads.group]
        query_norm, key_norm = _operand(heads.query_norm), _operand(heads.key_norm)
        if spec.norm == "tokens" and self._parallel.size > 1:
            self._norm_over_ranks(x, query_norm, key_norm)
            query_norm = key_norm = None
        query = rope_kv(
            x,
            query_norm,
            key_norm,
            self.rotation(heads.rotary),
            inputs.slot_mapping,
            kv.entries,
            spec.is_interleaved,
            kv.scales,
        )
        options = AttentionOptions(spec.window, spec.softcap, heads.sinks)
        attention = self.attention(heads)
        return attend(query, kv.entries, attention, spec.scale, options, kv.scales).flatten(1)

    def attention(self, heads: Heads) -> AttentionBatch | DeviceAttention:
        found = current_context().groups[heads.group].attention
        if isinstance(found, AttentionBatch) and heads.spec.is_causal:
            return found.causal
        return found

    def latent(
        self, query: Tensor, latent: Tensor, latents: Latents, chosen: Tensor | None = None
    ) -> Tensor:
        context, spec, rotation = current_context(), latents.spec, self.rotation(latents.rotary)
        kv, inputs = context.kv_caches[latents.layer], context.groups[latents.group]
        keys, values = latents.expansion.halves()
        norm = Norm(latents.norm.weight, latents.norm.eps)
        slots, is_interleaved = inputs.slot_mapping, spec.is_interleaved
        write_latents(latent, norm, rotation, slots, kv.entries, is_interleaved, kv.scales)
        queries = latent_queries(query, keys, rotation, is_interleaved)
        options = AttentionOptions(value_dim=spec.rank, chosen=chosen)
        attended = attend(queries, kv.entries, inputs.attention, spec.scale, options, kv.scales)
        return latent_values(attended, values)

    def short_conv(self, x: Tensor, columns: Columns) -> Tensor:
        context, end = current_context(), columns.layer + columns.num_parts
        caches = [each.entries for each in context.kv_caches[columns.layer : end]]
        inputs, num_before = context.groups[columns.group], columns.weight.shape[1] - 1
        if columns.group not in self._places:
            self._places[columns.group] = previous_places(inputs.attention, len(x), num_before)
        places = self._places[columns.group]
        return short_conv(x, columns.weight, columns.bias, caches, inputs.slot_mapping, places)

    def gated_delta(self, x: Tensor, gates: Tensor | None, rule: DeltaRule) -> Tensor:
        states = current_context().states
        assert states is not None
        return gated_delta(x, gates, rule.weights, *states.of_layer(rule.layer))

    def gate(self, x: Tensor, gates: Tensor) -> Tensor:
        return (x.float() * gates.float().sigmoid()).to(x.dtype)

    def logits(
        self,
        x: Tensor,
        head: LMHead,
        *,
        norm: RMSNorm | None = None,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> Tensor:
        is_part, operand = head.vocab.num < head.vocab.total, _operand(norm)
        out, dtype = None if is_part else self._out, torch.float32
        logits = product(x, weight_of(head), norm=operand, out_dtype=dtype, out=out)
        self.adder(x, head, norm)(logits)
        if is_part:
            logits = self._parallel.join(logits, head.vocab.total)
            logits = logits if self._out is None else self._out.copy_(logits)
        if scale != 1.0:
            logits.mul_(scale)
        return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)

    def _norm_over_ranks(self, x: Tensor, *norms: Norm | None) -> None:
        """Norms queries and keys, the first elements of ``x``, in place, over all heads of a token
        on all ranks. Each KV head is on the same number of ranks, so that the mean over all ranks'
        heads equals the mean over all heads."""
        known = [norm for norm in norms if norm is not None]
        sizes = [len(norm.weight) for norm in known]
        parts = x[:, : sum(sizes)].split(sizes, 1)
        own = torch.stack([part.float().square().mean(1) for part in parts], 1)
        means = self._parallel.sum(own) / self._parallel.size
        for part, norm, mean in zip(parts, known, means.unbind(1), strict=True):
            scale = torch.rsqrt(mean + norm.eps)[:, None]
            part.copy_(part.float() * scale * norm.weight)

    def rotation(self, rotary: RotaryEmbedding) -> Tensor:
        """[2, T, head_dim]"""
        if rotary not in self._rotations:
            assert self._positions is not None
            self._rotations[rotary] = rotary(self._positions)
        return self._rotations[rotary]


def _added(
    total: Tensor, bias: Tensor | None, residual: Tensor | None, scale: float = 1.0
) -> Tensor:
    """scale · (total + bias) + residual, rounded once."""
    wide = total.float()
    wide = wide if bias is None else wide + bias
    wide = wide if scale == 1.0 else wide * scale
    return (wide if residual is None else wide + residual).to(total.dtype)


def _count(chosen: Tensor, counts: Tensor) -> None:
    """Adds up the tokens of each expert. Padding counts for no expert; its KV goes to the null
    block."""
    context = current_context()
    num_blocks, block_size = context.kv_caches[0].entries.shape[:2]
    is_token = context.groups[0].slot_mapping < (num_blocks - 1) * block_size
    counted = is_token[:, None] & (chosen < len(counts))
    counts.index_add_(0, chosen.clamp_max(len(counts) - 1).flatten(), counted.long().flatten())


def weight_of(layer: Linear | LMHead) -> Tensor | Codes:
    weight = layer.weight
    return weight.values if isinstance(weight, Dense) else weight.as_codes


def _rows(weight: Weight, ids: Tensor) -> Tensor:
    if isinstance(weight, Dense):
        return functional.embedding(ids, weight.values)
    return decoded_rows(weight.as_codes, ids, weight.dtype)


def _each(
    products: Sequence[GatedProducts],
) -> tuple[list[Tensor | Codes], list[Tensor | Codes], Biases | None]:
    """The content of ``Stacks``, for each network separately."""
    gate_up = [weight_of(each.gate_up_proj) for each in products]
    down = [weight_of(each.down_proj) for each in products]
    return gate_up, down, biases_of(products)


def _operand(norm: RMSNorm | None) -> Norm | None:
    return None if norm is None else Norm(norm.weight, norm.eps)


class TorchLM(TorchCausalLM):
    """Computes ``model`` with its own weights, the trunk by ``ops``. Raises NotSupported like
    ``check_model``."""

    def __init__(
        self, model: DecoderLM, known: Set[str] = HOST, ops: Callable[..., TorchOps] = TorchOps
    ) -> None:
        super().__init__()
        check_model(model, known)
        self.model, self.known = model, known
        self.offloaded = model.offloaded
        self.hidden_size, self.vocab_size = model.config.hidden_size, model.config.vocab_size
        self.state_size = model.state_size
        self._trunk_ops = partial(ops, parallel=model.parallel)
        self._ops = partial(TorchOps, parallel=model.parallel)
        self._end_ops = self._trunk_ops if known is HOST else self._ops
        if model.mtp_head is not None:
            self.draft_head = _TorchDraftHead(model.mtp_head, self._ops, model.drafting_size)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        with one_by_one(self.offloaded is not None):
            inputs = parts_of(input_ids, self.model.more_sizes)
            ops = self._trunk_ops(positions, offloaded=self.offloaded, inputs=inputs)
            if input_ids.is_floating_point():
                return self.model.from_embeddings(ops, *inputs)
            return self.model.forward(ops, inputs[0])

    def embed(self, input_ids: Tensor) -> Tensor:
        return self.model.embed(self._end_ops(), input_ids)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        states = hidden[:, : self.hidden_size].contiguous()
        states = states.float() if self.model.lm_head is None else states
        return self.model.logits(self._end_ops(out=out), states)


class _TorchDraftHead:
    def __init__(self, head: MtpHead, ops: Callable[..., TorchOps], size: int) -> None:
        self._head = head
        self._ops = ops
        self._size = size
        self.make_drafter = head.make_drafter

    def first_state(self, hidden: Tensor) -> Tensor:
        return self._head.first_state(self._ops(), hidden[:, -self._size :].contiguous())

    def forward(self, state: Tensor, input_ids: Tensor, positions: Tensor) -> Tensor:
        return self._head.forward(self._ops(positions, inputs=(state,)), state, input_ids)

    def logits(self, out: Tensor) -> DraftLogits:
        logits = self._head.logits(self._ops(), out)
        return DraftLogits(logits, self._head.lm_head.spread(logits, out))
