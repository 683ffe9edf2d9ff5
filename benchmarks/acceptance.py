"""Acceptance of drafts, counted by the server and recomputed in plain torch.

Runs the embedded model over HTTP with three drafts of its MTP head. The model's training code then
recomputes the drafts of every position of the generated outputs: with the random bits of the target
position, as the server samples them, and, at temperature 1, as the likeliest ids. Online a chain
starts at the end of the previous one, which is not at every position.

Rates are conditional on all previous drafts being right; their standard error assumes independent
draws, which is approximate for drafts of one output.
"""

import argparse
import asyncio
import json
from itertools import chain
from math import sqrt
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import torch
import uvloop

from benchmarks import servers
from benchmarks.prompts import held_out_prompts
from benchmarks.report import write
from kernels.sample.reference import noise
from models.training.acceptance import NUM_DRAFTS, draft_hits
from models.training.checkpoint import load_weights
from models.training.model import ModelConfig, ShoalTiny
from shared.model_folder import EMBEDDED_MODEL

SPECULATION = {"method": "mtp", "num_speculative_tokens": NUM_DRAFTS, "adaptive": False}
SAMPLING = {"greedy": 0.0, "temperature 1": 1.0}
Chains = list[list[bool]]


class Answer(NamedTuple):
    """The ids of an output, and its drafts: chains by the position of their first draft."""

    ids: list[int]
    chains: dict[int, list[bool]]


async def ask_all(
    url: str, prompts: list[list[int]], temperature: float, max_tokens: int
) -> list[Answer]:
    async with aiohttp.ClientSession() as session:

        async def ask(seed: int, prompt: list[int]) -> Answer:
            body = {
                "prompt": prompt,
                "max_tokens": max_tokens,
                "temperature": temperature,
                "seed": seed,
                "ignore_eos": True,
                "logprobs": 0,
                "include_draft_logprobs": True,
                "return_token_ids": True,
            }
            async with session.post(f"{url}/v1/completions", json=body) as response:
                (choice,) = (await response.json())["choices"]
            return Answer(choice["token_ids"], chains_of(choice["draft_logprobs"]["content"]))

        return await asyncio.gather(*(ask(seed, prompt) for seed, prompt in enumerate(prompts)))


def chains_of(drafts: list[dict[str, Any]]) -> dict[int, list[bool]]:
    """Groups drafts at consecutive positions, one group per step; the last group of an output may
    be shorter."""
    chains: dict[int, list[bool]] = {}
    first = last = -1
    for draft in drafts:
        position = draft["position"]
        if position != last + 1 or position == first + NUM_DRAFTS:
            first = position
        chains.setdefault(first, []).append(draft["accepted"])
        last = position
    return chains


def offline_chains(
    prompts: list[list[int]], answers: list[Answer], temperature: float
) -> list[Chains]:
    """Chains from each position of each answer, sampled unless the temperature is 0."""
    model = ShoalTiny(ModelConfig()).eval()
    model.load_state_dict(load_weights(EMBEDDED_MODEL))
    vocab_size = model.config.vocab_size
    found = []
    for seed, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids = prompt + answer.ids
        rows = [noise(vocab_size, seed, position, 0) for position in range(len(ids))]
        random_bits = torch.tensor(np.array(rows)) * temperature if temperature else None
        found.append(draft_hits(model, ids, len(prompt), random_bits))
    return found


def shares(chains: Chains) -> list[dict[str, float]]:
    found = []
    for step in range(NUM_DRAFTS):
        alive = [each[step] for each in chains if all(each[:step])]
        share = sum(alive) / max(1, len(alive))
        error = sqrt(share * (1 - share) / max(1, len(alive)))
        found.append({"share": round(share, 3), "error": round(error, 3), "drafts": len(alive)})
    return found


@torch.inference_mode()
def measure(max_tokens: int) -> dict[str, Any]:
    prompts = held_out_prompts()
    flags = ("--dtype", "float32", "--speculative-config", json.dumps(SPECULATION))
    server = servers.shoal(EMBEDDED_MODEL, *flags)

    async def online() -> dict[str, list[Answer]]:
        async with servers.running(server) as url:
            return {
                name: await ask_all(url, prompts, temperature, max_tokens)
                for name, temperature in SAMPLING.items()
            }

    return {
        name: _compare(prompts, answers, SAMPLING[name])
        for name, answers in uvloop.run(online()).items()
    }


def _compare(prompts: list[list[int]], answers: list[Answer], temperature: float) -> dict[str, Any]:
    offline = offline_chains(prompts, answers, temperature)
    pairs = [
        (facts, everywhere[position])
        for answer, everywhere in zip(answers, offline, strict=True)
        for position, facts in answer.chains.items()
        if len(facts) == NUM_DRAFTS and position < len(everywhere)
    ]
    found = {
        "online": shares([facts for facts, _ in pairs]),
        "offline, where drafts began online": shares([computed for _, computed in pairs]),
        "offline, everywhere": shares(list(chain.from_iterable(offline))),
    }
    if temperature:
        likeliest = list(chain.from_iterable(offline_chains(prompts, answers, 0.0)))
        found["offline, everywhere, likeliest drafts"] = shares(likeliest)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--max-tokens", type=int, default=96)
    write("acceptance", measure(parser.parse_args().max_tokens))
