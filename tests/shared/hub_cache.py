"""A Hugging Face cache as the hub's library leaves it on a disk."""

from collections.abc import Iterable
from pathlib import Path

from shared.model_folder import EMBEDDED_MODEL

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER_COMMIT = "fedcba9876543210fedcba9876543210fedcba98"


def add_model(
    cache: Path,
    name: str,
    revision: str = "main",
    commit: str = COMMIT,
    files: Iterable[Path] = (EMBEDDED_MODEL / "config.json",),
) -> Path:
    """Puts ``files`` there as the model ``name``; the folder of the snapshot, which holds links."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot, blobs = repository / "snapshots" / commit, repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir(exist_ok=True)
    for file in files:
        blob = blobs / f"blob-of-{file.name}"
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    ref = repository / "refs" / revision
    ref.parent.mkdir(parents=True, exist_ok=True)
    ref.write_text(commit)
    return snapshot
