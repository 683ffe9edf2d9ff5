"""LangChain's standard tests of chat models, with its own client for OpenAI's API.

The embedded model writes valid forms without understanding what for, so that a test which compares
what an argument says is expected to fail.
"""

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

NO_SENSE = pytest.mark.xfail(reason="the embedded model does not know what to write")


class TestShoal(ChatModelIntegrationTests):
    url: str

    @pytest.fixture(autouse=True)
    def _served(self, url: str) -> None:
        type(self).url = url

    @pytest.fixture
    def model(self, url: str, request: Any) -> BaseChatModel:
        return ChatOpenAI(**self.chat_model_params, base_url=url)

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": "shoal-tiny",
            "api_key": "none",
            "temperature": 0,
            "seed": 1,
            "max_tokens": 300,
            "stream_usage": True,
            "max_retries": 0,
        }

    @property
    def supports_json_mode(self) -> bool:
        return True
