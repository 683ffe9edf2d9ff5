"""ERNIE-4.5-VL as published, served by the flags of its published deployment."""

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.serving import serving
from tests.media.checkpoints import publish_ernie, save_checkpoint
from tests.media.pictures import picture, png
from tests.services.worker.checkpoints import change_config

FLAGS = [
    *("--metrics-port", "0", "--engine-worker-queue-port", "0"),
    *("--tensor-parallel-size", "2"),  # instead of 8: there are fewer cores
    *("--max-model-len", "131072", "--max-num-seqs", "16", "--max-num-batched-tokens", "384"),
    *("--limit-mm-per-prompt", '{"image": 100, "video": 100}'),
    *("--reasoning-parser", "ernie-45-vl", "--gpu-memory-utilization", "0.85"),
    *("--quantization", "wint4", "--served-model-name", "ernie"),
]
WHOLE_GROUPS: dict[str, Any] = {
    "intermediate_size": 128,
    "moe_intermediate_size": [128, 64],
}  # on both ranks
NUM_PARTS = 100
MIN_TOKENS = 4  # of an image or a video
SMALL = {"min_pixels": 56 * 56, "max_pixels": 56 * 84}  # frames have 299 tokens or more else

pytestmark = [pytest.mark.slow, pytest.mark.asyncio]


def encoded(seed: int) -> str:
    return base64.b64encode(png(picture(seed, 40 + seed, 60))).decode()


def image(seed: int) -> Any:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded(seed)}"}}


def video(seed: int) -> Any:
    """Three frames."""
    frames = ",".join([encoded(seed)] * 3)
    return {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{frames}"}}


async def test_a_hundred_images_or_videos_in_one_prompt(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "transformers", family="ernie4.5-vl", **WHOLE_GROUPS)
    publish_ernie(tmp_path / "transformers", tmp_path / "ernie")
    change_config(tmp_path / "ernie", max_position_embeddings=131072)
    (tmp_path / "mesh").mkdir(mode=0o700)
    model = "--model", str(tmp_path / "ernie")
    async with serving(tmp_path / "mesh", *model, *FLAGS) as shoal, shoal.client() as client:

        async def ask(part: Callable[[int], Any], first: int) -> Any:
            """Its message: it reasons."""
            content = [part(seed) for seed in range(first, first + NUM_PARTS)]
            answer = await client.chat.completions.create(
                model="ernie",
                messages=[{"role": "user", "content": [*content, {"type": "text", "text": "?"}]}],
                max_tokens=12,
                temperature=0,
                extra_body={"ignore_eos": True, "mm_processor_kwargs": SMALL},
            )
            assert answer.usage is not None
            assert answer.usage.prompt_tokens > NUM_PARTS * MIN_TOKENS
            return answer.choices[0].message.model_dump()

        await shoal.until_ready()
        for part in (image, video):
            texts = [await ask(part, first) for first in (0, 0, 1)]
            assert texts[0] == texts[1] != texts[2]
