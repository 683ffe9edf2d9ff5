"""The Python API of Shoal: ``LLM`` in the shape of vLLM's offline API."""

from shared.version import VERSION
from shoal.llm import LLM
from shoal.lora import LoRARequest
from shoal.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from shoal.sampling_params import (
    GuidedDecodingParams,
    PoolingParams,
    SamplingParams,
    StructuredOutputsParams,
)

__version__ = VERSION
__all__ = [
    "LLM",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "GuidedDecodingParams",
    "LoRARequest",
    "Logprob",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "__version__",
]
