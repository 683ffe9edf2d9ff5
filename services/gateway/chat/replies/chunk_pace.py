"""The interval of a stream's chunks. Pure."""

from services.gateway.mesh.output_collector import ChoiceUpdate, merged


class ChunkPace:
    """Holds back updates of a choice until they have ``num_tokens``. Updates up to the first text,
    and the end, are never held."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._held: dict[int, list[ChoiceUpdate]] = {}  # of choices with text
        self._nums_held: dict[int, int] = {}  # their tokens

    def push(self, update: ChoiceUpdate) -> ChoiceUpdate | None:
        """Returns the choice's update to send now."""
        if self._num_tokens == 1 or update.of_prompt:
            return update
        index = update.index
        if index not in self._held:
            if update.text:
                self._held[index], self._nums_held[index] = [], 0
            return update
        self._held[index].append(update)
        self._nums_held[index] += update.num_tokens
        if update.finished is None and self._nums_held[index] < self._num_tokens:
            return None
        due = merged(self._held[index])
        self._held[index], self._nums_held[index] = [], 0
        return due

    def rest(self) -> list[ChoiceUpdate]:
        """Returns the held updates of all choices, once no more will come."""
        return [merged(held) for held in self._held.values() if held]
