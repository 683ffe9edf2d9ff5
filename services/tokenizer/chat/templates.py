"""The chat templates of a model, and templates in requests."""

from collections import OrderedDict
from threading import Lock

from services.tokenizer.chat.template import TEMPLATE_ERRORS, ChatTemplate
from services.tokenizer.chat.template_files import DEFAULT, TOOL_USE
from shared.errors import ConfigError, InvalidRequest

MAX_TEMPLATE_BYTES = 64 << 10
MAX_COMPILED = 32
SETTING = "trust-request-chat-template"


class ChatTemplates:
    """``sources`` are the model's, by name. Raises ConfigError for one that does not compile.

    Its methods may be called from several threads.
    """

    def __init__(self, sources: dict[str, str], trusts_requests: bool) -> None:
        self._own = {
            name: _compiled(name, sources[name]) for name in (DEFAULT, TOOL_USE) if name in sources
        }
        self._trusts_requests = trusts_requests
        self._tokens: dict[str, str] = {}
        self._brought: OrderedDict[str, ChatTemplate] = OrderedDict()
        self._lock = Lock()

    @property
    def source(self) -> str:
        """The source of the model's template, of the one for tools if there are two; else empty."""
        template = self._own.get(TOOL_USE) or self._own.get(DEFAULT)
        return template.source if template is not None else ""

    def replace(self, text: str, token: str) -> None:
        """Also in the templates of requests. Must be called before the first one."""
        self._tokens[text] = token
        self._own = {
            name: _compiled(name, self._replaced(each.source)) for name, each in self._own.items()
        }

    def find(self, source: str, has_tools: bool) -> ChatTemplate:
        """The template in the request, ``source``, else the model's. Raises
        InvalidRequest."""
        if source:
            return self._find_brought(source)
        template = self._own.get(TOOL_USE) if has_tools else None
        template = template or self._own.get(DEFAULT)
        if template is None:
            raise InvalidRequest(
                "the model has no chat template; use /v1/completions", param="messages"
            )
        return template

    def _replaced(self, source: str) -> str:
        for text, token in self._tokens.items():
            source = source.replace(text, token)
        return source

    def _find_brought(self, source: str) -> ChatTemplate:
        if not self._trusts_requests:
            raise InvalidRequest(
                f"chat_template of a request is only taken with the setting {SETTING}",
                param="chat_template",
            )
        num_bytes = len(source.encode())
        if num_bytes > MAX_TEMPLATE_BYTES:
            raise InvalidRequest(
                f"chat_template has {num_bytes} bytes; expected at most {MAX_TEMPLATE_BYTES}",
                param="chat_template",
            )
        with self._lock:
            if source not in self._brought:
                self._brought[source] = _compile_brought(self._replaced(source))
            self._brought.move_to_end(source)
            if len(self._brought) > MAX_COMPILED:
                self._brought.popitem(last=False)
            return self._brought[source]


def _compiled(name: str, source: str) -> ChatTemplate:
    try:
        return ChatTemplate(source)
    except TEMPLATE_ERRORS as error:
        raise ConfigError(f"model: its chat template {name} does not compile: {error}") from None


def _compile_brought(source: str) -> ChatTemplate:
    try:
        return ChatTemplate(source)
    except TEMPLATE_ERRORS as error:
        raise InvalidRequest(
            f"chat_template does not compile: {error}", param="chat_template"
        ) from None
