"""The metrics of reading images."""

from prometheus_client import Counter, Histogram

READ_SECONDS = Histogram(
    "shoal_media_read_seconds",
    "From a file to its pixels, with the wait for a process",
    buckets=(0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20),
)
READER_DEATHS = Counter(
    "shoal_media_reader_deaths", "Processes that died of an image, or took too long for it"
)
CACHE_HITS = Counter("shoal_media_cache_hits", "Images whose pixels were known")
CACHE_MISSES = Counter("shoal_media_cache_misses", "Images whose file was read")
