"""The KV blocks of one worker: who is free, nothing else."""


class BlockPool:
    """Hands out ids of ``num_blocks`` blocks; the last one given back is the first one taken."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._is_free = bytearray(b"\x01" * num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def try_take(self, num: int) -> list[int] | None:
        """``num`` blocks, or None and nothing taken when there are fewer."""
        if num > len(self._free):
            return None
        start = len(self._free) - num
        taken = self._free[start:][::-1]
        del self._free[start:]
        for block in taken:
            self._is_free[block] = 0
        return taken

    def give_back(self, blocks: list[int]) -> None:
        """Raises ValueError for a block that is free already: two sequences would share it."""
        for block in reversed(blocks):
            if self._is_free[block]:
                raise ValueError(f"block {block} was given back twice")
            self._is_free[block] = 1
            self._free.append(block)
