"""What the device is told of a request's logits rules when its sequence is admitted."""

import numpy as np

from kernels.grammar_mask import HIDDEN
from kernels.sample.slot_rules import EMITTED, IN_PROMPT, IS_END, SlotRules
from services.worker.slots.logits_rules import LogitsRules

Value = np.ndarray | float


def is_for_device(rules: LogitsRules) -> bool:
    """Whether the device can do without the host: grammars are the host's, and so are bad words of
    several ids, for which one has to know what was emitted last."""
    return rules.guide is None and not rules.word_starts.shape[1]


def rule_row(
    rules: LogitsRules, ids: np.ndarray, prompt_len: int, eos_ids: np.ndarray, vocab_size: int
) -> SlotRules[Value]:
    """Of a sequence with ``ids`` [n] int32, of which ``prompt_len`` are the prompt."""
    params = rules.params
    seen = EMITTED * np.bincount(ids[prompt_len:], minlength=vocab_size)
    seen[ids[:prompt_len]] |= IN_PROMPT
    seen[rules.stop_ids] |= IS_END
    seen[eos_ids] |= IS_END
    biases = np.zeros(vocab_size, np.float32)
    if len(rules.allowed):
        biases.fill(HIDDEN)
        biases[rules.allowed] = 0
    biases[rules.word_ends] = HIDDEN
    biases[rules.biased] += rules.biases
    return SlotRules(
        is_changed=1,
        seen=seen,
        biases=biases,
        min_ends=prompt_len + params.min_tokens,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
    )
