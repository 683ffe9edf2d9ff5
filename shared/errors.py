"""The errors of Shoal.

ShoalError
├── ConfigError                a setting is wrong: the service ends with exit code 2
├── LostError                  a service lost a resource it needs: it ends with exit code 1
├── CodecError                 a frame is not a valid message, or too large for one
└── RequestError               one request fails, and no other
    ├── InvalidRequest         400
    ├── Unauthorized           401
    ├── NotFound               404
    ├── BodyTooLarge           413
    ├── Overloaded             429, with the seconds to wait
    ├── InternalError          500
    ├── StoreFailed            507
    └── Unavailable            503, with the seconds to wait
"""

import os

from shared.text.surrogates import without_halves
from shared.wire.messages import MAX_NAME_CHARS, Failed

MAX_MESSAGE_CHARS = 2000  # a message may quote the client, and travels in a header
RETRY_AFTER_S = 2.0  # without a better estimate
# Codes of a loss at a tokenizer or its scheduler, before the gateways know of it.
NO_SCHEDULER = "no_scheduler"
NO_WORKER = "no_worker"
ADAPTER_LOST = "adapter_lost"  # no service that can be asked has the adapter of a request

# Codes of requests that services died of: a retry would kill more of them.
WORKER_DIED = "worker_died"
TOO_MANY_REPLAYS = "too_many_replays"
QUARANTINED = "quarantined"
DEADLY = {WORKER_DIED, TOO_MANY_REPLAYS, QUARANTINED}

# The reply cannot be stored: a retry would cost as much, with the same result.
STORE_FAILED = "response_store_failed"

# Codes of errors found by a worker.
NO_TOKEN_ALLOWED = "no_token_allowed"
GRAMMAR_TOO_COMPLEX = "grammar_too_complex"


def text_of_fault(error: Exception) -> str:
    """The reason why a server cannot be reached; its caller names the server."""
    failure = getattr(error, "os_error", None)  # of an aiohttp.ClientConnectorError
    if isinstance(failure, OSError):
        number = failure.errno or 0  # below 0 for a name that is not found
        return os.strerror(number) if number > 0 else str(failure.strerror)
    return str(error) or type(error).__name__


class ShoalError(Exception):
    """Base of all deliberate errors of Shoal."""


class ConfigError(ShoalError):
    """A setting is wrong. The text names the setting, its value and the allowed values."""


class LostError(ShoalError):
    """A service lost a resource it cannot work without or restore."""


class CodecError(ShoalError):
    """Bytes are not a valid message, or a message exceeds a limit of the wire."""


class RequestError(ShoalError):
    """One request ends with an HTTP status and OpenAI's error object.

    ``message`` names the field, the value and the limit; ``param`` is the field, ``code`` a stable
    word for programs, ``retry_after_s`` the seconds before a retry makes sense.
    """

    status = 500
    type = "internal_error"
    code = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.code
        self.retry_after_s = retry_after_s

    def to_failed(self, request: str, attempt: int) -> Failed:
        """A message can hold no half of a surrogate pair, which a chat template may write."""
        return Failed(
            request=request,
            attempt=attempt,
            status=self.status,
            error_type=self.type,
            code=self.code,
            message=without_halves(self.message[:MAX_MESSAGE_CHARS]),
            param=self.param and self.param[:MAX_NAME_CHARS],
            retry_after_s=self.retry_after_s,
        )

    @staticmethod
    def from_failed(failed: Failed) -> "RequestError":
        error = RequestError(
            failed.message, param=failed.param, code=failed.code, retry_after_s=failed.retry_after_s
        )
        error.status, error.type = failed.status, failed.error_type
        return error


class InvalidRequest(RequestError):
    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class Unauthorized(RequestError):
    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class NotFound(RequestError):
    status = 404
    type = "invalid_request_error"
    code = "not_found"


class BodyTooLarge(RequestError):
    status = 413
    type = "invalid_request_error"
    code = "body_too_large"


class Overloaded(RequestError):
    status = 429
    type = "rate_limit_error"
    code = "overloaded"


class InternalError(RequestError):
    pass


class StoreFailed(RequestError):
    status = 507
    type = "insufficient_storage"
    code = STORE_FAILED


class Unavailable(RequestError):
    status = 503
    type = "service_unavailable"
    code = "unavailable"
