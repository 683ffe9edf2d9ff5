"""The errors of Shoal.

ShoalError
├── ConfigError                a setting is wrong: the service ends with exit code 2
├── LostError                  what a service needs is gone: it ends with exit code 1
├── CodecError                 a frame that is not a message of ours, or too large to become one
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

from shared.wire.messages import MAX_NAME_CHARS, Failed

MAX_MESSAGE_CHARS = 2000  # clients' words may be part of a message; it travels in a header
RETRY_AFTER_S = 2.0  # where no better estimate is known
# Codes of what a tokenizer had lost, or its scheduler, before the gateways knew.
NO_SCHEDULER = "no_scheduler"
NO_WORKER = "no_worker"

# Codes of requests that services died of: to try one again would take more of them.
WORKER_DIED = "worker_died"
TOO_MANY_REPLAYS = "too_many_replays"
QUARANTINED = "quarantined"
DEADLY = {WORKER_DIED, TOO_MANY_REPLAYS, QUARANTINED}

# Of a reply that was made and cannot be kept: to make it again would cost as much, and help nobody.
STORE_FAILED = "response_store_failed"

# Codes of what a worker finds out of a request.
NO_TOKEN_ALLOWED = "no_token_allowed"
GRAMMAR_TOO_COMPLEX = "grammar_too_complex"


class ShoalError(Exception):
    """Base of everything Shoal raises on purpose."""


class ConfigError(ShoalError):
    """A setting is wrong. The text names the setting, its value and what is allowed."""


class LostError(ShoalError):
    """What a service cannot go on without is gone, which it can do nothing about."""


class CodecError(ShoalError):
    """Bytes that are no message of ours, or a message that breaks a limit of the wire."""


class RequestError(ShoalError):
    """One request ends with an HTTP status and OpenAI's error object.

    ``message`` names the field, the value and the limit; ``param`` is the field, ``code`` a stable
    word for programs, ``retry_after_s`` the seconds after which a new try makes sense.
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
        return Failed(
            request=request,
            attempt=attempt,
            status=self.status,
            error_type=self.type,
            code=self.code,
            message=self.message[:MAX_MESSAGE_CHARS],
            param=self.param and self.param[:MAX_NAME_CHARS],
            retry_after_s=self.retry_after_s,
        )

    @staticmethod
    def from_failed(failed: Failed) -> "RequestError":
        error = RequestError(
            failed.message,
            param=failed.param,
            code=failed.code,
            retry_after_s=failed.retry_after_s,
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
