"""The descriptions of formats: names, markers, and that each is complete."""

import re
from typing import Any

from shared.dialects.families.reasoning import REASONING_FORMATS
from shared.dialects.families.tools import TOOL_FORMATS, find_tool_format
from shared.dialects.formats import JsonLayout


def test_formats_are_found_by_the_names_of_parsers_elsewhere():
    names = {
        "hermes": ["qwen25", "qwen3_json"],
        "qwen3_coder": ["qwen3_xml", "step3p5"],
        "glm45": ["glm"],
        "glm47": ["ling3", "poolside_v1"],
        "ernie45": ["ernie-45-vl-thinking"],
        "llama3_json": ["llama4_json", "llama3"],
        "pythonic": ["llama4_pythonic"],
        "deepseek_v3": ["deepseekv3"],
        "deepseek_v31": ["deepseekv31"],
        "openai": ["gpt-oss"],
        "internlm": ["interns1", "intern-s1"],
    }
    for name, aliases in names.items():
        for alias in (name, *aliases):
            assert TOOL_FORMATS[alias].name == name
    reasoning = {
        "deepseek_r1": ["ernie-45-vl", "nano_v3"],
        "deepseek_v3": ["deepseek_v4", "deepseek-v3", "deepseek-v4"],
        "glm45": ["glm47", "ling3", "poolside_v1"],
        "qwen3": ["nemotron_v3", "nemotron_3", "qwen3-thinking"],
        "step3": ["step3p5"],
    }
    for name, aliases in reasoning.items():
        for alias in (name, *aliases):
            assert REASONING_FORMATS[alias].name == name
    assert find_tool_format("unknown", ()) is None


def test_mistral_writes_as_its_vocabulary_lets_it():
    old, new = (
        find_tool_format("mistral", {"[TOOL_CALLS]"}),
        find_tool_format("mistral", {"[ARGS]"}),
    )
    assert old is not None
    assert new is not None
    assert isinstance(old.layout, JsonLayout)
    assert new.name == "mistral_v11"
    assert find_tool_format("hermes", {"[ARGS]"}) is TOOL_FORMATS["hermes"]


def test_every_call_begins_with_a_marker_or_may_begin_the_reply():
    for each in TOOL_FORMATS.values():
        begins = each.section_open or each.call_open or each.is_tagless
        assert begins or each.channels, each.name
        assert bool(each.section_open) == bool(each.section_close), each.name
        assert {each.call_open, each.call_close, each.section_open} - {""} <= each.markers


def test_markers_hold_no_text_that_is_none():
    each: Any
    for each in (*TOOL_FORMATS.values(), *REASONING_FORMATS.values()):
        assert all(re.search(r"\S", text) for text in each.markers), each.name


def test_an_early_end_of_reasoning_holds_its_marker():
    for each in REASONING_FORMATS.values():
        assert each.close in each.forced_close
        assert each.channels or (each.open and each.close)
