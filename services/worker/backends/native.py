"""A decoder on native CPU code: its forward passes, recorded, with packed weights."""

from collections.abc import Sequence
from functools import partial
from typing import cast

import numpy as np
from torch import Tensor, nn

from kernels.cpu.decode import NativeDecoder
from kernels.cpu.operators import LANES, Kind
from kernels.cpu.packing import NativeLibrary
from kernels.cpu.program import GroupBlocks, NativeProgram
from kernels.delta.states import States
from services.worker.backends.check import ON_HOSTS, check_model
from services.worker.backends.compiler import Compiler, OnShare
from services.worker.backends.recorder import MakeRecorder, Recorder, Recording, record
from services.worker.layers.context import ForwardContext, current_context
from services.worker.layers.embedding import LMHead
from services.worker.layers.ops import NotSupported
from services.worker.layers.parallel import Parallel
from services.worker.models import CausalLM, DraftLogits, parts_of
from services.worker.models.decoder import DecoderLM


class NativeLM(CausalLM):
    """Takes the weights out of ``model`` one by one, so that only one exists twice. Hidden states
    are float32. ``report`` gets the packed share, 0 … 1. ``make_recorder``: not for drafts. Raises
    NotSupported with the reason; ``model`` is then unchanged."""

    clears_blocks = False

    def __init__(
        self,
        model: DecoderLM,
        block_size: int,
        library: NativeLibrary,
        report: OnShare = lambda share: None,
        make_recorder: MakeRecorder = Recorder,
    ) -> None:
        super().__init__()
        if block_size % LANES:
            raise NotSupported(f"block_size {block_size} is no multiple of {LANES}")
        check_model(model, ON_HOSTS)
        self._has_head = model.lm_head is not None
        self._size, self._more_sizes = model.config.hidden_size, model.more_sizes
        self._joined = partial(model.parallel.join, total=model.config.vocab_size)
        recordings = _Recordings(model, make_recorder)
        compiler = Compiler(model, library)
        self.trunk = compiler.compile(recordings.trunk, report)
        self._logits = compiler.compile(recordings.logits)
        self._parts = [compiler.compile(each) for each in recordings.parts]
        if recordings.head is not None:
            self.draft_head = _NativeDraftHead(
                recordings.head, compiler, model.parallel, model.drafting_size
            )
            self.draft_lm_head = recordings.head.lm_head  # its tensors are counted too
        for tensor in compiler.tensors:  # so that they are counted as the model's
            self.register_buffer(f"packed_{len(self._buffers)}", tensor, persistent=False)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        if self._parts and input_ids.ndim > 2:
            return _run(self._parts[0], parts_of(input_ids, self._more_sizes), positions)
        return _run(self.trunk, [input_ids], positions)

    def embed(self, input_ids: Tensor) -> Tensor:
        return self._parts[1].run([input_ids])

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self._logits.run([hidden[:, : self._size].contiguous()])
        return self._joined(logits) if self._has_head else logits

    def decoder(self, eos_ids: np.ndarray) -> NativeDecoder:
        return NativeDecoder(self.trunk, self._logits, eos_ids)


class _Recordings:
    """Keeps modules, and no weight that is taken out of one."""

    def __init__(self, model: DecoderLM, make: MakeRecorder) -> None:
        names = {module: name for name, module in model.named_modules()}
        size = model.config.hidden_size
        is_later = not model.parallel.stage.is_first
        sizes = [size if is_later else 1]
        self.trunk = record(names, sizes, model.forward, takes_over=is_later, make=make)
        self.logits = record(names, [size], model.logits, make=make)
        self.parts: list[Recording] = []  # of the trunk: layers, and on the first stage embeddings
        if num := model.num_embeddings:
            run, sizes = model.from_embeddings, [size, *model.more_sizes] * num
            self.parts = [record(names, sizes, run, takes_over=True, make=make)]
            if not is_later:
                self.parts.append(record(names, [1], model.embed, make=make))
        self.head = _HeadRecordings(names, size, model) if model.mtp_head else None
        self._check_uses(names)

    def _check_uses(self, names: dict[nn.Module, str]) -> None:
        """A weight is packed in one order: gates and ups of a gated GEMM alternate."""
        found = [self.trunk, self.logits, *self.parts]
        if self.head is not None:
            found += [self.head.first_state, self.head.forward, self.head.logits]
        uses = {(each.weight, each.kind) for one in found for each in one.instructions}
        for weight, kind in uses:
            if weight and kind == Kind.GATED and (weight, Kind.LINEAR) in uses:
                raise NotSupported(f"{names[weight]}: gates and ups are used by a plain product")


class _HeadRecordings:
    def __init__(self, names: dict[nn.Module, str], size: int, model: DecoderLM) -> None:
        head = model.mtp_head
        assert head is not None
        self.first_state: Recording = record(names, [model.drafting_size], head.first_state)
        self.forward: Recording = record(names, [size, 1], head.forward)
        self.logits: Recording = record(names, [head.lm_head.inputs], head.logits)
        self.lm_head: LMHead = head.lm_head
        self.make_drafter = head.make_drafter


class _NativeDraftHead:
    def __init__(
        self,
        recordings: _HeadRecordings,
        compiler: Compiler,
        parallel: Parallel,
        size: int,
    ) -> None:
        self._size = size
        first_state = recordings.first_state
        is_same = not first_state.instructions  # the trunk's states are taken as they are
        self._first_state = None if is_same else compiler.compile(first_state)
        self._forward = compiler.compile(recordings.forward)
        self._logits = compiler.compile(recordings.logits)
        self._lm_head = recordings.lm_head
        self.make_drafter = recordings.make_drafter
        self._joined = partial(parallel.join, total=self._lm_head.vocab.total)

    def first_state(self, hidden: Tensor) -> Tensor:
        states = hidden[:, -self._size :].contiguous()
        return states if self._first_state is None else self._first_state.run([states])

    def forward(self, state: Tensor, input_ids: Tensor, positions: Tensor) -> Tensor:
        return _run(self._forward, [state, input_ids], positions)

    def logits(self, out: Tensor) -> DraftLogits:
        logits = self._joined(self._logits.run([out]))
        return DraftLogits(logits, self._lm_head.spread(logits, out))


def _run(program: NativeProgram, inputs: Sequence[Tensor], positions: Tensor) -> Tensor:
    context = current_context()
    groups, caches = group_blocks(context), context.kv_caches
    return program.run(inputs, positions, groups, caches, host_states(context))


def group_blocks(context: ForwardContext) -> Sequence[GroupBlocks]:
    """The groups of a step prepared by the host."""
    return cast(Sequence[GroupBlocks], context.groups)


def host_states(context: ForwardContext) -> States | None:
    """The states of a step prepared by the host."""
    return cast(States | None, context.states)
