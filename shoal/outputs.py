"""Results of the offline API, in vLLM's shapes, and the replies of the server that they come from.

Numbers are Python's own: a vector is a list of floats, where vLLM has a tensor.
"""

import base64
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from shoal.lora import LoRARequest

Output = TypeVar("Output")


@dataclass(slots=True)
class Logprob:
    """``rank`` counts from 1, the likeliest token of the vocabulary; as in vLLM, tokens of
    ``logprob_token_ids`` are ranked among themselves."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


Logprobs = list[dict[int, Logprob]]
PromptLogprobs = list[dict[int, Logprob] | None]


@dataclass(slots=True)
class CompletionOutput:
    """One text of a prompt. ``stop_reason`` is the stop string or the id of the stop token; None:
    another end."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: Logprobs | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """All texts of one prompt. ``prompt`` is None for a prompt of ids. ``num_cached_tokens`` of the
    prompt were in the prefix cache."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: PromptLogprobs | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    metrics: None = None
    lora_request: LoRARequest | None = None


@dataclass(slots=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """A probability for each class; ``label`` is the name of the likeliest."""

    probs: list[float]
    label: str

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    score: float


@dataclass(slots=True)
class PoolingRequestOutput(Generic[Output]):
    """``prompt_token_ids`` is empty for a text: the server does not return its ids."""

    request_id: str
    outputs: Output
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    __slots__ = ()


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    __slots__ = ()


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    __slots__ = ()


class Choice(msgspec.Struct):
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    prompt_token_ids: list[int]
    stop_reason: int | str | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None

    def output(self, has_text: bool, adapter: LoRARequest | None = None) -> CompletionOutput:
        logprobs = self.logprobs
        total = None
        if logprobs is not None:
            pairs = zip(self.token_ids, logprobs, strict=True)
            total = sum(entry[token_id].logprob for token_id, entry in pairs)
        return CompletionOutput(
            index=self.index,
            text=self.text if has_text else "",
            token_ids=self.token_ids,
            cumulative_logprob=total,
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            lora_request=adapter,
        )


class TokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens_details: TokensDetails


class Completion(msgspec.Struct):
    """A reply of ``/v1/completions`` to one prompt."""

    id: str
    choices: list[Choice]
    usage: Usage

    def output(
        self, prompt: str | None, has_text: bool = True, adapter: LoRARequest | None = None
    ) -> RequestOutput:
        first = self.choices[0]
        return RequestOutput(
            request_id=self.id,
            prompt=prompt,
            prompt_token_ids=first.prompt_token_ids,
            prompt_logprobs=first.prompt_logprobs,
            outputs=[choice.output(has_text, adapter) for choice in self.choices],
            finished=True,
            num_cached_tokens=self.usage.prompt_tokens_details.cached_tokens,
            lora_request=adapter,
        )


class Pooled(msgspec.Struct):
    """A reply of ``/v1/embeddings``, ``/classify`` or ``/score`` to one input."""

    id: str
    data: list[dict[str, Any]]

    def embedding(self, ids: list[int]) -> EmbeddingRequestOutput:
        vector = np.frombuffer(base64.b64decode(self.data[0]["embedding"]), "<f4")
        return EmbeddingRequestOutput(self.id, EmbeddingOutput(vector.tolist()), ids)

    def classes(self, ids: list[int]) -> ClassificationRequestOutput:
        found = self.data[0]
        classes = ClassificationOutput(found["probs"], found["label"])
        return ClassificationRequestOutput(self.id, classes, ids)

    def score(self) -> ScoringRequestOutput:
        return ScoringRequestOutput(self.id, ScoringOutput(self.data[0]["score"]), [])
