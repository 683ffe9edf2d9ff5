"""Logging: one line an event, time in UTC; strings that clients chose are cut and escaped."""

import logging
import sys
import time

MAX_CLIENT_TEXT = 80


def set_up(service: str, instance: str, level: str) -> None:
    formatter = logging.Formatter(
        f"%(asctime)s %(levelname)-7s {service} {instance} %(message)s", "%Y-%m-%dT%H:%M:%SZ"
    )
    formatter.converter = time.gmtime
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def client_text(text: str) -> str:
    """``text`` safe for one line of a log."""
    return ascii(text if len(text) <= MAX_CLIENT_TEXT else text[:MAX_CLIENT_TEXT] + "…")
