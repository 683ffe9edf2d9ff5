"""Random adapters, requests for them, and checkpoints with one merged into the weights."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from benchmarks.harness.engines import make_engine
from services.worker.adapters.addition import Adapters
from services.worker.adapters.sites import LoadedAdapter, LowRank, Site, layer_shapes
from shared.model_folder import weight_files
from shared.wire.envelope import RequestOptions, write_options
from shared.wire.messages import ALL_TOKENS, Admit, SamplingParams
from tests.services.worker.driver import Driver, Job

DIGESTS = [f"{number:032x}" for number in range(1, 10)]
PARAMS = SamplingParams(seed=0, temperature=0.0, max_tokens=8, logprobs=ALL_TOKENS)


def make_adapter(
    shapes: dict[str, tuple[int, int]],
    digest: str,
    rank: int = 8,
    dtype: torch.dtype = torch.float32,
    strength: float = 0.3,
    keeps: Callable[[str], bool] = lambda name: True,
) -> LoadedAdapter:
    """Random changes of the layers whose names ``keeps`` accepts, as large as ``strength``."""
    generator = torch.Generator().manual_seed(int(digest, 16))
    layers = {}
    for name, (outputs, inputs) in shapes.items():
        a = torch.randn(rank, inputs, generator=generator) * strength / rank**0.5
        size = 1.0 if name.endswith("embed_tokens") else inputs**-0.5  # tables look up inputs
        b = torch.randn(outputs, rank, generator=generator) * size
        if keeps(name):
            layers[name] = LowRank(a.to(dtype), b.to(dtype))
    return LoadedAdapter(digest, rank, 0, layers)


def adapters_of(engine: Any) -> Adapters:
    (addition,) = engine.additions
    assert isinstance(addition, Adapters)
    return addition


def engine_with(
    folder: Path, kernels: str, adapters: Sequence[LoadedAdapter] = (), **settings: Any
) -> Any:
    engine = make_engine(folder, kernels, enable_lora=True, max_cpu_loras=1, **settings)
    for adapter in adapters:
        adapters_of(engine).table.add(adapter)
    return engine


def shapes_of(
    folder: Path, keeps: Callable[[Site], bool] = lambda site: site.is_common
) -> dict[str, tuple[int, int]]:
    sites = adapters_of(engine_with(folder, "torch")).sites
    return layer_shapes([site for site in sites if keeps(site)])


def merge(folder: Path, target: Path, adapter: LoadedAdapter) -> Path:
    """Every layer of ``adapter`` is one of the checkpoint."""
    shutil.copytree(folder, target)
    left = dict(adapter.layers)
    for file in weight_files(target):
        tensors = load_file(file)
        for name in tensors:
            if change := left.pop(name.removesuffix(".weight"), None):
                tensors[name] += change.b @ change.a
        save_file(tensors, file, {"format": "pt"})
    assert not left
    return target


@dataclass
class AdaptedJob(Job):
    adapter: str = ""


class AdaptedDriver(Driver):
    def _admit(self, slot: int, job: Job, tables: list[list[int]]) -> Admit:
        adapter = job.adapter if isinstance(job, AdaptedJob) else ""
        options = write_options(RequestOptions(adapter=adapter))
        return replace(super()._admit(slot, job, tables), options=options)


Text = tuple[list[int], np.ndarray]


def texts_of(
    engine: Any,
    prompts: Sequence[list[int]],
    digests: Sequence[str],
    params: SamplingParams = PARAMS,
    **options: Any,
) -> list[Text]:
    """The ids and logprobs [tokens, 1 + V] of each prompt, all at once."""
    jobs = [
        AdaptedJob(prompt, params, adapter=digest)
        for prompt, digest in zip(prompts, digests, strict=True)
    ]
    AdaptedDriver(engine, **options).run([*jobs])
    return [(job.emitted, np.stack(job.logprobs)) for job in jobs]
