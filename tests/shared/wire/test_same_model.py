"""Peers refuse each other only for differences that would change outputs."""

from pathlib import Path

from msgspec.structs import replace

from shared.wire.messages import PROTOCOL_MAJOR, PROTOCOL_MINOR, Hello, ModelInfo, ServiceName
from shared.wire.same_model import FIELDS_OF_ONE_SERVICE, difference

OPERATE = Path(__file__).parents[3] / "docs/operate.md"
MODEL = ModelInfo(["m"], "f" * 32, 100, 100, 0)


def hello(service: ServiceName, **changes: object) -> Hello:
    return Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, service, "1", replace(MODEL, **changes))


def test_the_formats_of_output_match_tokenizers_alone():
    hermes = hello("tokenizer", tool_parser="hermes", reasoning_parser="qwen3")
    assert difference(hello("worker"), hermes) is None
    assert difference(hello("worker"), hello("worker")) is None
    assert difference(hello("tokenizer", tool_parser="hermes"), hermes) is None
    other = difference(hello("tokenizer", tool_parser="mimo"), hermes)
    assert other == "tool-call-parser is mimo, but hermes at tokenizer 1"
    other = difference(hello("tokenizer", reasoning_parser="glm45"), hermes)
    assert other == "reasoning-parser is glm45, but qwen3 at tokenizer 1"


def test_the_page_lists_all_settings_that_must_be_equal():
    text = (
        OPERATE.read_text().partition("must be the same everywhere")[2].partition("(decisions")[0]
    )
    settings = set(FIELDS_OF_ONE_SERVICE.values()) - {"model", "vocab_size"}
    assert not {name for name in settings if f"`{name}`" not in text}


def test_peers_of_any_kind_have_the_same_weights():
    other = difference(hello("worker", fingerprint="other"), hello("tokenizer"))
    assert other is not None
    assert other.startswith("model is other")
