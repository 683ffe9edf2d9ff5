"""The formats that are known here."""

from shared.dialects.families.formats import FormatsOfFamilies
from shared.dialects.formats import Formats

FORMATS: tuple[type[Formats], ...] = (
    FormatsOfFamilies,
    Formats,
)
"""The first one is used."""
KNOWN = FORMATS[0]()
