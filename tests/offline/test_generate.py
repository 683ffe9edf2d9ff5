"""Texts of a mesh that the class starts itself, and of a running server."""

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.harness.ports import free_port
from shared.model_folder import EMBEDDED_MODEL
from shoal import LLM, Logprob, LoRARequest, SamplingParams, StructuredOutputsParams
from shoal.connection import MAX_OPEN_REQUESTS, Request

ROOT = Path(__file__).parents[2]
QUESTION = [{"role": "user", "content": "What is 12 + 30?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=20)
FISH = "The shoal of fish"


def test_results_are_in_the_order_of_prompts_of_each_form(llm: LLM):
    ids = llm.get_tokenizer().encode("import os")
    prompts: list[Any] = [
        "import os",
        ids,
        {"prompt": "import os"},
        {"prompt_token_ids": ids},
        "Hello",
    ]
    results = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [each.prompt for each in results] == ["import os", None, "import os", None, "Hello"]
    assert [each.prompt_token_ids == ids for each in results] == [True] * 4 + [False]
    assert len({each.outputs[0].text for each in results[:4]}) == 1
    [only] = llm.generate(ids, GREEDY)
    assert only.outputs[0].token_ids == results[0].outputs[0].token_ids
    assert (only.finished, only.outputs[0].finish_reason) == (True, "length")
    assert only.num_cached_tokens == 0


def write_adapter(folder: Path, seed: int) -> str:
    """PEFT's format, for the output layer of each attention."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for file in sorted(EMBEDDED_MODEL.glob("*.safetensors")):
        for name, weight in load_file(file).items():
            if name.endswith("o_proj.weight") and name.startswith("model.layers."):
                layer = f"base_model.model.{name.removesuffix('.weight')}.lora_"
                outputs, inputs = weight.shape
                tensors[f"{layer}A.weight"] = torch.randn(4, inputs, generator=generator)
                tensors[f"{layer}B.weight"] = torch.randn(outputs, 4, generator=generator)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 0.2}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def test_texts_with_and_without_adapters(llm: LLM, tmp_path: Path) -> None:
    one, other = (
        LoRARequest(name, number, write_adapter(tmp_path / name, number))
        for number, name in enumerate(("one", "other"), 1)
    )
    plain, first, second = llm.generate([FISH] * 3, GREEDY, False, [None, one, other])
    assert [each.lora_request for each in (plain, first, second)] == [None, one, other]
    assert len({each.outputs[0].text for each in (plain, first, second)}) == 3
    (again,) = llm.generate(FISH, GREEDY, False, lora_request=one)
    assert again.outputs[0].text == first.outputs[0].text
    assert again.outputs[0].lora_request == one
    message = [{"role": "user", "content": "Hi"}]
    (of_base,) = llm.chat(message, GREEDY, False)
    (of_one,) = llm.chat(message, GREEDY, False, one)
    assert of_base.outputs[0].text != of_one.outputs[0].text
    with pytest.raises(ValueError, match="one is the adapter in"):
        llm.generate(FISH, GREEDY, False, LoRARequest("one", 1, other.lora_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"has no adapter_config\.json"):
        llm.generate(FISH, GREEDY, False, LoRARequest("empty", 3, str(tmp_path / "empty")))
    with pytest.raises(ValueError, match='model is "nothing"; served here: shoal-tiny, one'):
        llm.generate(FISH, GREEDY, False, LoRARequest("nothing"))


def test_more_prompts_than_open_requests_keep_their_order_and_parameters(llm: LLM):
    numbers = range(MAX_OPEN_REQUESTS + 20)
    prompts = [f"{number} + 1 =" for number in numbers]
    params = [SamplingParams(max_tokens=1 + number % 2) for number in numbers]
    results = llm.generate(prompts, params)
    assert [each.prompt for each in results] == prompts
    assert [len(each.outputs[0].token_ids) for each in results] == [1 + n % 2 for n in numbers]


def test_a_seed_gives_the_text_of_the_http_api(llm: LLM):
    params = SamplingParams(seed=7, n=2, max_tokens=12, top_p=0.9, presence_penalty=0.5)
    [result] = llm.generate("import os\n", params)
    body = {"prompt": "import os\n", "seed": 7, "n": 2, "max_tokens": 12, "temperature": 1}
    body |= {"top_p": 0.9, "presence_penalty": 0.5}
    [reply] = llm._connection.ask([Request("/v1/completions", body, "prompt")], lambda: None)
    expected = [choice["text"] for choice in json.loads(reply)["choices"]]
    assert [output.text for output in result.outputs] == expected
    assert [output.index for output in result.outputs] == [0, 1]
    assert len(set(expected)) == 2


def test_logprobs_are_dicts_by_token_id_with_ranks(llm: LLM):
    params = SamplingParams(temperature=1, seed=1, max_tokens=8, logprobs=2, prompt_logprobs=1)
    [result] = llm.generate("import os\n", params)
    [output] = result.outputs
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids) == 8
    for token_id, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert next(iter(entry)) == token_id
        assert {each.rank for each in entry.values()} >= {1, 2}
        assert all(each.logprob <= 0 for each in entry.values())
    own = [entry[token] for token, entry in zip(output.token_ids, output.logprobs, strict=True)]
    assert "".join(each.decoded_token or "" for each in own) == output.text
    assert output.cumulative_logprob is not None
    assert math.isclose(output.cumulative_logprob, sum(each.logprob for each in own))
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    assert isinstance(result.prompt_logprobs[1][result.prompt_token_ids[1]], Logprob)


def test_named_ids_have_logprobs_in_every_entry(llm: LLM):
    [result] = llm.generate("import os\n", SamplingParams(max_tokens=3, logprob_token_ids=[5, 6]))
    [output] = result.outputs
    assert output.logprobs is not None
    assert len(output.logprobs) == 3
    for token_id, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert entry.keys() == {token_id, 5, 6}


def test_ends_and_texts_follow_the_parameters(llm: LLM):
    [whole] = llm.generate("import os\n", SamplingParams(temperature=0, max_tokens=30))
    word = whole.outputs[0].text.split()[1]
    stop = SamplingParams(temperature=0, max_tokens=30, stop=word, include_stop_str_in_output=True)
    [ended] = llm.generate("import os\n", stop)
    assert (ended.outputs[0].finish_reason, ended.outputs[0].stop_reason) == ("stop", word)
    assert ended.outputs[0].text.endswith(word)
    [ids_only] = llm.generate("import os\n", SamplingParams(temperature=0, detokenize=False))
    assert ids_only.outputs[0].text == ""
    assert ids_only.outputs[0].token_ids == whole.outputs[0].token_ids[:16]


@pytest.mark.parametrize(
    "form", [StructuredOutputsParams(choice=["yes", "no"]), {"regex": "yes|no"}]
)
def test_a_text_has_its_form(llm: LLM, form: Any):
    [result] = llm.generate("Is it?", SamplingParams(structured_outputs=form, max_tokens=20))
    assert result.outputs[0].text in ("yes", "no")


def test_a_chat_is_rendered_and_its_text_is_raw(llm: LLM):
    [result] = llm.chat(QUESTION, GREEDY)
    assert result.outputs[0].text == "12 + 30 = 42"
    assert result.prompt is not None
    assert result.prompt.endswith(f"{QUESTION[0]['content']}<|im_end|>\n<|im_start|>assistant\n")
    started = [*QUESTION, {"role": "assistant", "content": "12 + 30"}]
    options: Any = {"add_generation_prompt": False, "continue_final_message": True}
    results = llm.chat([started, started], GREEDY, **options)
    with pytest.raises(ValueError, match=r"^messages\[1\]: .*role"):
        llm.chat([QUESTION, [{"role": "fish", "content": "Hello"}]], GREEDY)
    assert [each.outputs[0].text for each in results] == [" = 42"] * 2


def test_a_call_of_a_tool_is_part_of_the_text(llm: LLM):
    number = {"type": "integer"}
    parameters = {"type": "object", "properties": {"a": number, "b": number}}
    function = {"name": "multiply", "description": "Multiplies.", "parameters": parameters}
    question = [{"role": "user", "content": "1234 * 56 = ?"}]
    tools = [{"type": "function", "function": function}]
    [result] = llm.chat(question, SamplingParams(temperature=0, max_tokens=80), tools=tools)
    assert "<tool_call>" in result.outputs[0].text
    assert "multiply" in (result.prompt or "")


def test_without_parameters_the_models_defaults_apply(llm: LLM):
    [result] = llm.generate("import os\n")
    assert len(result.outputs[0].token_ids) == 16
    params = llm.get_default_sampling_params()
    assert params.body().keys().isdisjoint({"temperature", "top_p", "top_k", "min_p"})


async def test_it_works_within_a_running_loop(llm: LLM):
    results = await asyncio.gather(
        *(asyncio.to_thread(llm.generate, "import", GREEDY) for _ in range(3)),
    )
    direct = llm.generate("import", GREEDY)
    assert {each[0].outputs[0].text for each in [*results, direct]} == {direct[0].outputs[0].text}


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (SamplingParams(temperature=7), "prompts[0]: temperature is 7; expected float <= 2.0"),
        (SamplingParams(logprobs=21), "prompts[0]: logprobs is 21; expected 0 to 20"),
        (SamplingParams(max_tokens=10**6), "max_tokens"),
        (SamplingParams(structured_outputs={"regex": "("}), "regex"),
    ],
)
def test_a_refused_value_has_the_words_of_the_server(llm: LLM, params: SamplingParams, text: str):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        llm.generate("a", params)
    assert text in str(error.value)


@pytest.mark.parametrize("params", [{"temperature": 0}, [None]])
def test_foreign_parameters_are_a_type_error(llm: LLM, params: Any):
    with pytest.raises(TypeError, match="sampling_params: expected SamplingParams, not "):
        llm.generate(["a"], params)


@pytest.mark.parametrize("priority", [[1, 2], [], 3])
def test_a_priority_is_one_for_all_or_one_for_each(llm: LLM, priority: Any):
    results = llm.generate(["a", "b"], GREEDY, priority=priority)
    assert [each.finished for each in results] == [True, True]
    with pytest.raises(ValueError, match="priority: 1 for 2 prompts"):
        llm.generate(["a", "b"], GREEDY, priority=[1])


def test_a_refused_prompt_is_named_and_the_others_end(llm: LLM):
    prompts: list[Any] = ["a", [1, 2, 10**6], "b"]
    with pytest.raises(ValueError, match=r"^prompts\[1\]: "):
        llm.generate(prompts, SamplingParams(max_tokens=1000, ignore_eos=True))
    assert llm.generate("a", GREEDY)[0].finished


def test_a_bar_counts_the_replies(llm: LLM):
    seen: list[Any] = []

    class Bar:
        def __init__(self, total: int, desc: str) -> None:
            seen.append(total)

        def update(self, num: int) -> None:
            seen.append(num)

        def close(self) -> None:
            seen.append("closed")

    llm.generate(["a", "b"], GREEDY, use_tqdm=Bar)
    assert seen == [2, 1, 1, "closed"]


def test_a_tokenizer_has_the_common_methods(llm: LLM):
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode("Hällo")
    assert tokenizer.decode(ids) == "Hällo"
    rendered = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    assert rendered == llm.chat(QUESTION, GREEDY)[0].prompt
    assert tokenizer.encode(rendered) == tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True
    )
    with pytest.raises(AttributeError, match="AutoTokenizer"):
        tokenizer.vocab_size  # noqa: B018
    with pytest.raises(TypeError, match="skip_special_tokens"):
        tokenizer.decode(ids, skip_special_tokens=True)


def test_no_heavy_package_is_imported():
    code = (
        "import sys, shoal\n"
        "found = {'torch', 'transformers', 'tokenizers', 'huggingface_hub'} & set(sys.modules)\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@contextmanager
def api_server(mesh: Path, *arguments: str) -> Iterator[None]:
    process = subprocess.Popen(
        [sys.executable, "-m", "shoal.api_server", "--mesh-dir", str(mesh), *arguments],
        cwd=ROOT,
        env={"SHOAL_NUM_THREADS": "1", "SHOAL_SCHEDULERS": "1"} | os.environ,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert any(line.startswith("ready after") for line in process.stdout)
        yield
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 0


@pytest.mark.slow
def test_a_running_server_gives_the_same_texts(llm: LLM, tmp_path: Path):
    params = SamplingParams(seed=5, max_tokens=12, logprobs=1)
    port = free_port()
    name = EMBEDDED_MODEL.name
    with api_server(tmp_path, "--port", str(port), "--api-key", "k", "--trust-remote-code", name):
        url = f"http://127.0.0.1:{port}/v1"
        with pytest.raises(ConnectionError, match="answers 401"):
            LLM(url=url, api_key="wrong")
        with LLM(name, url=url, api_key="k") as remote:
            results = remote.generate(["import", "Hello"], params)
        with LLM("whale", url=url, api_key="k") as remote, pytest.raises(ValueError, match="whale"):
            remote.generate("a")
    expected = llm.generate(["import", "Hello"], params)
    assert [each.outputs for each in results] == [each.outputs for each in expected]
