"""Texts of prompts repeated in a reply, and the places of their tokens."""

from services.gateway.chat.serving import accepting
from services.gateway.mesh.job import Job, Prompt
from services.gateway.mesh.mesh import Mesh
from shared.text.utf8 import MAX_CHAR_BYTES, num_half_bytes
from shared.wire.codec import Array
from shared.wire.messages import ConvertedTo


class PromptTexts:
    """Asks the mesh; each call raises Unavailable after ``timeout_s``."""

    def __init__(self, mesh: Mesh, timeout_s: float) -> None:
        self._mesh = mesh
        self._timeout_s = timeout_s

    async def echoes(self, job: Job) -> list[str]:
        """The texts in front of each choice."""
        async with accepting(self._timeout_s):
            return [await self._echo(job.options.owner, prompt) for prompt in job.prompts]

    async def shown(self, job: Job) -> tuple[list[Array], list[Array | None]]:
        """Returns texts of prompts in UTF-8 and places of their tokens, each if the client asked.
        The places of a prompt of ids are None."""
        texts = [prompt for prompt in job.prompts if job.returns_prompt_text]
        located = [prompt for prompt in job.prompts if job.returns_offsets]
        async with accepting(self._timeout_s):
            encoded = [await self._converted(job, prompt, "text") for prompt in texts]
            offsets = [
                None if prompt.kind == "ids" else await self._converted(job, prompt, "offsets")
                for prompt in located
            ]
        return encoded, offsets

    async def _converted(self, job: Job, prompt: Prompt, to: ConvertedTo) -> Array:
        text = job.text
        return await self._mesh.conversions.convert(
            *(job.options.owner, prompt, text.adds_special_tokens, job.chat, to),
            *(text.max_prompt_tokens, text.keeps_prompt_start),
        )

    async def _echo(self, owner: str, prompt: Prompt) -> str:
        if prompt.kind == "ids":
            return await self._echo_of_ids(owner, prompt.data)
        return prompt.data.tobytes().decode()

    async def _echo_of_ids(self, owner: str, ids: Array) -> str:
        """An incomplete character at the end of a prompt is left out: the generated text may
        complete it."""
        written = self._mesh.tokens.written
        num_half = num_half_bytes(b"".join(map(written, ids[-MAX_CHAR_BYTES:].tolist())))
        while num_half and (num_bytes := len(written(int(ids[-1])))) <= num_half:
            ids, num_half = ids[:-1], num_half - num_bytes
        if not len(ids):
            return ""
        data = await self._mesh.conversions.convert(owner, Prompt("ids", ids), False, to="text")
        text = data.tobytes().decode()
        return text.rstrip("\N{REPLACEMENT CHARACTER}") if num_half else text
