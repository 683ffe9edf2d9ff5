"""HTTPS, where there is a certificate."""

import ssl

from shared.errors import ConfigError
from shared.settings.gateway import GatewayConfig


def tls_context(config: GatewayConfig) -> ssl.SSLContext | None:
    """None without a certificate. Raises ConfigError for files that are none, or no pair."""
    certificate, key = config.ssl_certfile, config.ssl_keyfile
    if certificate is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # A server in the background cannot ask for a password.
        context.load_cert_chain(certificate, key, password=lambda: b"")
    except OSError as error:  # ssl.SSLError is one
        files = certificate if key is None else f"{certificate}, {key}"
        text = error.strerror if error.strerror and error.filename is None else str(error)
        raise ConfigError(f"ssl-certfile, ssl-keyfile: {files}: {text}") from None
    return context
