"""The offline API: vLLM's class ``LLM`` over a mesh of its own, or over a running server."""

import argparse
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import msgspec
from rich.console import Console

from cli.console import bar
from cli.exit_codes import WRONG
from cli.flags import server_url
from cli.own_mesh import own_mesh
from cli.supervisor import StartFailedError
from cli.table import USUAL_LINE
from shared.errors import ConfigError
from shared.settings.load import load_given
from shared.settings.serve import ServeConfig
from shoal.connection import Connection, Opening, Request, running_server
from shoal.lora import ManyAdapters, OwnAdapters, read_adapters
from shoal.outputs import (
    ClassificationRequestOutput,
    Completion,
    EmbeddingRequestOutput,
    Pooled,
    RequestOutput,
    ScoringRequestOutput,
)
from shoal.prompts import (
    GivenPrompts,
    Messages,
    Prompt,
    one_each,
    read_conversations,
    read_prompts,
    type_name,
)
from shoal.refusals import ATTRIBUTES, refuse_arguments
from shoal.sampling_params import PoolingParams, SamplingParams, pooling_body
from shoal.tokenizer import Tokenizer

Reply = TypeVar("Reply")
ManyParams = SamplingParams | Sequence[SamplingParams] | None
Texts = str | Sequence[str]
UseTqdm = bool | Callable[..., Any]
# A mesh of its own has no other clients, which a template could slow down.
OWN_SETTINGS = {"trust_request_chat_template": True}
# Arguments of the methods, for suggestions.
OF_GENERATE = ("prompts", "sampling_params", "use_tqdm", "lora_request", "priority")
OF_CHAT = (
    *("messages", "sampling_params", "use_tqdm", "lora_request", "chat_template"),
    *("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs"),
)
OF_POOLING = ("prompts", "use_tqdm", "pooling_params")

log = logging.getLogger("shoal")


class LLM:
    """A model in a mesh of its own: child processes that end with this object, with the program,
    and with each of its deaths. Keyword arguments are settings of ``shoal serve``; names of vLLM
    are renamed or ignored with one line of the log, like flags. ``revision`` is of a ``model`` in
    the Hugging Face cache. With ``enable_lora`` requests bring their adapters.

    With ``url`` the model is on a running server, and settings are not allowed. ``api_key`` is for
    that server (default: SHOAL_API_KEY).

    Raises ValueError for a wrong setting, RuntimeError for a mesh that does not start, and
    ConnectionError for a server that does not answer.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        revision: str | None = None,
        url: str | None = None,
        api_key: str | None = None,
        **settings: Any,
    ) -> None:
        name = None if model is None else os.fspath(model)
        if revision is not None:
            if name is None or url is not None:
                raise ValueError("revision: needs a model for a mesh of its own")
            name = f"{name}@{revision}"
        self._adapters = OwnAdapters() if _brings_adapters(settings) and url is None else None
        if self._adapters is not None:
            settings |= self._adapters.settings
        opening = _mesh(name, api_key, settings) if url is None else _server(url, api_key, settings)
        self._model = {} if url is None or name is None else {"model": name}
        try:
            with _spinner(f"starting {name or 'the model'}" if url is None else f"asking {url}"):
                self._connection = Connection(opening)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        except StartFailedError as error:
            if error.code == WRONG:
                raise ValueError(str(error)) from None
            raise RuntimeError(f"{error}; `shoal doctor` checks this machine") from None
        self._finalizer = weakref.finalize(self, _close, self._connection, self._adapters)

    def close(self) -> None:
        """Ends the mesh; may be called twice."""
        self._finalizer()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        absent = ATTRIBUTES.get(name)
        reason = "does not exist" if absent is None else f"is not supported: {absent}"
        raise AttributeError(f"LLM.{name} {reason}")

    def generate(
        self,
        prompts: GivenPrompts,
        sampling_params: ManyParams = None,
        use_tqdm: UseTqdm = True,
        lora_request: ManyAdapters = None,
        *,
        priority: Sequence[int] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Continues each prompt: a text, token ids, or a dict with ``prompt`` or
        ``prompt_token_ids``. The results are in the order of the prompts. Without parameters the
        model's own apply. Raises ValueError for values that the server refuses."""
        refuse_arguments("generate", others, OF_GENERATE)
        return self._generate(
            read_prompts(prompts), sampling_params, use_tqdm, lora_request, priority
        )

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: ManyParams = None,
        use_tqdm: UseTqdm = True,
        lora_request: ManyAdapters = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Renders each conversation with the chat template and continues it. As in vLLM, the text
        has reasoning and tool calls as the model writes them. ``prompt`` of a result is the
        rendered text."""
        refuse_arguments("chat", others, OF_CHAT)
        options = {
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "chat_template_kwargs": chat_template_kwargs,
        }
        tokenizer = self.get_tokenizer()
        prompts = tokenizer.render(read_conversations(messages), options)
        return self._generate(prompts, sampling_params, use_tqdm, lora_request)

    def embed(
        self,
        prompts: GivenPrompts,
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | None = None,
        **others: Any,
    ) -> list[EmbeddingRequestOutput]:
        """An embedding of each prompt, by a model that embeds."""
        refuse_arguments("embed", others, OF_POOLING)
        inputs, body = read_prompts(prompts), pooling_body(pooling_params)
        body["encoding_format"] = "base64"
        replies = self._pool("/v1/embeddings", inputs, body, use_tqdm)
        pairs = zip(replies, inputs, strict=True)
        return [reply.embedding(prompt.token_ids or []) for reply, prompt in pairs]

    def classify(
        self,
        prompts: GivenPrompts,
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | None = None,
        **others: Any,
    ) -> list[ClassificationRequestOutput]:
        """Probabilities of classes for each prompt, by a model that classifies."""
        refuse_arguments("classify", others, OF_POOLING)
        inputs = read_prompts(prompts)
        replies = self._pool("/classify", inputs, pooling_body(pooling_params), use_tqdm)
        pairs = zip(replies, inputs, strict=True)
        return [reply.classes(prompt.token_ids or []) for reply, prompt in pairs]

    def score(
        self,
        data_1: Texts,
        data_2: Texts,
        /,
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | None = None,
        **others: Any,
    ) -> list[ScoringRequestOutput]:
        """A score for each pair of texts; one text of ``data_1`` goes with all of ``data_2``."""
        refuse_arguments("score", others, OF_POOLING)
        seconds = [data_2] if isinstance(data_2, str) else list(data_2)
        given = [data_1] if isinstance(data_1, str) else list(data_1)
        firsts = one_each(given[0] if len(given) == 1 else given, len(seconds), "data_1")
        body = self._model | pooling_body(pooling_params)
        requests = [
            Request("/score", body | {"text_1": one, "text_2": other}, f"data_2[{index}]")
            for index, (one, other) in enumerate(zip(firsts, seconds, strict=True))
        ]
        return [reply.score() for reply in self._ask(requests, Pooled, use_tqdm)]

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer of the server, with the most common methods of transformers' tokenizers."""
        return Tokenizer(lambda requests: self._connection.ask(requests, _nothing), self._model)

    def get_default_sampling_params(self) -> SamplingParams:
        """The values of the model's authors, as None: the server knows them."""
        return SamplingParams.of_model()

    def _generate(
        self,
        prompts: list[Prompt],
        sampling_params: ManyParams,
        use_tqdm: UseTqdm,
        lora_request: ManyAdapters,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        given = sampling_params if sampling_params is not None else SamplingParams.of_model()
        params = one_each(given, len(prompts), "sampling_params")
        for each in params:
            if not isinstance(each, SamplingParams):
                raise TypeError(f"sampling_params: expected SamplingParams, not {type_name(each)}")
        priorities = one_each(priority or None, len(prompts), "priority")
        adapters = read_adapters(lora_request, len(prompts))
        if self._adapters is not None:
            new = [each for each in adapters if each is not None]
            self._adapters.load(new, lambda requests: self._connection.ask(requests, _nothing))
        common = self._model | {"return_token_ids": True}
        columns = zip(prompts, params, priorities, adapters, strict=True)
        requests = [
            Request(
                url="/v1/completions",
                body=common
                | each.body()
                | prompt.body("prompt")
                | {"priority": number}
                | ({} if adapter is None else {"model": adapter.lora_name}),
                name=f"prompts[{index}]",
            )
            for index, (prompt, each, number, adapter) in enumerate(columns)
        ]
        replies = self._ask(requests, Completion, use_tqdm)
        return [
            reply.output(prompt.text, each.detokenize, adapter)
            for reply, prompt, each, adapter in zip(replies, prompts, params, adapters, strict=True)
        ]

    def _pool(
        self, url: str, prompts: list[Prompt], body: dict[str, Any], use_tqdm: UseTqdm
    ) -> list[Pooled]:
        requests = [
            Request(url, self._model | body | prompt.body("input"), f"prompts[{index}]")
            for index, prompt in enumerate(prompts)
        ]
        return self._ask(requests, Pooled, use_tqdm)

    def _ask(self, requests: list[Request], kind: type[Reply], use_tqdm: UseTqdm) -> list[Reply]:
        with _progress(use_tqdm, len(requests)) as on_reply:
            replies = self._connection.ask(requests, on_reply)
        decoder = msgspec.json.Decoder(kind)
        return [decoder.decode(reply) for reply in replies]


def _nothing() -> None:
    pass


def _close(connection: Connection, adapters: OwnAdapters | None) -> None:
    connection.close()
    if adapters is not None:
        adapters.close()


def _brings_adapters(settings: dict[str, Any]) -> bool:
    return bool(settings.get("enable_lora")) and not settings.get("lora_dir")


def _mesh(model: str | None, api_key: str | None, settings: dict[str, Any]) -> Opening:
    """Raises ValueError."""
    if api_key is not None:
        raise ValueError("api_key: is for url; a mesh of its own has a key that nobody else knows")
    try:
        config = load_given(ServeConfig, OWN_SETTINGS | {"model": model} | settings, "LLM")
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return own_mesh(config, _log_line)


def _server(url: str, api_key: str | None, settings: dict[str, Any]) -> Opening:
    """Raises ValueError."""
    for name in settings:
        raise ValueError(f"{name}: settings are for a mesh of its own, and url names a server")
    try:
        return running_server(server_url(url), api_key or os.environ.get("SHOAL_API_KEY"))
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"url: {error}") from None


def _log_line(line: str) -> None:
    log.log(logging.INFO if USUAL_LINE.match(line) else logging.WARNING, "%s", line)


@contextmanager
def _spinner(text: str) -> Iterator[None]:
    """Shown on a terminal alone."""
    console = Console(stderr=True)
    with console.status(text) if console.is_terminal else nullcontext():
        yield


@contextmanager
def _progress(use_tqdm: UseTqdm, num: int) -> Iterator[Callable[[], object]]:
    """Yields a function that advances a bar, shown on a terminal alone; ``use_tqdm`` may be a class
    like tqdm."""
    if not use_tqdm:
        yield _nothing
    elif callable(use_tqdm):
        shown = use_tqdm(total=num, desc="Processed prompts")
        try:
            yield lambda: shown.update(1)
        finally:
            shown.close()
    else:
        with bar(Console(stderr=True), num, "prompts") as update:
            yield lambda: update(advance=1)
