"""Tools that may be called, and reasoning and calls found in the output."""

from collections.abc import Sequence

from services.gateway.chat.replies.choice_parser import ChoiceParser
from services.gateway.chat.requests.schema import ChatRequest
from services.gateway.chat.structure import Tools
from services.gateway.mesh.job import Job, Parsing
from services.gateway.mesh.token_table import TokenTable
from services.gateway.text.output_parser import output_parsers
from services.gateway.text.tools import requested_tools
from shared.wire.messages import ModelInfo, OutputStart


class TextStructure:
    """A Structure in the formats of the model."""

    def tools(self, request: ChatRequest, model: ModelInfo) -> Tools:
        """Raises InvalidRequest."""
        return requested_tools(request, model)

    def parsing(self, request: ChatRequest, tools: Tools, model: ModelInfo) -> Parsing | None:
        calls = tools.choice is not None and tools.choice.kind != "none"
        separates = request.separate_reasoning is not False or request.include_reasoning is False
        parsing = Parsing(
            tool_parser=model.tool_parser if calls else "",
            # A call inside the reasoning does not count, whether the reasoning is shown or dropped.
            reasoning_parser=model.reasoning_parser if separates or calls else "",
            tools=tools.tools,
            separates_reasoning=separates,
            shows_reasoning=request.include_reasoning is not False,
            is_parallel=tools.choice is None or tools.choice.is_parallel,
            is_held=tools.choice is not None and tools.choice.kind == "required",
            is_named=tools.is_named,
            is_legacy=tools.is_legacy,
        )
        return parsing if parsing.tool_parser or parsing.reasoning_parser else None

    def parsers(
        self,
        job: Job,
        parsing: Parsing,
        table: TokenTable,
        starts: Sequence[OutputStart],
        seed: str,
    ) -> Sequence[ChoiceParser]:
        return output_parsers(job, parsing, table, starts, seed)
