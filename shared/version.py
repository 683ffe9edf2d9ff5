"""Which release this is; the package's metadata are made from it."""

VERSION = "2026.11.0"
