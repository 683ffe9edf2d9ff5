"""Embeddings of an encoder with MiniLM's shape: 512 prompts of mixed lengths through a server,
through the engine alone, and through transformers, in turns.

transformers computes batches of 32 prompts in order of their length, as sentence-transformers does.
All have as many threads.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch
import uvloop
from tokenizers import Tokenizer, models
from transformers import BertConfig, BertModel

from benchmarks import servers
from benchmarks.harness import scheduled
from benchmarks.harness.engines import make_engine
from benchmarks.report import spread, write
from shared.process.cores import num_cores
from shared.wire.messages import Pooling, SamplingParams

SHAPE: dict[str, Any] = {
    "vocab_size": 30522,
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
}
NUM_PROMPTS, SHORTEST, LONGEST = 512, 4, 128
BATCH = 32
PARAMS = SamplingParams(seed=0, max_tokens=0, pooling=Pooling("mean", "normalize"))

Embed = Callable[[list[list[int]]], Awaitable[np.ndarray]]


def save(folder: Path) -> BertModel:
    torch.manual_seed(0)
    model = BertModel(BertConfig(**SHAPE), add_pooling_layer=False).eval()
    model.save_pretrained(folder)
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))
    modules = [
        {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return model


@torch.inference_mode()
def by_transformers(model: BertModel, prompts: list[list[int]]) -> np.ndarray:
    found: dict[int, torch.Tensor] = {}
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    for start in range(0, len(order), BATCH):
        numbers = order[start : start + BATCH]
        batch = [torch.tensor(prompts[number]) for number in numbers]
        ids = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
        lengths = torch.tensor([len(each) for each in batch])[:, None]
        mask = (torch.arange(ids.shape[1]) < lengths).long()
        states = model(input_ids=ids, attention_mask=mask).last_hidden_state
        means = (states * mask[..., None]).sum(1) / lengths
        found |= zip(numbers, torch.nn.functional.normalize(means, dim=-1), strict=True)
    return torch.stack([found[number] for number in range(len(prompts))]).numpy()


def by_http(session: aiohttp.ClientSession, url: str) -> Embed:
    async def embed(prompts: list[list[int]]) -> np.ndarray:
        async with session.post(f"{url}/v1/embeddings", json={"input": prompts}) as response:
            response.raise_for_status()
            data = (await response.json())["data"]
        return np.array([each["embedding"] for each in data], np.float32)

    return embed


async def measure(num_rounds: int, num_prompts: int, max_tokens: int) -> dict[str, Any]:
    """Tokens per second, and the largest difference of an element from transformers'."""
    num_threads = num_cores()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        folder.mkdir()
        model = save(folder)
        engine = make_engine(
            folder,
            "native",
            num_threads=num_threads,
            max_num_seqs=128,
            block_size=16,
            max_num_batched_tokens=max_tokens,
        )
        flags = (
            *("--model", str(folder), "--dtype", "float32", "--num-threads", str(num_threads)),
            *("--max-num-batched-tokens", str(max_tokens)),
        )

        async def by_engine(prompts: list[list[int]]) -> np.ndarray:
            pooled = scheduled.run(engine, prompts, PARAMS).pooled
            return np.stack([pooled[number] for number in range(len(prompts))])

        async def by_model(prompts: list[list[int]]) -> np.ndarray:
            return by_transformers(model, prompts)

        async with (
            servers.running(servers.checkout(*flags)) as url,
            aiohttp.ClientSession() as session,
        ):
            torch.set_num_threads(num_threads)
            ways: dict[str, Embed] = {
                "transformers": by_model,
                "engine": by_engine,
                "http": by_http(session, url),
            }
            return await _in_turns(ways, num_rounds, num_prompts)


async def _in_turns(ways: dict[str, Embed], num_rounds: int, num_prompts: int) -> dict[str, Any]:
    rates: dict[str, list[float]] = {name: [] for name in ways}
    distance = 0.0
    for seed in range(num_rounds + 1):  # the first round is a warm-up
        rng = np.random.default_rng(seed)
        lengths = rng.integers(SHORTEST, LONGEST + 1, num_prompts)
        prompts = [rng.integers(1, SHAPE["vocab_size"], length).tolist() for length in lengths]
        found = {}
        for name, embed in ways.items():
            started_s = time.perf_counter()
            found[name] = await embed(prompts)
            if seed:
                rates[name].append(int(lengths.sum()) / (time.perf_counter() - started_s))
        for each in found.values():
            distance = max(distance, float(np.abs(each - found["transformers"]).max()))
    ratios = {
        name: spread([own / theirs for own, theirs in zip(of, rates["transformers"], strict=True)])
        for name, of in rates.items()
    }
    return {
        "prompts": num_prompts,
        "tokens/s": {name: spread(of) for name, of in rates.items()},
        "ratio to transformers": ratios,
        "largest difference": distance,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--quick", action="store_true", help="one round of few prompts")
    given = parser.parse_args()
    num_rounds, num_prompts = (1, 32) if given.quick else (given.rounds, NUM_PROMPTS)
    write("encoders", uvloop.run(measure(num_rounds, num_prompts, given.max_num_batched_tokens)))


if __name__ == "__main__":
    main()
