"""What ends a whole batch, and not one line of it."""

from shared.errors import ShoalError


class BatchStopped(ShoalError):
    """It ends early; what has been written stays, and a new start goes on from there."""


class ServerLost(BatchStopped):
    """The server did not answer for so long that it will not come back by itself."""


class KeyRefused(BatchStopped):
    """The server does not take the API key, of this line or of any other."""


class NotWritten(BatchStopped):
    """A result could not be written: the text names the file, and why."""


class WrongResults(ShoalError):
    """A file of results that is not one of this batch, or that another process writes."""


class NoReply(ShoalError):
    """One request gets no reply of a server that answers others."""
