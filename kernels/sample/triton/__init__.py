"""``sample_slots`` on a GPU: exact filters without a sort, in four kernels.

``stats`` finds each row's highest and lowest logits, and the moments if ``top_n_sigma`` needs them.
``bins`` counts and weighs the tokens above a few pivots, which brackets both thresholds. ``gather``
draws among the tokens above the bracket, which are surely kept, and lists those inside it.
``finish`` searches the list for the thresholds, draws among the kept tokens and takes the best.
Rows without filters skip ``bins`` and list nothing; greedy rows skip all but ``stats`` and the end
of ``finish``.

Thresholds are values of the logits, as dividing by the temperature keeps their order. Masses are
integers in units of 2^-40 of the highest token's, so that the order of summing does not matter.
"""

import torch
from torch import Tensor

from kernels.sample.slot_params import FILTERS, SlotParams
from kernels.sample.slot_rules import Changed
from kernels.sample.triton.bins import bins_kernel
from kernels.sample.triton.finish import finish_kernel
from kernels.sample.triton.gather import gather_kernel
from kernels.sample.triton.scores import scores_kernel
from kernels.sample.triton.stats import stats_kernel
from kernels.sizes import cdiv, next_power_of_2

# None of these sizes is measured yet.
CHUNK = 2048  # of a row, per program: 75 chunks for Qwen3's vocabulary, on 132 multiprocessors
NUM_PIVOTS = 16
PIVOT_TILE = 256  # tokens of a chunk compared with all pivots at a time
MAX_LISTED = 32768  # a larger bracket is searched in the row itself
BLOCK = 4096  # list elements at a time
NUM_WARPS = 4
NUM_FINISH_WARPS = 16


def sample_slots(
    logits: Tensor,
    adjusted: Tensor,
    params: SlotParams[Tensor],
    slots: Tensor,
    positions: Tensor,
    changed: Changed | None,
) -> Tensor:
    """As in ``slots.py``."""
    return _sample_rows(logits, adjusted, params, slots, positions, changed)[0]


def process_slots(
    logits: Tensor, params: SlotParams[Tensor], slots: Tensor, changed: Changed | None
) -> Tensor:
    """As in ``slots.py``."""
    positions = torch.zeros_like(slots, dtype=torch.int64)  # the sampled tokens are not used
    _, thresholds = _sample_rows(logits, logits, params, slots, positions, changed)
    scores = torch.empty_like(logits)
    num_rows, vocab_size = logits.shape
    if num_rows:
        grid = (num_rows, cdiv(vocab_size, CHUNK))
        scores_kernel[grid](
            logits,
            changed,
            slots,
            params.temperature,
            thresholds,
            scores,
            vocab_size,
            CHUNK=CHUNK,
            num_warps=NUM_WARPS,
        )
    return scores


def _sample_rows(
    logits: Tensor,
    adjusted: Tensor,
    params: SlotParams[Tensor],
    slots: Tensor,
    positions: Tensor,
    changed: Changed | None,
) -> tuple[Tensor, Tensor]:
    """Returns tokens [S] int64 and thresholds [S] float32."""
    if not all(each.is_contiguous() for each in (logits, adjusted, slots, positions)):
        raise ValueError("sample_slots takes contiguous tensors")
    num_rows, vocab_size = adjusted.shape
    num_chunks = cdiv(vocab_size, CHUNK)

    def new(width: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_rows, width, dtype=dtype, device=logits.device)

    tokens, thresholds = new(1, torch.int64)[:, 0], new(1, torch.float32)[:, 0]
    if not num_rows:
        return tokens, thresholds
    maxima, max_ids = new(num_chunks, torch.float32), new(num_chunks, torch.int32)
    minima, is_wrong = new(num_chunks, torch.float32), new(num_chunks, torch.int32)
    moments = tuple(new(num_chunks, torch.float32) for _ in range(3))
    best, best_ids = new(num_chunks, torch.float32), new(num_chunks, torch.int32)
    pivots, counts = new(NUM_PIVOTS, torch.float32), new(NUM_PIVOTS, torch.int32)
    masses, num_listed = new(NUM_PIVOTS, torch.int64), new(1, torch.int32)
    max_listed = min(MAX_LISTED, vocab_size)
    values, ids = new(max_listed, torch.float32), new(max_listed, torch.int32)
    grid = (num_rows, num_chunks)
    filters = tuple(getattr(params, name) for name in FILTERS)
    drawing = (slots, positions, filters, params.seeds, params.choices)
    bracket = (pivots, counts, masses)
    parts = {"CHUNKS": next_power_of_2(num_chunks), "PIVOTS": NUM_PIVOTS}
    stats_kernel[grid](
        *(logits, adjusted, changed, slots, filters, maxima, max_ids, minima, is_wrong, moments),
        *(counts, masses, num_listed),
        vocab_size,
        logits.shape[1],
        IS_ADJUSTED=adjusted is not logits or changed is not None,
        CHUNK=CHUNK,
        PIVOTS=NUM_PIVOTS,
        num_warps=NUM_WARPS,
    )
    bins_kernel[grid](
        *(adjusted, changed, slots, filters, maxima, minima, moments, *bracket),
        *(vocab_size, num_chunks),
        **parts,
        CHUNK=CHUNK,
        TILE=PIVOT_TILE,
        num_warps=NUM_WARPS,
    )
    gather_kernel[grid](
        *(adjusted, changed, *drawing, maxima, moments, *bracket, num_listed, values, ids),
        *(best, best_ids, thresholds, vocab_size, num_chunks),
        **parts,
        CHUNK=CHUNK,
        LISTED=max_listed,
        num_warps=NUM_WARPS,
    )
    finish_kernel[(num_rows,)](
        *(
            adjusted,
            changed,
            *drawing,
            maxima,
            max_ids,
            is_wrong,
            *bracket,
            values,
            ids,
            best,
            best_ids,
        ),
        *(thresholds, tokens, vocab_size, num_chunks),
        **parts,
        LISTED=max_listed,
        BLOCK=BLOCK,
        num_warps=NUM_FINISH_WARPS,
    )
    return tokens, thresholds
