"""Libraries that forked processes of tests find imported: one list, since pytest collects all files
before a test starts, and the last list that a file sets would be that of every test."""

PRELOADED = [  # no module of a service: each registers the metrics of its own process
    "aiohttp.web",
    "llguidance",
    "orjson",
    "pydantic_settings",
    "shared.process.service",
    "tokenizers",
    "torch",
    "transformers.modeling_utils",
]
