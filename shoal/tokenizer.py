"""The tokenizer of a server, with the most common methods of transformers' tokenizers."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from shoal.connection import Request
from shoal.prompts import Messages, Prompt, TokenIds
from shoal.refusals import refuse_parts

Ask = Callable[[Sequence[Request]], list[bytes]]
decode_json = msgspec.json.Decoder().decode


class Tokenizer:
    """``ask`` sends requests with the fields ``common``."""

    def __init__(self, ask: Ask, common: dict[str, Any]) -> None:
        self._ask = ask
        self._common = common

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"tokenizer.{name}: the server has encode, decode and apply_chat_template;"
            " transformers.AutoTokenizer reads everything else from the folder of the model"
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> TokenIds:
        [ids] = self._tokenize(
            [{"prompt": text, "add_special_tokens": add_special_tokens}], "texts"
        )
        return ids

    def decode(self, token_ids: int | TokenIds, skip_special_tokens: bool = False) -> str:
        """Special tokens are part of the text. Raises TypeError if they are to be skipped."""
        if skip_special_tokens:
            raise TypeError("skip_special_tokens: the server decodes all tokens")
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        [text] = self._texts([ids])
        return text

    def apply_chat_template(
        self,
        conversation: Messages,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **kwargs: Any,
    ) -> str | TokenIds:
        """The text or, if ``tokenize``, the ids; ``kwargs`` are variables of the template."""
        options = {
            "tools": tools,
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": kwargs or None,
        }
        [prompt] = self.render([conversation], options)
        return prompt.value if tokenize else prompt.text or ""

    def render(self, conversations: list[Messages], options: dict[str, Any]) -> list[Prompt]:
        """The text and the ids of each conversation. Raises TypeError for parts that are no
        texts: ids alone lose images."""
        for index, messages in enumerate(conversations):
            refuse_parts(messages, "messages" if len(conversations) == 1 else f"messages[{index}]")
        given = {name: value for name, value in options.items() if value is not None}
        bodies = [{"messages": messages, **given} for messages in conversations]
        rendered = self._tokenize(bodies, "messages")
        texts = self._texts(rendered)
        return [Prompt(text, ids) for text, ids in zip(texts, rendered, strict=True)]

    def _tokenize(self, bodies: list[dict[str, Any]], name: str) -> list[TokenIds]:
        requests = [
            Request("/tokenize", self._common | body, f"{name}[{index}]")
            for index, body in enumerate(bodies)
        ]
        replies = self._ask(requests)
        return [decode_json(reply)["tokens"] for reply in replies]

    def _texts(self, several: list[TokenIds]) -> list[str]:
        requests = [
            Request("/detokenize", self._common | {"tokens": ids}, "token_ids") for ids in several
        ]
        return [decode_json(reply)["prompt"] for reply in self._ask(requests)]
