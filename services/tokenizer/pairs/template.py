"""The prompt of a query and a document for a model that scores pairs.

A template of pairs gets them as messages with the roles ``query``, ``document`` and, with an
instruction, ``system``, as in vLLM.
"""

from collections.abc import Mapping, Sequence

from services.tokenizer.chat.bounded import TooMuchTime
from services.tokenizer.chat.template import TEMPLATE_ERRORS, ChatTemplate
from services.tokenizer.chat.template_files import DEFAULT
from shared.errors import ConfigError, InvalidRequest

ROLES = ("query", "document", "system")
NO_PAIR_TEMPLATE = (
    "instruction: the model has no template of pairs, so it reads none (chat-template)"
)

# The prompt of Qwen3-Reranker, by its model card.
QWEN3_RERANKER = """\
{%- set task = "Given a web search query, retrieve relevant passages that answer the query" -%}
{%- set texts = namespace(system=task) -%}
{%- for message in messages -%}
{%- if message.role == "query" -%}{%- set texts.query = message.content -%}
{%- elif message.role == "document" -%}{%- set texts.document = message.content -%}
{%- else -%}{%- set texts.system = message.content -%}
{%- endif -%}
{%- endfor -%}
<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. \
Note that the answer can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {{ texts.system }}
<Query>: {{ texts.query }}
<Document>: {{ texts.document }}<|im_end|>
<|im_start|>assistant
<think>

</think>


"""


def find_pair_template(
    sources: Mapping[str, str], *, is_set: bool, by_token: bool
) -> ChatTemplate | None:
    """The operator's template (``is_set``); else the model's own if it knows the roles; else, for
    a model whose score is a token's probability (``by_token``), the template of Qwen3-Reranker.
    None: both are encoded side by side. Raises ConfigError."""
    source = sources.get(DEFAULT)
    if source is not None and (is_set or _compiled(source).traits.knows_pairs):
        return _compiled(source)
    return _compiled(QWEN3_RERANKER) if by_token else None


def render_pair(
    template: ChatTemplate, special_tokens: Mapping[str, str], pair: Sequence[str], max_chars: int
) -> str:
    """``pair`` holds a query, a document and maybe an instruction. Raises InvalidRequest."""
    messages = [{"role": role, "content": text} for role, text in zip(ROLES, pair, strict=False)]
    variables = {**special_tokens, "messages": messages, "add_generation_prompt": True}
    try:
        return template.render(variables, max_chars)
    except (*TEMPLATE_ERRORS, TooMuchTime) as error:
        text = f"the model's template of pairs refuses this one: {error}"
        raise InvalidRequest(text, param="prompt") from None


def _compiled(source: str) -> ChatTemplate:
    try:
        return ChatTemplate(source)
    except TEMPLATE_ERRORS as error:
        raise ConfigError(f"model: its template of pairs does not compile: {error}") from None
