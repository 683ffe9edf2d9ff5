"""Makes the guides of requests: a client's constraints become a grammar that was tried."""

import logging
from collections.abc import Callable

from services.tokenizer.guide_maker import GuideMaker, wants_guide
from services.tokenizer.guides.causes import parts_of
from services.tokenizer.guides.child import Vocabulary
from services.tokenizer.guides.compose import Dialect, Wanted, compose, param_of
from services.tokenizer.guides.grammar_check import GrammarCheck
from services.tokenizer.guides.limits import Totals, invalid
from services.tokenizer.lanes import Lanes
from services.tokenizer.text_model import TextModel
from shared.errors import RequestError
from shared.wire.messages import Guide, OutputStart, Submit

log = logging.getLogger(__name__)


class Guides(GuideMaker):
    """``read_vocabulary`` is called, on a thread, before the process that tries grammars starts.
    ``close`` ends that process."""

    def __init__(
        self,
        dialect: Dialect,
        read_vocabulary: Callable[[], Vocabulary],
        lanes: Lanes,
    ) -> None:
        self._dialect = dialect
        self._lanes = lanes
        self._check = GrammarCheck(read_vocabulary)

    async def guide_of(
        self,
        submit: Submit,
        start: OutputStart,
        note_left_out: Callable[[list[str]], None] = lambda places: None,
        owner: str = "",
    ) -> Guide | None:
        """The grammar of a replay is not tried again: a worker has run it, and a trial may fail for
        lack of time."""
        if not wants_guide(submit):
            return None
        tools = submit.chat.tools if submit.chat is not None else ""
        wanted = Wanted(submit.format, tools, submit.tool_choice, submit.reasoning_budget)
        num_bytes = len(tools) + (len(wanted.format.value) if wanted.format is not None else 0)
        totals = Totals()
        guide = await self._lanes.run(
            owner, num_bytes, lambda: self._composed(wanted, start, totals)
        )
        if guide is None or not guide.grammar:
            return guide
        param = param_of(wanted)
        if totals.probes and (unheld := await self._check.unheld(totals.probes, owner)):
            totals = Totals(unheld=unheld)
            guide = await self._lanes.run(
                owner, num_bytes, lambda: self._composed(wanted, start, totals)
            )
            assert guide is not None
        if not any(start.num_ids for start in submit.choices):
            await self._check.check(
                guide.grammar, param, owner, lambda: parts_of(wanted, totals.unheld)
            )
        if totals.left_out:
            note_left_out(totals.left_out)
        return guide

    def _composed(self, wanted: Wanted, start: OutputStart, totals: Totals) -> Guide | None:
        """An unforeseen error is the request's error too: it recurs in each tokenizer."""
        try:
            return compose(self._dialect, wanted, start, totals)
        except RequestError:
            raise
        except Exception:
            log.exception("a grammar cannot be composed")
            raise invalid(param_of(wanted), "no grammar can be made of it") from None

    async def close(self) -> None:
        await self._check.close()


def guides_for(text: TextModel, lanes: Lanes) -> Guides:
    """The guides for the model's formats and vocabulary."""
    dialect = Dialect(text.added_ids, text.encode_exactly, text.tools, text.reasoning)
    size = max(text.vocab_size, text.num_token_ids)
    return Guides(dialect, lambda: Vocabulary(text.to_json(), size, text.end_ids), lanes)
