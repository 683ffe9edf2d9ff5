"""The architectures of an optional part."""

from collections.abc import Mapping
from typing import NamedTuple


class Families(NamedTuple):
    """``models``: the module of each architecture, which has a class of this name. ``views``: the
    module with a ``view`` of its texts' tensors by our names, where a checkpoint has others."""

    models: Mapping[str, str]
    views: Mapping[str, str] = {}
