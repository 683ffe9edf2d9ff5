"""Records a forward pass as instructions for native code, and refuses unsupported operations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from kernels.cpu.adapt import PackedAdapt
from kernels.cpu.index import Index
from kernels.cpu.operators import LANES, Form, Kind
from kernels.cpu.packing import is_whole, packed_form, why_not_packed
from kernels.silu_mul import Act, num_parts
from services.worker.backends.head_limits import check_delta, check_heads, check_latents
from services.worker.layers.delta_rule import Columns, DeltaRule
from services.worker.layers.embedding import Embedding, LMHead
from services.worker.layers.experts import Experts, Scores
from services.worker.layers.heads import Heads, Latents
from services.worker.layers.linear import Linear
from services.worker.layers.norm import RMSNorm
from services.worker.layers.ops import NotSupported, Ops
from services.worker.layers.weights import Dense, Quantized, Weight


class Value(NamedTuple):
    """A register as it is until something is added to it."""

    register: int
    version: int


@dataclass(slots=True)
class Register:
    """[T, size] of float32 if ``is_wide``, else of the weights' type."""

    size: int
    is_wide: bool
    version: int = 0

    @property
    def kind(self) -> tuple[int, bool]:
        return self.size, self.is_wide


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """An operator before its weights are packed. Reads ``source``, and ``out`` if it adds to it."""

    kind: Kind
    source: int
    out: int
    size: int
    second: int | None = None
    first: int = 0  # of a row's elements
    num: int = 0  # of the second part's elements
    is_wide: bool = False
    adds: bool = False
    scale: float = 1.0
    act: Act = "silu"
    norm: RMSNorm | None = None
    weight: Linear | LMHead | None = None
    summed: Linear | None = None  # its bias is added to a sum over ranks
    embedding: Embedding | None = None
    heads: Heads | None = None
    order: Tensor | None = None
    experts: Experts | None = None
    marks: int | None = None  # a register, of experts
    gate: Scores | None = None
    latents: Latents | None = None
    columns: Columns | None = None
    delta: DeltaRule | None = None
    adapt: PackedAdapt | None = None
    index: Index | None = None
    others: tuple[int, ...] = ()  # further registers, of attention to latents or of an index

    @property
    def registers(self) -> tuple[int, ...]:
        found = self.source, self.out, *self.others
        return *found, *(each for each in (self.second, self.marks) if each is not None)


class Recording(NamedTuple):
    """The first registers are the inputs. ``output`` is one of the others, unless there is nothing
    to do or inputs are taken over."""

    registers: list[Register]
    num_inputs: int
    instructions: list[Instruction]
    output: int


def record(
    names: dict[nn.Module, str],
    sizes: Sequence[int],
    run: Callable[..., Value],
    *,
    takes_over: bool = False,
    make: "MakeRecorder | None" = None,
) -> Recording:
    """The instructions of ``run``, given operators and inputs [T, size] of ``sizes``. ``names`` of
    the model's modules are for the error NotSupported. A pass that ``takes_over`` its inputs may
    add to them, and return one of them. ``make`` gives the recorder, by default a plain one."""
    num_kept = 0 if takes_over else len(sizes)
    registers = [Register(size, is_wide=True) for size in sizes]
    recorder = (make or Recorder)(names, registers, num_kept)
    output = run(recorder, *(Value(place, 0) for place in range(len(sizes))))
    recorder.check(output, recorder.registers[output.register].size, "the output of a pass")
    if recorder.instructions and output.register < num_kept:
        raise NotSupported("a pass returns its input")
    return Recording(recorder.registers, len(sizes), recorder.instructions, output.register)


class Recorder(Ops[Value]):
    """The first registers are the inputs. Nothing may be added to the first ``num_kept``."""

    def __init__(self, names: dict[nn.Module, str], inputs: list[Register], num_kept: int) -> None:
        self.registers = inputs
        self.instructions: list[Instruction] = []
        self._num_inputs, self._num_kept = len(inputs), num_kept
        self._names = names

    def embed(self, ids: Value, embedding: Embedding) -> Value:
        size, form = embedding.inputs, embedding.weight
        self.check(ids, 1, self._names[embedding])
        if isinstance(form, Quantized):
            self._check_codes(embedding, form)
        out = self.new(size, is_wide=True)
        self._add(Kind.EMBED, ids, out, size, embedding=embedding)
        vocab = embedding.vocab
        return out if vocab.num == vocab.total else self._summed(out, size)

    def scale(self, x: Value, factor: float | Tensor) -> Value:
        size = self.registers[x.register].size
        out = self.written(x, size, "the input of a scale")
        self._add(Kind.SCALE, out, out, size, scale=float(factor))
        return out

    def add_input(self, x: Value, number: int) -> Value:
        if number >= self._num_inputs:
            return x
        size = self.registers[number].size
        out = self.written(x, size, f"a sum with input {number}")
        self._add(Kind.ADD, Value(number, 0), out, size)
        return out

    def copy(self, x: Value) -> Value:
        size = self.registers[x.register].size
        self.check(x, size, "the input of a copy")
        out = self.new(size, is_wide=True)
        self._add(Kind.JOIN, x, out, size, second=x.register)
        return out

    def join(self, x: Value, y: Value) -> Value:
        size, more = (self.registers[each.register].size for each in (x, y))
        self.check(x, size, "the first part")
        self.check(y, more, "the last part")
        out = self.new(size + more, is_wide=True)
        self._add(Kind.JOIN, x, out, size, second=y.register, num=more)
        return out

    def norm(self, x: Value, norm: RMSNorm, *, residual: Value | None = None) -> Value:
        size = len(norm.weight)
        if residual is None:
            out = self.new(size, is_wide=True)
        else:
            out = self.written(residual, size, self._names[norm])
        self._norm(x, norm, out, is_wide=True, adds=residual is not None)
        return out

    def linear(
        self,
        x: Value,
        linear: Linear,
        *,
        norm: RMSNorm | None = None,
        residual: Value | None = None,
        scale: float = 1.0,
    ) -> Value:
        operand = self._operand(x, norm, linear)
        if linear.is_partial:
            part = self.new(linear.outputs, is_wide=True)
            self._product(operand, part, linear)
            return self._summed(part, linear.outputs, linear, residual, scale)
        if residual is not None:
            out = self.written(residual, linear.outputs, self._names[linear])
            self._product(operand, out, linear, adds=True, scale=scale)
            return out
        out = self.new(linear.outputs, is_wide=True)
        self._product(operand, out, linear)
        return out if scale == 1.0 else self.scale(out, scale)

    def gated(
        self, x: Value, gate_up: Linear, *, norm: RMSNorm | None = None, act: Act = "silu"
    ) -> Value:
        operand, size = self._operand(x, norm, gate_up), gate_up.outputs // num_parts(act)
        self._check_tiles(gate_up, "gates", size)
        out = self.new(size, is_wide=False)
        self._gated(operand, out, gate_up, act=act)
        return out

    def experts(
        self,
        x: Value,
        experts: Experts,
        *,
        given: Value | None = None,
        residual: Value | None = None,
        scale: float = 1.0,
    ) -> Value:
        size, name = experts.products[0].gate_up_proj.inputs, self._names[experts]
        marks = self._num_inputs - 1 if experts.of_images is not None else 0
        if experts.of_images and not marks:
            assert residual is not None
            return residual
        for each in experts.products:
            self._check_tiles(each.gate_up_proj, "numbers", each.down_proj.inputs)
            self._check_tiles(each.gate_up_proj, "inputs", each.gate_up_proj.inputs)
        self._check_tiles(experts.gate, "inputs", experts.gate.weight.shape[1])
        self._check_forms(experts)
        given = x if given is None else given
        self.check(x, experts.gate.weight.shape[1], name)
        self.check(given, size, name)
        narrow = self.new(size, is_wide=False)
        self._add(Kind.NARROW, given, narrow, size)
        options: dict[str, Any] = {"experts": experts, "second": x.register, "scale": scale}
        options["marks"] = marks or None
        if experts.is_partial:
            part = self.new(size, is_wide=True)
            self._add(Kind.EXPERTS, narrow, part, size, **options)
            return self._summed(part, size, residual=residual)
        if residual is None:
            out = self.new(size, is_wide=True)
        else:
            out = self.written(residual, size, name)
        self._add(Kind.EXPERTS, narrow, out, size, adds=residual is not None, **options)
        return out

    def open(self, x: Value, gate: Scores, *, y: Value, residual: Value) -> Value:
        size, name = self.registers[y.register].size, self._names[gate]
        self._check_tiles(gate, "inputs", gate.weight.shape[1])
        self.check(x, gate.weight.shape[1], name)
        self.check(y, size, name)
        out = self.written(residual, size, name)
        self._add(Kind.OPEN, y, out, size, second=x.register, gate=gate)
        return out

    def attend(self, x: Value, heads: Heads) -> Value:
        check_heads(heads)
        spec = heads.spec
        size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        out, query = self.new(size, is_wide=False), self.new(size, is_wide=False)
        width = size + 2 * kv_size
        rotated = self.written(x, width, f"attention of layer {heads.layer}")
        self._add(Kind.ATTEND, rotated, out, width, heads=heads, second=query.register)
        return out

    def latent(self, query: Value, latent: Value, latents: Latents) -> Value:
        check_latents(latents)
        spec, name = latents.spec, f"attention of layer {latents.layer}"
        self.check(query, spec.num_heads * spec.query_dim, name)
        self.check(latent, spec.entry_dim, name)
        sizes = (spec.value_dim, spec.entry_dim, spec.rank)
        out, *scratch = (self.new(spec.num_heads * size, is_wide=False) for size in sizes)
        others = latent.register, *(each.register for each in scratch)
        width = spec.num_heads * spec.query_dim
        self._add(Kind.LATENT, query, out, width, latents=latents, others=others)
        return out

    def short_conv(self, x: Value, columns: Columns) -> Value:
        size, name = len(columns.weight), f"the convolution of layer {columns.layer}"
        if size % LANES or columns.part % LANES:
            raise NotSupported(f"{name}: {size} channels are no multiple of {LANES}")
        out = self.new(size, is_wide=False)
        read = self.written(x, 3 * size, name)
        self._add(Kind.SHORT_CONV, read, out, size, columns=columns)
        return out

    def gated_delta(self, x: Value, gates: Value | None, rule: DeltaRule) -> Value:
        check_delta(rule)
        size, name = rule.num_heads * rule.value_dim, f"the delta rule of state {rule.layer}"
        width = rule.channels + size
        self.check(x, width, name)
        if gates is not None:
            self.check(gates, rule.num_gates, name)
        out = self.new(size, is_wide=False)
        second = gates and gates.register
        self._add(Kind.GATED_DELTA, x, out, width, second=second, delta=rule)
        return out

    def gate(self, x: Value, gates: Value) -> Value:
        size = self.registers[x.register].size
        if size % LANES:
            raise NotSupported(f"gates: {size} numbers are no multiple of {LANES}")
        self.check(gates, size, "gates")
        out = self.written(x, size, "the input of gates", is_wide=False)
        self._add(Kind.GATE, gates, out, size)
        return out

    def logits(
        self,
        x: Value,
        head: LMHead,
        *,
        norm: RMSNorm | None = None,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> Value:
        out = self.new(head.outputs, is_wide=True)
        self._product(self._operand(x, norm, head), out, head)
        if scale != 1.0:
            out = self.scale(out, scale)
        if softcap is not None:
            out = self.written(out, head.outputs, "softcapped logits")
            self._add(Kind.BEND, out, out, head.outputs, scale=softcap)
        return out

    def check(self, x: Value, size: int, name: str, *, is_wide: bool = True) -> None:
        """Raises NotSupported, unless ``x`` is still there, of this size and kind."""
        register = self.registers[x.register]
        if x.version != register.version:
            raise NotSupported(f"{name}: its value before an addition is used")
        if register.size != size:
            raise NotSupported(f"{name}: {register.size} elements per token, expected {size}")
        if register.is_wide and not is_wide:
            raise NotSupported(f"{name}: not the output of a gate or attention")
        if register.is_wide != is_wide:
            raise NotSupported(f"{name}: output of a gate or attention is for GEMMs only")

    def _operand(self, x: Value, norm: RMSNorm | None, weight: Linear | LMHead) -> Value:
        """The input of a GEMM in the weights' dtype, normed if there is a ``norm``."""
        size, name = weight.inputs, self._names[weight]
        self._check_tiles(weight, "inputs", size)
        if norm is None and not self.registers[x.register].is_wide:
            self.check(x, size, name, is_wide=False)
            return self._ordered(x, weight)
        self.check(x, size, name)
        out = self.new(size, is_wide=False)
        if norm is None:
            self._add(Kind.NARROW, x, out, size)
        else:
            self._norm(x, norm, out)
        return self._ordered(out, weight)

    def _ordered(self, x: Value, weight: Linear | LMHead) -> Value:
        """``x`` as the codes of a weight are ordered."""
        form = weight.weight
        if isinstance(form, Dense):
            return x
        self._check_codes(weight, form)
        if form.order is None:
            return x
        out = self.new(weight.inputs, is_wide=False)
        self._add(Kind.ORDER, x, out, weight.inputs, order=form.order)
        return out

    def _check_forms(self, experts: Experts) -> None:
        """All experts' weights of one GEMM are in one form, and their inputs in order."""
        linears = [[each.gate_up_proj, each.down_proj] for each in experts.products]
        for of_all in zip(*linears, strict=True):
            for linear in of_all:
                name, form = self._names[linear], linear.weight
                if _packed_form(form) != _packed_form(of_all[0].weight):
                    raise NotSupported(f"{name}: weights in another form than other experts'")
                if isinstance(form, Quantized):
                    self._check_codes(linear, form)
                    if form.order is not None:
                        raise NotSupported(f"{name}: an expert's inputs in an order of their own")

    def _check_codes(self, module: nn.Module, codes: Quantized) -> None:
        if why := why_not_packed(codes.shape[1], codes.group):
            raise NotSupported(f"{self._names[module]}: {why}")

    def _norm(self, x: Value, norm: RMSNorm, out: Value, **options: bool) -> None:
        size = len(norm.weight)
        self._check_tiles(norm, "numbers", size)
        self.check(x, size, self._names[norm])
        self._add(Kind.NORM, x, out, size, norm=norm, **options)

    def _product(self, x: Value, out: Value, weight: Linear | LMHead, **options: Any) -> None:
        self._add(Kind.LINEAR, x, out, weight.inputs, weight=weight, **options)

    def _gated(self, x: Value, out: Value, gate_up: Linear, **options: Any) -> None:
        self._add(Kind.GATED, x, out, gate_up.inputs, weight=gate_up, **options)

    def _summed(
        self,
        part: Value,
        size: int,
        linear: Linear | None = None,
        residual: Value | None = None,
        scale: float = 1.0,
    ) -> Value:
        """scale · (the sum of ``part`` over ranks + ``linear``'s bias) + residual"""
        if residual is not None:
            out = self.written(residual, size, "a sum over ranks")
            self._add(Kind.SUM, part, out, size, adds=True, scale=scale, summed=linear)
            return out
        out = self.written(part, size, "a sum over ranks")
        self._add(Kind.SUM, out, out, size, summed=linear)
        return out if scale == 1.0 else self.scale(out, scale)

    def new(self, size: int, *, is_wide: bool) -> Value:
        self.registers.append(Register(size, is_wide))
        return Value(len(self.registers) - 1, 0)

    def written(self, x: Value, size: int, name: str, *, is_wide: bool = True) -> Value:
        """The register of ``x`` with something else in it: ``x`` is no more."""
        self.check(x, size, name, is_wide=is_wide)
        if x.register < self._num_kept:
            raise NotSupported(f"{name}: an input of the pass must stay unchanged")
        register = self.registers[x.register]
        register.version += 1
        return Value(x.register, register.version)

    def _add(self, kind: Kind, source: Value, out: Value, size: int, **options: Any) -> None:
        self.instructions.append(
            Instruction(kind=kind, source=source.register, out=out.register, size=size, **options)
        )

    def _check_tiles(self, module: nn.Module, unit: str, size: int) -> None:
        if size % LANES:
            raise NotSupported(f"{self._names[module]}: {size} {unit} are no multiple of {LANES}")


MakeRecorder = Callable[[dict[nn.Module, str], list[Register], int], Recorder]


def _packed_form(weight: Weight) -> tuple[Form, bool]:
    """Returns the form and if all values are integers: rows may be rounded for integers."""
    if isinstance(weight, Dense):
        return Form.DENSE, False
    return packed_form(weight.as_codes), is_whole(weight.as_codes)
