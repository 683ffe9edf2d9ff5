"""transformers on the same GPU with the same shape: its continuous batching if it runs, else
``generate`` with a static cache. Times are from token to token and exclude start-up."""

import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from benchmarks.gpu.suite import Suite
from services.worker.startup.loaded_model import DEFAULT_BATCHED_TOKENS

PAGE = 256  # tokens, transformers' default
SEED = 0


class Peer:
    """A model with random weights."""

    def __init__(self, suite: Suite, folder: Path) -> None:
        self._suite = suite
        config = AutoConfig.from_pretrained(folder)
        with suite.device:
            model = AutoModelForCausalLM.from_config(
                config, dtype=suite.dtype, attn_implementation="sdpa"
            )
        self._model: Any = model.eval()

    def measure(self, num_rows: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(SEED)
        shape = (num_rows, self._suite.prompt_len)
        prompts = torch.randint(self._model.config.vocab_size, shape, generator=generator)
        found: dict[str, Any] = {"num_rows": num_rows}
        for name, run in (("continuous batching", self._continuous), ("static", self._static)):
            try:
                step_s = run(prompts)
            except Exception as error:
                found[f"{name} failed"] = f"{type(error).__name__}: {error}"[:300]
                continue
            rate = {"wall_ms": step_s * 1e3, "decode_tokens_per_s": num_rows / step_s}
            return found | {"how": name} | rate
        return found

    def _continuous(self, prompts: torch.Tensor) -> float:
        """Seconds per step."""
        from transformers import ContinuousBatchingConfig

        num_pages = len(prompts) * (-(-self._suite.max_model_len // PAGE) + 1)
        outputs = self._model.generate_batch(
            prompts.tolist(),
            generation_config=self._config(self._suite.output_len),
            continuous_batching_config=ContinuousBatchingConfig(
                num_blocks=num_pages,
                max_batch_tokens=DEFAULT_BATCHED_TOKENS[self._suite.device.type],
            ),
            record_timestamps=True,
        )
        if len(outputs) < len(prompts):
            raise RuntimeError(f"{len(outputs)} of {len(prompts)} requests were answered")
        return median(_between(each.timestamps) for each in outputs.values())

    def _static(self, prompts: torch.Tensor) -> float:
        """Seconds per step; the prompts' time is subtracted."""
        self._model.set_attn_implementation("sdpa")  # continuous batching changes it
        few, many = 2, self._suite.output_len
        for _ in range(2):  # the first run has one-time costs
            times_s = [self._generate(prompts, num) for num in (few, many)]
        return (times_s[1] - times_s[0]) / (many - few)

    def _generate(self, prompts: torch.Tensor, num_tokens: int) -> float:
        ids = prompts.to(self._suite.device)
        config = self._config(num_tokens)
        config.cache_implementation, config.disable_compile = "static", True
        started_s = time.perf_counter()
        self._model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        if self._suite.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started_s

    def _config(self, num_tokens: int) -> GenerationConfig:
        return GenerationConfig(
            max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False, pad_token_id=0
        )


def _between(timestamps: Sequence[float]) -> float:
    """The median time from one token of a request to the next."""
    return median(b - a for a, b in pairwise(timestamps))
