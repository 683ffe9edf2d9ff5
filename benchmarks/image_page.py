"""The first token of a page by a server and by transformers, in turns, with the same weights.

The page has 1000 × 1400 pixels, 1,800 tokens. The model has the widths of PaddleOCR-VL (0.9B), by
default a third of its layers in the tower and in the text model, a smaller vocabulary, and random
weights. Both compute with all cores; a second server leaves one idle while it encodes, as by
default.
"""

import argparse
import io
import json
from contextlib import AsyncExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

import aiohttp
import torch
import uvloop
from PIL import Image
from transformers import (
    PaddleOCRVLConfig,
    PaddleOCRVLForConditionalGeneration,
    PreTrainedTokenizerFast,
)
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
    PaddleOCRVLImageProcessorPil,
)

from benchmarks import servers
from benchmarks.checkpoints import FOLDER, save_tokenizer
from benchmarks.image_checkpoint import MARKS, TEMPLATE, Pictures, url_of
from benchmarks.images import CHAT, body_of
from benchmarks.report import spread, write
from shared.process.cores import num_cores

WIDTH, HEIGHT = 1000, 1400
PATCHES_OF_TOKEN = 4
LAYERS = 27, 18  # of the tower, and of the text model
ROTATIONS = {"rope_type": "default", "rope_theta": 500_000.0, "mrope_section": [16, 24, 24]}
TEXT = {"vocab_size": 4096, "eos_token_id": 0, "rope_parameters": ROTATIONS}
IDS = "image_token_id", "video_token_id"
AREAS = {"shortest_edge": 147_384, "longest_edge": 2_822_400}
FLAGS = ["--max-body-bytes", str(32 << 20), "--served-model-name", "images"]
FLAGS += ["--max-model-len", "4096", "--max-num-seqs", "4"]
JSON = {"Content-Type": "application/json"}


def checkpoint(share: float) -> Path:
    """The folder, with a ``share`` of the layers; writes it if missing."""
    tower, text = (max(1, round(num * share)) for num in LAYERS)
    folder = FOLDER / f"page-{tower}-{text}"
    if not (folder / "model.safetensors").exists():  # written last
        tokenizer: Any = save_tokenizer(folder, 4096, MARKS, TEMPLATE)
        PaddleOCRVLImageProcessorPil(size=AREAS).save_pretrained(folder)
        names = "vision_start_token_id", "vision_end_token_id", *IDS
        ids: Any = dict(zip(names, tokenizer.convert_tokens_to_ids([*MARKS]), strict=True))
        config = PaddleOCRVLConfig(
            text_config=TEXT | {"num_hidden_layers": text},
            vision_config={"num_hidden_layers": tower},
            **ids,
        )
        torch.manual_seed(0)
        model: Any = PaddleOCRVLForConditionalGeneration(config)
        model.to(torch.bfloat16).save_pretrained(folder)
    return folder


class Peer:
    """transformers on all cores."""

    def __init__(self, folder: Path, dtype: str) -> None:
        torch.set_num_threads(num_cores())
        load: Any = PaddleOCRVLForConditionalGeneration.from_pretrained
        self._model = load(folder, dtype=getattr(torch, dtype)).eval()
        self._images = PaddleOCRVLImageProcessorPil.from_pretrained(folder)
        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)

    def first_token(self, png: bytes) -> str:
        parts = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
        chat = [{"role": "user", "content": parts}]
        text: Any = self._tokenizer.apply_chat_template(chat, tokenize=False)
        image = Image.open(io.BytesIO(png)).convert("RGB")
        given = dict(self._images(images=[image], return_tensors="pt"))
        num = int(given["image_grid_thw"].prod()) // PATCHES_OF_TOKEN
        ids = self._tokenizer(text.replace(MARKS[2], MARKS[2] * num), return_tensors="pt").input_ids
        kinds = (ids == self._model.config.image_token_id).int()
        with torch.inference_mode():
            found = self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                mm_token_type_ids=kinds,
                **given,
                do_sample=False,
                max_new_tokens=1,
            )
        token: str = self._tokenizer.decode(found[0, ids.shape[1] :])
        return token


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    folder = checkpoint(arguments.share)
    found: dict[str, Any] = {"layers of the tower and the text": folder.name.split("-")[1:]}
    for dtype in arguments.dtypes:
        found[dtype] = await in_turns(folder, dtype, arguments.rounds)
        print(json.dumps(found), flush=True)
    return found


async def in_turns(folder: Path, dtype: str, rounds: int) -> dict[str, Any]:
    """Seconds after a warm-up, and how often all gave the same token."""
    peer = Peer(folder, dtype)
    pictures = Pictures(HEIGHT, noise=40, width=WIDTH)
    runs: dict[str, list[float]] = {}
    num_same = 0
    async with AsyncExitStack() as stack:
        urls = {}
        for name, flags in (
            ("server", ["--num-threads", str(num_cores())]),
            ("server, a core less in the tower", []),
        ):
            server = servers.shoal(folder, *FLAGS, *flags, "--dtype", dtype, name=name)
            urls[name] = await stack.enter_async_context(servers.running(server))
        timeout = aiohttp.ClientTimeout(total=None)
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        for _ in range(rounds + 1):
            png = pictures.next_png()
            body = body_of(url_of(png))
            tokens = []
            for name, url in urls.items():
                started_s = perf_counter()
                async with session.post(url + CHAT, data=body, headers=JSON) as response:
                    answer = await response.json()
                runs.setdefault(name, []).append(perf_counter() - started_s)
                tokens.append(answer["choices"][0]["message"]["content"])
            started_s = perf_counter()
            tokens.append(peer.first_token(png))
            runs.setdefault("transformers", []).append(perf_counter() - started_s)
            num_same += len({*tokens}) == 1
    return {name: spread(each[1:]) for name, each in runs.items()} | {"same token": num_same}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--share", type=float, default=1 / 3, help="of the layers")
    parser.add_argument("--rounds", type=int, default=3)
    write("image_page", uvloop.run(measure(parser.parse_args())))
