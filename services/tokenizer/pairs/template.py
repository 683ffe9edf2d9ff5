"""The template of a query and a document, for a model that scores pairs."""

from collections.abc import Mapping

from services.tokenizer.chat.template import TEMPLATE_ERRORS, ChatTemplate
from services.tokenizer.chat.template_files import DEFAULT
from shared.errors import ConfigError

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
    sources: Mapping[str, str], is_set: bool, by_token: bool
) -> ChatTemplate | None:
    """The operator's template (``is_set``); else the model's own if it knows the roles; else, for
    a model whose score is a token's probability (``by_token``), the template of Qwen3-Reranker.
    None: both are encoded side by side. Raises ConfigError."""
    source = sources.get(DEFAULT)
    if source is not None and (is_set or _compiled(source).traits.knows_pairs):
        return _compiled(source)
    return _compiled(QWEN3_RERANKER) if by_token else None


def _compiled(source: str) -> ChatTemplate:
    try:
        return ChatTemplate(source)
    except TEMPLATE_ERRORS as error:
        raise ConfigError(f"model: its template of pairs does not compile: {error}") from None
