"""A small GLM-4.5 with experts and a trained MTP head, for measurements of acceptance.

OMP_WAIT_POLICY=passive python -m models.training.sparse --out FOLDER [--steps 1500]

Trunk and head learn together from the embedded model's text, in a small vocabulary that minutes of
training suffice for: the trunk the next token, the head the one after it (DeepSeek-V3, arXiv
2412.19437, 2.2). FOLDER becomes a checkpoint in the published layout.
"""

import argparse
import json
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

from models.training.batches import encode_corpus
from models.training.corpus import load_documents, split_documents
from models.training.tokenizer import save_tokenizer, train_tokenizer

NUM_TRUNK_LAYERS = 3
VOCABULARY_SIZE = 512
ROWS, ROW_LENGTH = 8, 128
PEAK_RATE = 3e-3
HEAD_WEIGHT = 0.3
BALANCE_RATE = 1e-3
LOG_STEPS = 50
WEIGHTS = "model.safetensors"
HEAD = f"model.layers.{NUM_TRUNK_LAYERS}."  # the prefix of its tensors' names


class Head(nn.Module):
    """The parts of an MTP layer around its decoder layer, with the names of checkpoints."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.enorm, self.hnorm = nn.RMSNorm(size, eps), nn.RMSNorm(size, eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.shared_head = nn.ModuleDict({"norm": nn.RMSNorm(size, eps)})

    def combine(self, embedded: Tensor, states: Tensor) -> Tensor:
        """Both [B, T, D] → [B, T, D]"""
        return self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(states)), -1))


class SparseModel(nn.Module):
    """The last decoder layer of ``glm`` is the head's; those before it are the trunk."""

    def __init__(self, glm: Glm4MoeForCausalLM) -> None:
        super().__init__()
        self.glm = glm
        self.head = Head(glm.config.hidden_size, glm.config.rms_norm_eps)

    def states(self, ids: Tensor) -> Tensor:
        """[B, T] → [B, T, D], after the trunk's last norm"""
        x = self.glm.model.embed_tokens(ids)
        for layer in self.glm.model.layers[:-1]:
            x = self._run(layer, x)
        return self.glm.model.norm(x)

    def draft_states(self, states: Tensor, ids: Tensor) -> Tensor:
        """``states`` [B, T, D] of tokens from position 0 on, and the next ``ids`` [B, T] → [B, T,
        D], the input of the trunk's output head for the ids after those."""
        x = self.head.combine(self.glm.model.embed_tokens(ids), states)
        return self.head.shared_head["norm"](self._run(self.glm.model.layers[-1], x))

    def _run(self, layer: nn.Module, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])[None]
        rotation = self.glm.model.rotary_emb(x, places)
        return layer(x, position_embeddings=rotation, attention_mask=None, position_ids=places)


def make_model() -> SparseModel:
    """Return it with random weights."""
    config = Glm4MoeConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=NUM_TRUNK_LAYERS + 1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        use_qk_norm=True,
        max_position_embeddings=1024,
        n_routed_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        num_mtp_layers=0,
    )
    return SparseModel(Glm4MoeForCausalLM(config))


class Losses(NamedTuple):
    """Nats per token, of the last step."""

    trunk: float
    head: float


def train(folder: Path, num_steps: int) -> Losses:
    """Write the checkpoint into ``folder``."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    model = make_model().train()
    for router in model.modules():
        if isinstance(router, Glm4MoeTopkRouter):
            router.register_forward_hook(even_out)
    documents, _ = split_documents(load_documents())
    tokenizer = train_tokenizer((each.text for each in documents), VOCABULARY_SIZE)
    text = torch.from_numpy(encode_corpus(tokenizer, documents))
    optimizer = torch.optim.AdamW(model.parameters(), PEAK_RATE, betas=(0.9, 0.95))
    rate = OneCycleLR(optimizer, PEAK_RATE, num_steps, pct_start=0.1)
    started = time.monotonic()
    for step in range(num_steps):
        starts = rng.integers(len(text) - ROW_LENGTH, size=ROWS)
        ids = torch.stack([text[start : start + ROW_LENGTH] for start in starts])
        losses = losses_of(model, ids)
        optimizer.zero_grad()
        (losses[0] + HEAD_WEIGHT * losses[1]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        found = Losses(*(each.item() for each in losses))
        if step % LOG_STEPS == 0 or step == num_steps - 1:
            print(f"step {step}, {time.monotonic() - started:.0f} s, {found}", flush=True)
    save(model, folder)
    save_tokenizer(tokenizer, folder)
    return found


def losses_of(model: SparseModel, ids: Tensor) -> tuple[Tensor, Tensor]:
    """For ids [B, T]: the trunk's loss for the next id, and the head's for the one after it."""
    states = model.states(ids[:, :-1])
    drafts = model.draft_states(states[:, :-1], ids[:, 1:-1])
    trunk, head = (model.glm.lm_head(each).flatten(0, 1) for each in (states, drafts))
    return cross_entropy(trunk, ids[:, 1:].flatten()), cross_entropy(head, ids[:, 2:].flatten())


def even_out(router: Glm4MoeTopkRouter, _: object, outputs: tuple[Tensor, ...]) -> None:
    """Raise the bias of rarely chosen experts, lower that of others (arXiv 2408.15664)."""
    loads = outputs[2].flatten().bincount(minlength=router.num_experts).float()
    router.e_score_correction_bias += BALANCE_RATE * (loads.mean() - loads).sign()


def save(model: SparseModel, folder: Path) -> None:
    """Write config and weights in the layout of GLM-4.5's."""
    model.glm.save_pretrained(folder)
    head = {f"{HEAD}{name}": each for name, each in model.head.state_dict().items()}
    save_file(load_file(folder / WEIGHTS) | head, folder / WEIGHTS, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": NUM_TRUNK_LAYERS, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def load(folder: Path) -> SparseModel:
    """Return what ``save`` wrote."""
    config = Glm4MoeConfig.from_pretrained(
        folder, num_hidden_layers=NUM_TRUNK_LAYERS + 1, num_mtp_layers=0
    )
    model = SparseModel(Glm4MoeForCausalLM.from_pretrained(folder, config=config))
    stored = load_file(folder / WEIGHTS)
    model.head.load_state_dict({name: stored[HEAD + name] for name in model.head.state_dict()})
    return model.eval()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--steps", type=int, default=1500, help=f"of {ROWS * ROW_LENGTH} tokens")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    train(arguments.out, arguments.steps)
