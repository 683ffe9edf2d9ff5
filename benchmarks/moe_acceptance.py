"""Acceptance of a trained MoE's drafts, counted by the server and recomputed in torch.

A small model in GLM-4.5's layout is trained (``models.training.sparse``) and served by the whole
mesh, with three drafts a step. For the generated outputs the drafts of the same positions are
recomputed one after another, with transformers' layers, without cache, steps or batches, and with
the random bits of their positions.

For each difference, ``margins`` holds the gap between plain torch's two best scores: near 0 it is
rounding.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import uvloop
from torch import Tensor

from benchmarks import servers
from benchmarks.acceptance import SAMPLING, SPECULATION, Answer, ask_all, shares
from benchmarks.harness.admin import metrics_of
from benchmarks.prompts import held_out_prompts
from benchmarks.report import write
from kernels.sample.reference import noise
from models.training.acceptance import NUM_DRAFTS
from models.training.sparse import SparseModel, load, train

PER_PLACE = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
COUNTERS = {
    "chains": "vllm:spec_decode_num_drafts_total",
    "drafts": "vllm:spec_decode_num_draft_tokens_total",
    **{f"right at {place}": f'{PER_PLACE}{{position="{place}"}}' for place in range(NUM_DRAFTS)},
}
Counts = dict[str, int]


class Served(NamedTuple):
    """Answers, and the growth of the scheduler's counters meanwhile."""

    answers: list[Answer]
    counts: Counts


class Draft(NamedTuple):
    """True if the draft equals the token at its position, and the gap to the second best score."""

    is_right: bool
    margin: float


async def serve(folder: Path, prompts: list[list[int]], max_tokens: int) -> dict[str, Served]:
    """Answers by kind of sampling."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        flags = ("--dtype", "float32", "--mesh-dir", name)
        server = servers.shoal(folder, *flags, "--speculative-config", json.dumps(SPECULATION))
        async with servers.running(server) as url:
            before = await counted(Path(name))
            for kind, temperature in SAMPLING.items():
                answers = await ask_all(url, prompts, temperature, max_tokens)
                after = await counted(Path(name))
                grown = {each: after[each] - before[each] for each in COUNTERS}
                found[kind] = Served(answers, grown)
                before = after
    return found


async def counted(mesh_dir: Path) -> Counts:
    values = await metrics_of("scheduler", mesh_dir)
    return {name: int(values.get(metric, 0)) for name, metric in COUNTERS.items()}


class PlainText:
    """Prompt and answer in plain torch."""

    def __init__(self, model: SparseModel, ids: list[int], seed: int, temperature: float) -> None:
        self._model, self._seed, self._temperature = model, seed, temperature
        self._ids = torch.tensor([ids])
        self._states = model.states(self._ids)

    def chain(self, first: int, num: int) -> list[Draft]:
        """``num`` drafts from position ``first`` on; drafts after a wrong one count as wrong."""
        drafts: list[Draft] = []
        for place, scores in enumerate(self._scores(first, num), first):
            best, second = scores.topk(2).values.tolist()
            is_right = bool(scores.argmax() == self._ids[0, place])
            is_right &= all(each.is_right for each in drafts)
            drafts.append(Draft(is_right, best - second))
        return drafts

    def _scores(self, first: int, num: int) -> Iterator[Tensor]:
        """Scores [V] of each position. The head gets the trunk's hidden states of all but the last
        token before ``first``; from there on its own, and the right ids."""
        states = self._states[:, : first - 1]
        for place in range(first, first + num):
            outs = self._model.draft_states(states, self._ids[:, 1:place])
            states = torch.cat((states, outs[:, -1:]), 1)
            logits = self._model.glm.lm_head(outs[0, -1]).double()
            drawn = torch.from_numpy(noise(len(logits), self._seed, place, 0))
            yield logits + self._temperature * drawn


@torch.inference_mode()
def compare(
    model: SparseModel, prompts: list[list[int]], served: Served, temperature: float
) -> dict[str, Any]:
    online: list[list[bool]] = []
    offline: list[list[bool]] = []
    margins = []
    for seed, (prompt, answer) in enumerate(zip(prompts, served.answers, strict=True)):
        text = PlainText(model, prompt + answer.ids, seed, temperature)
        for position, seen in answer.chains.items():
            drafts = text.chain(len(prompt) + position, len(seen))
            online.append(seen)
            offline.append([each.is_right for each in drafts])
            if online[-1] != offline[-1]:
                margins.append(min(each.margin for each in drafts))
    return {
        "by the metrics": served.counts,
        "by the answers": counts_of(online),
        "by plain torch": counts_of(offline),
        "shares": shares([each for each in online if len(each) == NUM_DRAFTS]),
        "chains that differ": len(margins),
        "margins": margins,
    }


def counts_of(chains: list[list[bool]]) -> Counts:
    counts = {"chains": len(chains), "drafts": sum(map(len, chains))}
    for place in range(NUM_DRAFTS):
        counts[f"right at {place}"] = sum(each[place] for each in chains if len(each) > place)
    return counts


def measure(folder: Path, num_steps: int, num_prompts: int, max_tokens: int) -> dict[str, Any]:
    """Trains into ``folder``. Prompts are held out of training."""
    losses = train(folder, num_steps)
    prompts = held_out_prompts(folder)[:num_prompts]
    served = uvloop.run(serve(folder, prompts, max_tokens))
    model = load(folder)
    return {
        "training": {"steps": num_steps, "nats a token": losses._asdict()},
        **{
            kind: compare(model, prompts, each, SAMPLING[kind])
            for kind, each in served.items()
        },
    }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1500, help="of training")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=96)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        figures = measure(Path(name), arguments.steps, arguments.prompts, arguments.max_tokens)
    write("moe_acceptance", figures)
