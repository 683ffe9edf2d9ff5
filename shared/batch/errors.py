"""Errors that end a whole batch instead of one line."""

from shared.errors import ShoalError


class BatchStopped(ShoalError):
    """The batch ends early; written results stay, and a new start resumes from there."""


class ServerLost(BatchStopped):
    """The server did not answer for too long to come back by itself."""


class KeyRefused(BatchStopped):
    """The server refuses the API key for all lines."""


class NotWritten(BatchStopped):
    """A result could not be written; the text names the file and the reason."""


class WrongResults(ShoalError):
    """The file of results belongs to another batch, or another process writes it."""


class NoReply(ShoalError):
    """The server does not reply to one request, but to others."""
