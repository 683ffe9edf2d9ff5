"""Hook for the constraints of clients on a text."""

from collections.abc import Callable

from services.tokenizer.lanes import Lanes
from services.tokenizer.text_model import TextModel
from shared.errors import InvalidRequest
from shared.wire.messages import Guide, OutputStart, Submit


class GuideMaker:
    """Makes no guides, and refuses requests whose texts would need one."""

    async def guide_of(
        self,
        submit: Submit,
        start: OutputStart,
        note_left_out: Callable[[list[str]], None] = lambda places: None,
        owner: str = "",
    ) -> Guide | None:
        """None: any text is allowed. ``start`` is the open part of the output after the prompt;
        ``note_left_out`` gets the places of schema keywords that are not enforced, if any. API
        keys (``owner``) share threads.

        Raises InvalidRequest for constraints that are wrong or too large, naming the place in the
        request, and Unavailable or Overloaded while too many grammars wait. A cancelled caller
        stops waiting.
        """
        choice = submit.tool_choice
        if submit.format is not None:
            raise _refused(submit.format.param)
        if submit.reasoning_budget is not None:
            raise _refused("thinking_token_budget")
        if choice is not None and choice.kind == "required":
            raise _refused("tool_choice")
        return None

    async def close(self) -> None:
        return


MakeGuides = Callable[[TextModel, Lanes], GuideMaker]


def wants_guide(submit: Submit) -> bool:
    """True if a grammar might have to enforce a constraint on the text."""
    has_tools = submit.chat is not None and bool(submit.chat.tools)
    return submit.format is not None or has_tools or submit.reasoning_budget is not None


def _refused(param: str) -> InvalidRequest:
    text = f"{param}: this installation has no grammars, without which no text can be held to it"
    return InvalidRequest(text, param=param)
