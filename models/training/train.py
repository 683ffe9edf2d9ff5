"""Trains the embedded model: the trunk first, then the MTP layer on the frozen trunk.

OMP_WAIT_POLICY=passive python -m models.training.train --out DIR --tokens 18e6 [--start FOLDER]

A killed run continues from its last checkpoint with the same command; --start FOLDER begins a run
with the tokenizer and the weights of an exported model. Rates and row lengths follow the tokens
seen, so a slow machine only takes longer. torch.compile doubles the speed and needs a C++ compiler;
TORCHDYNAMO_DISABLE=1 turns it off. With OMP_WAIT_POLICY=passive waiting threads sleep; on a shared
machine they would otherwise spin for most of the CPU time.
"""

import argparse
import copy
import shutil
import time
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.optim import Optimizer

from models.training.batches import Batch, BatchSource, encode_corpus, sample_texts
from models.training.checkpoint import Progress, load_checkpoint, load_weights, save_checkpoint
from models.training.corpus import common_words, load_documents, split_documents
from models.training.losses import backward_drafts, backward_next_token
from models.training.model import ModelConfig, ShoalTiny
from models.training.optimizer import PEAK_RATE, make_optimizers, rate_factor
from models.training.tokenizer import TOKENIZER_FILES, save_tokenizer, train_tokenizer

ROW_LENGTH, LONG_ROW_LENGTH = 1024, 2048
LONG_SHARE = 0.2  # the last fifth of the trunk phase has long rows
WARMUP_STEPS = {"trunk": 200, "mtp": 20}
FIRST_CHECKPOINT_S = 240.0
CHECKPOINT_S = 600.0
LOG_STEPS = 20


def prepare_data(out: Path, seed: int) -> BatchSource:
    """Return the source of batches; a run without a tokenizer gets one trained."""
    documents, _ = split_documents(load_documents())
    words = common_words(documents)
    if not (out / "tokenizer.json").exists():
        texts = [document.text for document in documents] + sample_texts(words, 20_000)
        save_tokenizer(train_tokenizer(texts), out)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    return BatchSource(tokenizer, encode_corpus(tokenizer, documents), words, seed)


class Phase:
    """One of the two phases: its parameters, loss and number of tokens."""

    def __init__(self, name: str, model: ShoalTiny, args: argparse.Namespace) -> None:
        self.is_trunk = name == "trunk"
        self.name, self.model, self.out = name, model, args.out
        self.tokens_per_step = args.tokens_per_step
        self.rate = args.rate
        self.budget = args.tokens if self.is_trunk else args.mtp_tokens
        for parameter_name, parameter in model.named_parameters():
            parameter.requires_grad_(("mtp_layers" not in parameter_name) == self.is_trunk)
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.parameters = list(trained.values())
        self.optimizers: list[Optimizer] = make_optimizers(trained, args.muon)

    def row_length(self, progress: Progress) -> int:
        """Return the number of positions per row."""
        is_long = self.is_trunk and progress.num_tokens > (1 - LONG_SHARE) * self.budget
        return LONG_ROW_LENGTH if is_long else ROW_LENGTH

    def step(self, batch: Batch, rate: float) -> float:
        """Update the parameters once and return the loss in nats."""
        loss = (backward_next_token if self.is_trunk else backward_drafts)(self.model, batch)
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def run(self, source: BatchSource, progress: Progress) -> Progress:
        """Train until the budget is spent, with a checkpoint every ten minutes."""
        next_checkpoint_s = progress.elapsed_s + FIRST_CHECKPOINT_S
        started = time.monotonic() - progress.elapsed_s
        while progress.num_tokens < self.budget:
            length = self.row_length(progress)
            batch = source.next_batch(self.tokens_per_step // length, length)
            factor = rate_factor(progress, self.budget, WARMUP_STEPS[self.name])
            loss = self.step(batch, self.rate * factor)
            progress = replace(
                progress,
                elapsed_s=time.monotonic() - started,
                num_steps=progress.num_steps + 1,
                num_tokens=progress.num_tokens + batch.is_target.numel(),
            )
            if progress.num_steps % LOG_STEPS == 0:
                print(f"{self.name} {progress} loss {loss:.3f}", flush=True)
            if progress.elapsed_s > next_checkpoint_s:
                save_checkpoint(self.out, self.name, self.model, progress)
                next_checkpoint_s = progress.elapsed_s + CHECKPOINT_S
        save_checkpoint(self.out, self.name, self.model, progress)
        return progress


def start_mtp_layer(model: ShoalTiny) -> None:
    """Give the MTP layer the last trunk layer's weights and the trunk's final norm."""
    layer, trunk = model.model.mtp_layer, model.model
    layer.load_state_dict(copy.deepcopy(trunk.layers[-1].state_dict()), strict=False)
    layer.final_layernorm.load_state_dict(trunk.norm.state_dict())


def start_phase(name: str, model: ShoalTiny, args: argparse.Namespace) -> None:
    """Load the initial weights; without any the trunk is random, and its last layer starts the MTP
    layer."""
    if name == "trunk" and args.start:
        model.load_state_dict(load_weights(args.start))
        for file_name in TOKENIZER_FILES:
            shutil.copyfile(args.start / file_name, args.out / file_name)
    elif name == "mtp" and not args.start:
        start_mtp_layer(model)


def main() -> None:
    """Run or continue both phases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of tokenizer and checkpoints"
    )
    parser.add_argument("--tokens", type=float, default=18e6, help="of the trunk phase")
    parser.add_argument("--mtp-tokens", type=float, default=3e6, help="of the MTP phase")
    parser.add_argument("--tokens-per-step", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rate", type=float, default=PEAK_RATE, help="highest learning rate")
    parser.add_argument("--start", type=Path, help="folder of an exported model to begin with")
    parser.add_argument("--muon", action="store_true", help="Muon for the hidden matrices")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    args.out.mkdir(parents=True, exist_ok=True)
    model = ShoalTiny(ModelConfig())
    model.hidden = torch.compile(model.hidden, dynamic=False)
    model.draft = torch.compile(model.draft, dynamic=False)
    for name in ("trunk", "mtp"):
        progress = load_checkpoint(args.out, name, model)
        if progress.num_steps == 0:
            start_phase(name, model, args)
        source = prepare_data(args.out, seed=progress.num_steps)
        Phase(name, model, args).run(source, progress)


if __name__ == "__main__":
    main()
