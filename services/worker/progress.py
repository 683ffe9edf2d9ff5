"""How loading tells how far it is."""

from collections.abc import Callable

Progress = Callable[[str, float], None]  # what is being done, the share that is done (0 to 1)
