"""The release; the package's metadata use it."""

VERSION = "0.1.0"
