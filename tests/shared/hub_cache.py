"""A Hugging Face cache in the layout of the hub's library."""

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
    """Stores ``files`` as the model ``name``; returns the snapshot's folder, which holds links."""
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
