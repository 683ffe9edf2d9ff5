"""The text of the embedded model: CPython's own library and its language reference.

Every Python machine has both, so anyone can rebuild the model without a download. The sources carry
their documentation in docstrings; `pydoc_data.topics` is the reference manual as text.
"""

import hashlib
import re
import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "lib2to3", "__pycache__", "pydoc_data"}
    | {"ensurepip", "lib-dynload", "turtledemo", "encodings"}
)
HELD_OUT_PERCENT = 3


@dataclass(frozen=True)
class Document:
    """One text, with the name that decides if it is held out."""

    name: str
    text: str


def stable_hash(text: str) -> int:
    """Return 32 bits that are the same in every process, unlike `hash`."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def is_held_out(document: Document) -> bool:
    """Say whether a whole document is kept away from training."""
    return stable_hash(document.name) % 100 < HELD_OUT_PERCENT


def library_documents(root: Path) -> list[Document]:
    """Return the library's sources in name order, without tests and generated tables."""
    documents = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        is_skipped = not SKIPPED_FOLDERS.isdisjoint(relative.parts)
        if is_skipped or relative.name.startswith("_sysconfigdata"):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore").strip()
        if text:
            documents.append(Document(relative.as_posix(), text))
    return documents


def reference_documents() -> list[Document]:
    """Return the chapters of the language reference that ship with pydoc."""
    return [Document(f"topics/{name}", text.strip()) for name, text in sorted(topics.items())]


def load_documents() -> list[Document]:
    """Return the whole corpus of the running interpreter."""
    return library_documents(Path(sysconfig.get_paths()["stdlib"])) + reference_documents()


def split_documents(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """Return (training, held-out) documents."""
    training = [document for document in documents if not is_held_out(document)]
    return training, [document for document in documents if is_held_out(document)]


def common_words(documents: list[Document], count: int = 150) -> list[str]:
    """Return the most frequent lower-case words of 3 to 8 letters, in alphabetical order."""
    words: Counter[str] = Counter()
    for document in documents:
        words.update(re.findall(r"(?<![\w'])[a-z]{3,8}(?![\w'])", document.text))
    ranked = sorted(words, key=lambda word: (-words[word], word))
    return sorted(ranked[:count])
