"""Makes the guides of requests: what a client asks for becomes a grammar that was tried."""

from collections.abc import Callable

from services.tokenizer.guides.causes import parts_of
from services.tokenizer.guides.child import Vocabulary
from services.tokenizer.guides.compose import Dialect, Wanted, compose, param_of
from services.tokenizer.guides.grammar_check import GrammarCheck
from services.tokenizer.lanes import Lanes
from services.tokenizer.text_model import TextModel
from shared.errors import InvalidRequest
from shared.messages import Guide, OutputStart, Submit
from shared.model_folder import TOKENIZER_FILE


class Guides:
    """``read_vocabulary`` is called, on a thread, before a process is started that tries grammars.
    Without ``has_file`` the model's folder lacks what workers need for a grammar. ``close`` ends
    that process."""

    def __init__(
        self,
        dialect: Dialect,
        read_vocabulary: Callable[[], Vocabulary],
        lanes: Lanes,
        has_file: bool = True,
    ) -> None:
        self._dialect = dialect
        self._has_file = has_file
        self._lanes = lanes
        self._check = GrammarCheck(read_vocabulary)

    async def guide_of(self, submit: Submit, start: OutputStart) -> Guide | None:
        """None: the text may be any. ``start`` is what the prompt leaves open.

        Raises InvalidRequest for what is wrong or too large, naming the place in the request, and
        Unavailable or Overloaded while too many grammars wait. Who is cancelled waits no longer.
        The grammar of a replay is not tried again: a worker has run it, and a trial may fail for
        want of time.
        """
        tools = submit.chat.tools if submit.chat is not None else ""
        wanted = Wanted(submit.format, tools, submit.tool_choice, submit.reasoning_budget)
        if wanted.format is None and not tools and wanted.budget is None:
            return None
        num_bytes = len(tools) + (len(wanted.format.value) if wanted.format is not None else 0)
        guide = await self._lanes.run(num_bytes, lambda: compose(self._dialect, wanted, start))
        if guide is not None and guide.grammar:
            param = param_of(wanted)
            self._check_file(param)
            if not any(start.num_ids for start in submit.choices):
                await self._check.check(
                    guide.grammar, param, submit.owner, lambda: parts_of(wanted)
                )
        return guide

    def _check_file(self, param: str) -> None:
        if not self._has_file:
            raise InvalidRequest(
                f"{param}: the model's folder has no {TOKENIZER_FILE}, without which no text can be"
                " held to a form",
                param=param,
            )

    async def close(self) -> None:
        await self._check.close()


def guides_for(text: TextModel, lanes: Lanes) -> Guides:
    """Those of the model's formats and vocabulary."""
    dialect = Dialect(text.added_ids, text.encode_exactly, text.tools, text.reasoning)
    size = max(text.vocab_size, text.num_token_ids)
    return Guides(
        dialect, lambda: Vocabulary(text.to_json(), size, text.end_ids), lanes, text.has_file
    )
