"""Parameters of the Messages API that are not built here; as in ``unsupported.py``, each is
accepted with null and with the values beside it, which change nothing."""

from services.gateway.chat.requests.unsupported import Neutral

NEUTRAL: Neutral = {
    "billing_policy": (),
    "compaction": (),
    "container": (),
    "fallback_credit_token": (),
    "fallbacks": ([],),
    "inference_geo": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
    "thread": (),
}
