"""Texts of models and servers at a terminal, which obeys what it is sent."""

LAYOUT = {"\n", "\t"}


def printable(text: str) -> str:
    """Has a ``�`` in place of characters that would do something else than be shown."""
    return "".join(each if each.isprintable() or each in LAYOUT else "�" for each in text)
