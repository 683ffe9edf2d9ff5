"""The outputs of a column's cells, and their exactness."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from tokenizers import Tokenizer

from kernels.sample.reference import noise
from services.scheduler.sequence import Span
from shared.errors import ConfigError
from shared.media.families import read_family
from shared.media.family import Family, digest_of
from shared.model_folder import TOKENIZER_FILE
from shared.wire.messages import ALL_TOKENS, Item
from tests.exactness.cells import Cell
from tests.exactness.columns import Column
from tests.exactness.engines import ColumnEngines
from tests.exactness.mesh import Mesh, Output, Prompt
from tests.exactness.outcome import Difference, difference
from tests.exactness.scenario import SPECULATION, Prompts, play
from tests.media.pictures import picture
from tests.services.worker.speculation import BEGINNINGS

MAX_PROMPT_LEN = 72
# Longer than the interval between copies of states.
TARGET = 2 * (BEGINNINGS[1] + BEGINNINGS[2]) + BEGINNINGS[1]
OTHERS = [BEGINNINGS[number] for number in (3, 4, 5, 8, 11)]


class Picture(NamedTuple):
    """It stands before the id ``place`` of a prompt."""

    place: int
    seed: int
    width: int
    height: int


PICTURES: dict[str, list[Picture]] = {
    TARGET: [Picture(10, 1, 84, 56), Picture(58, 2, 112, 84)],
    OTHERS[1]: [Picture(4, 2, 112, 84)],
    OTHERS[2]: [Picture(0, 3, 56, 56), Picture(20, 4, 28, 140)],
}


@dataclass(frozen=True)
class Finding:
    """``refusal`` is the error of a refused cell, else None; ``difference`` None: same bits."""

    difference: Difference | None = None
    refusal: str | None = None


class Runs:
    """Plays the cells of ``column``, each once. Checkpoints are written to ``folders``."""

    def __init__(self, column: Column, folders: Path) -> None:
        self.column = column
        folder = column.model.folder(folders)
        self._engines = {each: ColumnEngines(column, each, folder, folders) for each in SPECULATION}
        adapters = self._engines["plain"].adapters
        self._prompts = prompts_of(folder, column.model.temperature, adapters)
        self._outputs: dict[Cell, Output] = {}

    def close(self) -> None:
        for each in self._engines.values():
            each.close()

    def finding(self, cell: Cell) -> Finding:
        """Compares with the baseline, and ids with logprobs also with the ids without."""
        try:
            output = self.output(cell)
        except ConfigError as error:
            return Finding(refusal=str(error))
        gap = partial(self._gap, cell)
        unscored = Output(output.ids, output.text, output.finish)
        plain = self.output(cell.baseline._replace(logprobs="none"))
        found = difference(output, self.output(cell.baseline), gap)
        return Finding(found or difference(unscored, plain, gap))

    def output(self, cell: Cell) -> Output:
        """Raises ConfigError where the column refuses the settings of ``cell``."""
        if cell not in self._outputs:
            self._outputs[cell] = play(cell, self._prompts, self._engines[cell.speculation])
        return self._outputs[cell]

    def scores(self, cell: Cell, position: int) -> np.ndarray:
        """Of all tokens at a position of the baseline's output, before a grammar hides any.

        A score is a logprob plus temperature times the noise of the position's random bits.
        """
        request = self._prompts.request(cell.baseline)
        ids = request.prompt.ids + self.output(cell.baseline).ids[:position]
        prompt, params = request.prompt._replace(ids=ids), request.params
        one = replace(params, max_tokens=1, guide=None, logprobs=ALL_TOKENS, prompt_logprobs=None)
        with Mesh(self._engines["plain"], 1, caches_prefixes=False) as mesh:
            target = mesh.send(request._replace(prompt=prompt, params=one))
            mesh.run_until(lambda: not target.is_open)
        (logprobs,) = target.output.scores.values[0][:, 1:]
        found: np.ndarray = logprobs + params.temperature * noise(
            len(logprobs), params.seed, len(ids), choice=0
        )
        return found

    def _gap(self, cell: Cell, position: int, token: int) -> float:
        scores = self.scores(cell, position)
        return float(abs(scores[self.output(cell.baseline).ids[position]] - scores[token]))


def prompts_of(folder: Path, temperature: float, adapters: tuple[str, ...]) -> Prompts:
    """The same texts in the tokens of each model, with images for a model that takes some."""
    tokenizer, family = Tokenizer.from_file(str(folder / TOKENIZER_FILE)), read_family(folder)
    prompts = []
    for text in (TARGET, *OTHERS):
        ids = tokenizer.encode(text).ids
        spans = [_insert(ids, each, family) for each in PICTURES.get(text, ())] if family else []
        prompts.append(Prompt(ids[:MAX_PROMPT_LEN], tuple(spans)))
    target, *others = prompts
    return Prompts(target, others, temperature, adapters)


def _insert(ids: list[int], where: Picture, family: Family) -> Span:
    """Adds the placeholders to ``ids``."""
    fit = family.fit(where.width, where.height, family.limits)
    size, num_tokens = fit.size, fit.num_tokens
    pixels = np.asarray(picture(where.seed, size[2], size[1])).reshape(-1)
    ids[where.place : where.place] = num_tokens * [family.placeholder]
    digest = digest_of("image", size, pixels.data, "")
    return Span(Item(start=where.place, num_tokens=num_tokens, size=size, digest=digest), pixels)
