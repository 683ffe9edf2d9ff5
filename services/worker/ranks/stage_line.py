"""Messages between the stages of a pipeline."""

from collections import deque

import numpy as np
import torch
from torch import Tensor

from services.worker.engine.protocol import StepOutput
from services.worker.layers.stage import Sent, Stage, StageConnection
from shared.errors import CodecError
from shared.wire.codec import decode, encode
from shared.wire.messages import StepResult
from shared.wire.token_arrays import TokenArrays

STATES, RESULTS = 1, 2  # kinds of messages: forward to the next stage, and back
DTYPES = torch.float32, torch.bfloat16, torch.float16
MAX_UNREAD = 8  # unreceived tensors; chosen, not measured


class StageLine:
    """Hidden states go to the next stage. Results go from the last stage to the first, slot copies
    to all others. Receiving blocks; each kind of message has its own thread. Sending blocks only
    if a receiver is several steps late."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._sent: deque[Sent] = deque()

    def send_states(self, states: Tensor) -> None:
        """Sends ``states`` [T, hidden] to the next stage."""
        shape = torch.tensor([*states.shape, DTYPES.index(states.dtype)])
        self._send(shape, self._stage.number + 1, STATES)
        if states.numel():
            self._send(states.contiguous(), self._stage.number + 1, STATES)

    def receive_states(self) -> Tensor:
        """Returns states [T, hidden] of the previous stage."""
        before, shape = self._stage.number - 1, torch.zeros(3, dtype=torch.int64)
        self._line.receive(shape, before, STATES)
        num_tokens, size, kind = shape.tolist()
        states = torch.empty(num_tokens, size, dtype=DTYPES[kind])
        if states.numel():
            self._line.receive(states, before, STATES)
        return states

    def send_result(self, output: StepOutput) -> None:
        """Sends a result to the first stage."""
        result, arrays = output
        header, *body = encode(result, arrays)
        parts = [np.frombuffer(frame, np.uint8) for frame in body]
        joined = np.concatenate(parts) if parts else np.zeros(0, np.uint8)
        self._send(torch.tensor([len(header), len(joined)]), 0, RESULTS)
        self._send(torch.frombuffer(bytearray(header), dtype=torch.uint8), 0, RESULTS)
        if len(joined):
            self._send(torch.from_numpy(joined), 0, RESULTS)

    def receive_result(self) -> StepOutput:
        sizes = torch.zeros(2, dtype=torch.int64)
        self._line.receive(sizes, self._last, RESULTS)
        frames = []
        for size in filter(None, sizes.tolist()):
            frame = torch.empty(size, dtype=torch.uint8)
            self._line.receive(frame, self._last, RESULTS)
            frames.append(frame.numpy().data)
        result, arrays = decode(frames)
        if not isinstance(result, StepResult):
            raise CodecError(f"the last stage sent a {type(result).__name__}")
        return result, TokenArrays(*arrays)

    def send_copies(self, copies: np.ndarray) -> None:
        """Sends copies of slots [n, width] int64 to all other stages."""
        for stage in self._stage.others if len(copies) else ():
            self._send(torch.from_numpy(copies), stage, RESULTS)

    def receive_copies(self, num: int, width: int) -> np.ndarray:
        copies = torch.empty(num, width, dtype=torch.int64)
        if num:
            self._line.receive(copies, self._last, RESULTS)
        return copies.numpy()

    def _send(self, tensor: Tensor, stage: int, kind: int) -> None:
        self._sent.append(self._line.send(tensor, stage, kind))
        if len(self._sent) > MAX_UNREAD:
            self._sent.popleft().wait()

    @property
    def _line(self) -> StageConnection:
        assert self._stage.line is not None
        return self._stage.line

    @property
    def _last(self) -> int:
        return self._stage.num - 1
