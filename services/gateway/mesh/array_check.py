"""Whether the arrays of a tokenizer's message can be looked up in its vocabulary."""

import numpy as np

from shared.errors import CodecError
from shared.wire.codec import Array
from shared.wire.faults import ids_fault, logprobs_fault
from shared.wire.messages import Accepted, Converted, Deltas, Message, Vocabulary
from shared.wire.token_arrays import TokenArrays


def check_arrays(message: Message, arrays: list[Array], vocab_size: int) -> None:
    """Raises CodecError."""
    match message:
        case Deltas():
            ids, values, top_ids, _ = TokenArrays(*arrays)
            _refuse(ids_fault(ids, vocab_size) or ids_fault(top_ids, vocab_size))
            _refuse(logprobs_fault(values))
        case Accepted() | Converted():
            if arrays[0].dtype == np.int32:
                _refuse(ids_fault(arrays[0], vocab_size))
        case Vocabulary():
            data, lengths = arrays
            total = int(lengths.sum(dtype=np.int64))
            if len(lengths) != vocab_size or (lengths < 0).any() or total != len(data):
                raise CodecError(
                    f"{len(lengths)} tokens of {total} bytes; {vocab_size} of {len(data)} belong"
                )


def _refuse(fault: str | None) -> None:
    if fault is not None:
        raise CodecError(fault)
