"""Makes texts of models and servers safe for a terminal."""

LAYOUT = {"\n", "\t"}


def printable(text: str) -> str:
    """Replaces control characters by ``�``."""
    return "".join(each if each.isprintable() or each in LAYOUT else "�" for each in text)
