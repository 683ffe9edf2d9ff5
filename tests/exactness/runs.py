"""The outputs of a column's cells, and their exactness."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from msgspec.structs import replace
from tokenizers import Tokenizer

from kernels.sample.reference import noise
from shared.errors import ConfigError
from shared.model_folder import TOKENIZER_FILE
from shared.wire.messages import ALL_TOKENS
from tests.exactness.cells import Cell
from tests.exactness.columns import Column
from tests.exactness.engines import ColumnEngines
from tests.exactness.mesh import Mesh, Output
from tests.exactness.outcome import Difference, difference
from tests.exactness.scenario import SPECULATION, Prompts, play
from tests.services.worker.speculation import BEGINNINGS

MAX_PROMPT_LEN = 72
# Longer than the interval between copies of states.
TARGET = 2 * (BEGINNINGS[1] + BEGINNINGS[2]) + BEGINNINGS[1]
OTHERS = [BEGINNINGS[number] for number in (3, 4, 5, 8, 11)]


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
        ids, params = request.prompt + self.output(cell.baseline).ids[:position], request.params
        one = replace(params, max_tokens=1, guide=None, logprobs=ALL_TOKENS, prompt_logprobs=None)
        with Mesh(self._engines["plain"], 1, caches_prefixes=False) as mesh:
            target = mesh.send(request._replace(prompt=ids, params=one))
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
    """The same texts in the tokens of each model."""
    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
    target, *others = (tokenizer.encode(text).ids[:MAX_PROMPT_LEN] for text in (TARGET, *OTHERS))
    return Prompts(target, others, temperature, adapters)
