"""Makes the guides of requests: what a client asks for becomes a grammar that was tried."""

from collections.abc import Callable

from services.tokenizer.guides.child import Vocabulary
from services.tokenizer.guides.compose import Dialect, Wanted, compose, param_of
from services.tokenizer.guides.grammar_check import GrammarCheck
from services.tokenizer.lanes import Lanes
from services.tokenizer.text_model import TextModel
from shared.messages import Guide, OutputStart, Submit


class Guides:
    """``read_vocabulary`` is called, on a thread, before a process is started that tries grammars.
    ``close`` ends that process."""

    def __init__(
        self, dialect: Dialect, read_vocabulary: Callable[[], Vocabulary], lanes: Lanes
    ) -> None:
        self._dialect = dialect
        self._lanes = lanes
        self._check = GrammarCheck(read_vocabulary)

    async def guide_of(self, submit: Submit, start: OutputStart) -> Guide | None:
        """None: the text may be any. ``start`` is what the prompt leaves open.

        Raises InvalidRequest for what is wrong or too large, naming the place in the request, and
        Unavailable while too many grammars wait. Who is cancelled waits no longer. The grammar of a
        replay is not tried again: a worker has run it, and a trial may fail for want of time.
        """
        tools = submit.chat.tools if submit.chat is not None else ""
        wanted = Wanted(submit.format, tools, submit.tool_choice, submit.reasoning_budget)
        if wanted.format is None and not tools and wanted.budget is None:
            return None
        num_bytes = len(tools) + (len(wanted.format.value) if wanted.format is not None else 0)
        guide = await self._lanes.run(num_bytes, lambda: compose(self._dialect, wanted, start))
        is_replay = any(start.num_ids for start in submit.choices)
        if guide is not None and guide.grammar and not is_replay:
            await self._check.check(guide.grammar, param_of(wanted))
        return guide

    async def close(self) -> None:
        await self._check.close()


def guides_for(text: TextModel, lanes: Lanes) -> Guides:
    """Those of the model's formats and vocabulary."""
    dialect = Dialect(text.added_ids, text.encode_exactly, text.tools, text.reasoning)
    return Guides(dialect, lambda: Vocabulary(text.to_json(), text.vocab_size, text.end_ids), lanes)
