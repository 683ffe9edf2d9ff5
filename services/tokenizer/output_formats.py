"""The model's formats for tool calls and reasoning, and the part that a prompt leaves open."""

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from shared.dialects.formats import ReasoningFormat, ToolFormat
from shared.dialects.known import KNOWN
from shared.errors import ConfigError
from shared.wire.codec import Array
from shared.wire.messages import OutputStart

AUTO, NONE = "auto", "none"
MAX_TAIL = 4096  # ids at the end of a prompt in which markers are sought that are plain text

_BEGINS = {
    "prompt": OutputStart.ANSWER,
    "model": OutputStart.UNDECIDED,
    "always": OutputStart.REASONING,
}


def find_formats(
    tool_parser: str, reasoning_parser: str, template: str, added: Mapping[str, int]
) -> tuple[ToolFormat | None, ReasoningFormat | None]:
    """The formats that two settings mean: ``auto`` reads them from the template and the added
    tokens. Raises ConfigError for a name that is not known."""
    tools, reasoning = KNOWN.recognise(template, added)
    tools = _chosen("tool-call-parser", tool_parser, tools, KNOWN.tools)
    reasoning = _chosen("reasoning-parser", reasoning_parser, reasoning, KNOWN.reasoning)
    return KNOWN.find_tools(tools, added), KNOWN.find_reasoning(reasoning, added)


def _chosen(setting: str, value: str, recognised: str, known: Iterable[str]) -> str:
    if value == AUTO:
        return recognised
    if value == NONE:
        return ""
    if value not in known:
        names = ", ".join(sorted(known))
        raise ConfigError(f"{setting}: {value} is neither auto nor none nor one of {names}")
    return value


class PromptEnd:
    """Finds the first part of the output after a prompt.

    ``added`` has the ids of added tokens; the ``special_ids`` among them separate messages;
    ``decode`` makes text of ids, special tokens included.
    """

    def __init__(
        self,
        reasoning: ReasoningFormat | None,
        added: Mapping[str, int],
        special_ids: Iterable[int],
        decode: Callable[[list[int]], str],
    ) -> None:
        self._reasoning = reasoning
        self._decode = decode
        markers = [] if reasoning is None else [reasoning.open, reasoning.close]
        self._ids = {added[text]: text for text in markers if text in added}
        self._texts = [text for text in markers if text and text not in added]
        parts = {added[text] for text in (reasoning.tokens if reasoning else ()) if text in added}
        self._all_ids = np.array([*({*self._ids, *special_ids} - parts)], np.int32)

    def start(self, prompt: Array, is_chat: bool, continues_answer: bool) -> OutputStart:
        """The last marker in the last message of ``prompt`` [prompt_len] int32 decides, else the
        format. A text without separators between messages is not a chat of the model."""
        if self._reasoning is None:
            return OutputStart.ANSWER
        places = np.flatnonzero(np.isin(prompt, self._all_ids))
        last = int(places[-1]) if len(places) else -1
        marker = self._last_text(prompt[last + 1 :])
        if not marker and last >= 0:
            marker = self._ids.get(int(prompt[last]), "")
        if marker:
            is_open = marker == self._reasoning.open
            return OutputStart.REASONING if is_open else OutputStart.ANSWER
        if continues_answer or (last < 0 and not is_chat):
            return OutputStart.ANSWER
        return _BEGINS[self._reasoning.begins]

    def _last_text(self, ids: Array) -> str:
        """The marker of plain text that comes last."""
        if not self._texts:
            return ""
        text = self._decode(ids[-MAX_TAIL:].tolist())
        place, marker = max((text.rfind(each), each) for each in self._texts)
        return marker if place >= 0 else ""
