"""The inputs of a step's rows, and the states that they write, as arrays of indices."""

import numpy as np

from kernels.delta.states import StateRows


class Places:
    """Places count through the ``width`` columns of each of R states, then all accepted drafts,
    then all T tokens. The inputs of a row are its accepted drafts and its tokens. If its state has
    seen the first one, the last column is that token's."""

    def __init__(self, rows: StateRows, width: int) -> None:
        num_rows, before = len(rows.states), np.cumsum(rows.num_kept)
        self.width = width
        self.num_seen = rows.num_seen
        self.num_kept = rows.num_kept
        self.firsts = rows.positions - rows.num_seen  # [R]: the positions of first inputs
        self.nums = rows.num_kept + np.diff(rows.starts)  # [R]: inputs
        self._kept = num_rows * width + before - rows.num_kept
        self._tokens = num_rows * width + self.num_kept.sum() + rows.starts[:-1]

    def of(self, row: np.ndarray, number: np.ndarray) -> np.ndarray:
        """The places of a row's inputs by number; its columns have negative ones."""
        columns = (row + 1) * self.width - self.num_seen[row] + number
        kept = np.where(number < 0, columns, self._kept[row] + number)
        tokens = self._tokens[row] + number - self.num_kept[row]
        found: np.ndarray = np.where(number < self.num_kept[row], kept, tokens)
        return found

    def columns(self, row: np.ndarray, num: np.ndarray) -> np.ndarray:
        """[len(row), width]: the places of a state's columns after ``num`` inputs."""
        return self.of(row[:, None], num[:, None] + np.arange(-self.width, 0))


class Order:
    """The I inputs of all rows: first inputs, then second inputs, and so on. The longest row comes
    first, so that rows with an n-th input are consecutive."""

    def __init__(self, places: Places) -> None:
        self.rows = np.argsort(-places.nums, kind="stable")  # [R]
        self.places = np.argsort(self.rows)  # [R]: of the rows in this order
        lengths = places.nums[self.rows]
        row, number = np.repeat(self.rows, lengths), ranges(np.zeros_like(lengths), lengths)
        by_number = np.argsort(number, kind="stable")
        row, number = row[by_number], number[by_number]
        self.nums = np.bincount(number)  # [most inputs]: rows with an n-th input
        steps = np.arange(1 - places.width, 1)
        self.seen = places.of(row[:, None], number[:, None] + steps)  # [I, width]
        self.is_seen = number < places.num_seen[row]  # [I]
        self.positions = places.firsts[row] + number  # [I]
        is_token = number >= places.num_kept[row]
        of_tokens = np.flatnonzero(is_token)
        self.tokens = of_tokens[np.argsort(self.seen[is_token, -1])]  # [T]: each token's input


class Writes:
    """The W states that rows write after some of their inputs: their own, and copies."""

    def __init__(self, rows: StateRows, places: Places) -> None:
        ends = places.nums - rows.num_drafts
        first = rows.positions - rows.num_seen
        last = (first + ends) // rows.interval * rows.interval - first
        copied = np.flatnonzero((last > rows.num_seen) & (rows.copies >= 0))
        self.rows = np.concatenate([np.arange(len(ends)), copied])  # [W]
        self.states = np.concatenate([rows.states, rows.copies[copied]])  # [W]
        self.num_inputs = np.concatenate([ends, last[copied]])  # [W]
        self.columns = places.columns(self.rows, self.num_inputs)  # [W, width]


def ranges(starts: np.ndarray, nums: np.ndarray) -> np.ndarray:
    """``nums`` numbers from each of ``starts`` on, one range after another."""
    before = np.cumsum(nums) - nums
    numbers: np.ndarray = np.repeat(starts - before, nums) + np.arange(nums.sum())
    return numbers
