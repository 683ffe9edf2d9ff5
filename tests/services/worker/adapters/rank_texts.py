"""A rank's texts with adapters; no module of transformers, which take ranks seconds."""

from typing import Any

import numpy as np
from msgspec.structs import replace

from services.worker.adapters.sites import layer_shapes
from tests.services.worker.adapters.made import (
    DIGESTS,
    PARAMS,
    adapters_of,
    make_adapter,
    texts_of,
)
from tests.services.worker.prompts import random_prompts
from tests.services.worker.ranks.rank_processes import Texts


def adapted_texts(engine: Any, num_steps: int) -> Texts:
    adapters = adapters_of(engine)
    shapes = layer_shapes(adapters.sites)
    for digest, rank, is_joined in zip(DIGESTS, (4, 16), (False, True), strict=False):
        # An expert's gates and ups are one layer or two.
        left_out = ("gate_proj", "up_proj") if is_joined else ("gate_up_proj",)
        own = {
            name: each
            for name, each in shapes.items()
            if ".experts." not in name or not name.endswith(tuple(f".{one}" for one in left_out))
        }
        adapters.table.add(make_adapter(own, digest, rank))
    digests = [DIGESTS[0], "", DIGESTS[1]]
    params = replace(PARAMS, max_tokens=6)
    options: dict[str, Any] = {"chunk_sizes": (5, 11), "num_steps": num_steps}
    found = texts_of(engine, random_prompts(4)[1:], digests, params, **options)
    return Texts([ids for ids, _ in found], np.concatenate([rows[:, 1:] for _, rows in found]))
