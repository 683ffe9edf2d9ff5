"""The two losses. Each sends gradients through the output head in slices.

A slice's logits live only while its own gradient is computed, so memory does not grow with
positions times vocabulary.
"""

import torch
from torch import Tensor
from torch.nn import functional

from models.training.batches import Batch
from models.training.model import ShoalTiny

SLICE = 1024  # positions per slice of logits: 16 MiB in bf16
DRAFT_WEIGHTS = (1.0, 0.7, 0.5)


@torch.compile(dynamic=True)
def slice_loss(states: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    """Return the summed cross entropy of states [N, D] to labels: ids [N] or shares [N, V]."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = functional.linear(states, head)
    return functional.cross_entropy(logits.float(), labels, reduction="sum")


def backward_next_token(model: ShoalTiny, batch: Batch) -> float:
    """Train the trunk on the next token at target positions; return the mean loss in nats."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model.norm(model.hidden(batch.ids[:, :-1]))
    used = hidden[batch.is_target]
    labels = batch.ids[:, 1:][batch.is_target]
    leaf = used.detach()
    total = torch.zeros(())
    gradient = torch.empty_like(leaf)
    for start in range(0, len(labels), SLICE):
        states = leaf[start : start + SLICE].requires_grad_()
        wanted = labels[start : start + SLICE]
        loss = slice_loss(states, model.model.embed_tokens.weight, wanted) / len(labels)
        loss.backward()
        gradient[start : start + SLICE] = states.grad
        total += loss.detach()
    used.backward(gradient)
    return total.item()


def backward_drafts(model: ShoalTiny, batch: Batch) -> float:
    """Teach the MTP layer the frozen trunk's own distribution; return the weighted mean loss.

    A draft is accepted if it equals the trunk's sample, so the target is the trunk's distribution
    one position on rather than the text. The few meaningless entries at the start of a row in later
    steps are trained along.
    """
    ids = batch.ids[:, :-1]
    head = model.model.embed_tokens.weight.detach()
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            hidden = model.hidden(ids)
            teacher = model.model.norm(hidden)[:, 1:].flatten(0, 1)
        outputs = model.draft(hidden[:, :-1], ids, len(DRAFT_WEIGHTS))
    used = torch.stack(outputs).flatten(1, 2)  # [steps, N, D]
    leaf = used.detach()
    total = torch.zeros(())
    gradient = torch.empty_like(leaf)
    for start in range(0, len(teacher), SLICE):
        wanted = teacher_shares(teacher[start : start + SLICE], head)
        for step, weight in enumerate(DRAFT_WEIGHTS):
            states = leaf[step, start : start + SLICE].requires_grad_()
            loss = slice_loss(states, head, wanted) * weight / len(teacher)
            loss.backward()
            gradient[step, start : start + SLICE] = states.grad
            total += loss.detach()
    used.backward(gradient)
    return total.item()


@torch.compile(dynamic=True)
@torch.no_grad()
def teacher_shares(states: Tensor, head: Tensor) -> Tensor:
    """Return the trunk's distribution [N, V] from its normed states [N, D]."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = functional.linear(states, head)
    return logits.float().softmax(-1)
