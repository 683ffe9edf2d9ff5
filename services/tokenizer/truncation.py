"""Prompts that their clients let us cut."""

from dataclasses import dataclass
from typing import TypeVar

from tokenizers import Encoding

from shared.wire.codec import Array
from shared.wire.messages import Convert, TextOptions

Of = TypeVar("Of")


@dataclass(frozen=True, slots=True)
class Truncation:
    """A prompt keeps its last ``num_ids``, or its first ones if it ``keeps_start``."""

    num_ids: int
    keeps_start: bool = False

    def cut(self, ids: Array) -> Array:
        if len(ids) <= self.num_ids:
            return ids
        return ids[: self.num_ids] if self.keeps_start else ids[len(ids) - self.num_ids :]

    def cut_encoding(self, encoding: Encoding, of_tokens: list[Of]) -> list[Of]:
        """The rest of the tokens' values (such as ids) after the cut; the special tokens that the
        tokenizer puts around a text stay."""
        added, num = encoding.special_tokens_mask, len(of_tokens)
        begin = added.index(0) if 0 in added else num
        end = num - (added[::-1].index(0) if 0 in added else 0)
        room = max(self.num_ids - begin - (num - end), 0)
        text = of_tokens[begin:end]
        kept = text[:room] if self.keeps_start else text[max(len(text) - room, 0) :]
        return [*of_tokens[:begin], *kept, *of_tokens[end:]][: self.num_ids]


def truncation_of(options: TextOptions | Convert) -> Truncation | None:
    """None: the prompt stays as it is."""
    if options.max_prompt_tokens is None:
        return None
    return Truncation(options.max_prompt_tokens, options.keeps_prompt_start)
