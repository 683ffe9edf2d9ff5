"""The models of the Hugging Face cache, and the sizes of models."""

from pathlib import Path

from shared.model_location import FORMATS, ModelLocation

WEIGHTS = "*.safetensors", *(f"*{end}" for end in FORMATS)


def cached_models() -> list[ModelLocation]:
    """The models in the Hugging Face cache, by name: the snapshot of ``main``, or the newest."""
    from huggingface_hub import constants

    found = []
    for repository in sorted(Path(constants.HF_HUB_CACHE).glob("models--*")):
        snapshots = sorted(
            (repository / "snapshots").glob("*"), key=lambda each: each.stat().st_mtime
        )
        if not snapshots:
            continue
        main = repository / "refs" / "main"
        wanted = repository / "snapshots" / (main.read_text().strip() if main.is_file() else "")
        name = repository.name.removeprefix("models--").replace("--", "/")
        found.append(ModelLocation(name, wanted if wanted in snapshots else snapshots[-1]))
    return found


def weights_bytes(folder: Path) -> int:
    """Size of the weights, following links."""
    files = (file for pattern in WEIGHTS for file in folder.glob(pattern))
    return sum(file.stat().st_size for file in files if file.exists())
