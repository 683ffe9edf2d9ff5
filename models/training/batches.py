"""Turns the corpus and the dialogues into endless training batches."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from models.training.corpus import Document
from models.training.dialogues import generate_dialogues
from models.training.tokenizer import END_OF_TEXT, encode_dialogue

DIALOGUE_SHARE = 0.65


@dataclass(frozen=True)
class Batch:
    """`ids` [B, T + 1]; `is_target` [B, T] marks the ids[:, 1:] with a loss."""

    ids: Tensor
    is_target: Tensor


def encode_corpus(tokenizer: Tokenizer, documents: list[Document]) -> NDArray[np.int64]:
    """Return all documents as one line of ids with an end-of-text token after each."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    encodings = tokenizer.encode_batch([document.text for document in documents])
    return np.array(list(chain.from_iterable([*e.ids, end] for e in encodings)), dtype=np.int64)


class BatchSource:
    """Draws rows of text and rows of packed dialogues; equal seeds give equal batches."""

    def __init__(
        self, tokenizer: Tokenizer, text_ids: NDArray[np.int64], words: list[str], seed: int
    ) -> None:
        self.tokenizer = tokenizer
        self.end = tokenizer.token_to_id(END_OF_TEXT)
        self.text_ids = text_ids
        self.rng = np.random.default_rng(seed)
        self.dialogues = self._encoded_dialogues(seed, words)
        self.starts: list[int] = []

    def _encoded_dialogues(
        self, seed: int, words: list[str]
    ) -> Iterator[tuple[list[int], list[bool]]]:
        for dialogue in generate_dialogues(seed, words):
            yield encode_dialogue(self.tokenizer, dialogue)

    def _text_row(self, length: int) -> NDArray[np.int64]:
        """Return the next window of a shuffled pass over the corpus."""
        if not self.starts:
            phase = int(self.rng.integers(length))
            starts = np.arange(phase, len(self.text_ids) - length, length)
            self.starts = self.rng.permutation(starts).tolist()
        start = min(self.starts.pop(), len(self.text_ids) - length - 1)
        return self.text_ids[start : start + length + 1]

    def _dialogue_row(self, length: int) -> tuple[list[int], list[bool]]:
        """Return whole dialogues from position 0 on; only the last one may be cut."""
        ids: list[int] = []
        is_target: list[bool] = []
        while len(ids) <= length:
            dialogue_ids, dialogue_is_target = next(self.dialogues)
            ids += [*dialogue_ids, self.end]
            is_target += [*dialogue_is_target, False]
        return ids[: length + 1], is_target[1 : length + 1]

    def next_batch(self, num_rows: int, length: int) -> Batch:
        """Return a batch of `num_rows` rows of `length` input positions."""
        ids = np.empty((num_rows, length + 1), dtype=np.int64)
        is_target = np.ones((num_rows, length), dtype=bool)
        for row in range(num_rows):
            if self.rng.random() < DIALOGUE_SHARE:
                ids[row], is_target[row] = self._dialogue_row(length)
            else:
                ids[row] = self._text_row(length)
        return Batch(torch.from_numpy(ids), torch.from_numpy(is_target))


def sample_texts(words: list[str], num_dialogues: int) -> list[str]:
    """Return dialogue contents for training the tokenizer."""
    dialogues = islice(generate_dialogues(0, words), num_dialogues)
    return [message.content for dialogue in dialogues for message in dialogue.messages]
