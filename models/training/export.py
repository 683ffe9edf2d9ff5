"""Writes a trained run as a checkpoint folder for any loader of Qwen2-like models.

python -m models.training.export --run DIR --out models/shoal-tiny [--figures FILE]

Files are written to a folder next to the target and moved one by one, weights before their index,
so a reader never sees half a file.
"""

import argparse
import json
import os
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from models.training.card import write_card
from models.training.checkpoint import load_checkpoint
from models.training.model import ModelConfig, ShoalTiny
from models.training.tokenizer import END_OF_TEXT, TOKENIZER_FILES, TURN_END

MAX_SHARD_BYTES = 8 * 1024 * 1024
INDEX_FILE = "model.safetensors.index.json"


def model_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return config.json: the keys of Qwen2, and MiMo's count of MTP layers."""
    config = ModelConfig()
    return {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        **asdict(config),
        "hidden_act": "silu",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "rope_scaling": None,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": config.num_hidden_layers,
        "initializer_range": 0.02,
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": True,
        "use_cache": True,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "bos_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "eos_token_id": tokenizer.token_to_id(TURN_END),
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
    }


def generation_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return generation_config.json: a turn or a document may end the text."""
    return {
        "bos_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "eos_token_id": [tokenizer.token_to_id(name) for name in (TURN_END, END_OF_TEXT)],
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
    }


def split_shards(weights: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Fill shards in order, each up to `MAX_SHARD_BYTES`."""
    shards: list[dict[str, Tensor]] = []
    room_bytes = 0
    for name, tensor in weights.items():
        if tensor.nbytes > room_bytes:
            shards.append({})
            room_bytes = MAX_SHARD_BYTES
        shards[-1][name] = tensor
        room_bytes -= tensor.nbytes
    return shards


def write_weights(model: ShoalTiny, folder: Path) -> None:
    """Write the weights in bfloat16 and the index of their shards."""
    state = model.state_dict()
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in state.items()}
    shards = split_shards(weights)
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, str(folder / file_name), {"format": "pt"})
        (folder / file_name).chmod(0o644)  # safetensors makes them private
        weight_map.update(dict.fromkeys(shard, file_name))
    total_size = sum(tensor.nbytes for tensor in weights.values())
    write_json(
        folder / INDEX_FILE, {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    )


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write readable JSON."""
    path.write_text(json.dumps(content, indent=2) + "\n")


def move_into(folder: Path, target: Path) -> None:
    """Replace the target's files; the index goes last because it names the shards.

    Only shards of an earlier export are deleted from the target.
    """
    target.mkdir(parents=True, exist_ok=True)
    names = sorted(os.listdir(folder), key=lambda name: (name == INDEX_FILE, name))
    for name in names:
        os.replace(folder / name, target / name)
    for shard in target.glob("model-*-of-*.safetensors"):
        if shard.name not in names:
            shard.unlink()


def main() -> None:
    """Export the newest checkpoint of a run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder that train.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder to write")
    parser.add_argument("--figures", type=Path, help="JSON of evaluate.py, for the model card")
    args = parser.parse_args()
    model = ShoalTiny(ModelConfig())
    trunk = load_checkpoint(args.run, "trunk", model)
    mtp = load_checkpoint(args.run, "mtp", model)
    tokenizer = Tokenizer.from_file(str(args.run / "tokenizer.json"))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.out.parent, prefix=".export-") as name:
        folder = Path(name)
        write_weights(model, folder)
        write_json(folder / "config.json", model_config(tokenizer))
        write_json(folder / "generation_config.json", generation_config(tokenizer))
        for file_name in TOKENIZER_FILES:
            shutil.copyfile(args.run / file_name, folder / file_name)
        if args.figures:
            write_card(folder / "README.md", json.loads(args.figures.read_text()), trunk, mtp)
        move_into(folder, args.out)


if __name__ == "__main__":
    main()
