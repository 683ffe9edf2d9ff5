"""A real tokenizer with a watched event loop: ``python -m tests.hostile.watched_tokenizer``."""

import asyncio

from services.tokenizer.service import TokenizerService
from shared.process.service import main
from shared.settings.tokenizer import TokenizerConfig
from tests.hostile.watched import watch


class WatchedTokenizer(TokenizerService):
    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(watch("tokenizer"))
            await super().run()


if __name__ == "__main__":
    main("tokenizer", TokenizerConfig, WatchedTokenizer)
