"""Fields of several services, declared once, since ``ServeConfig`` inherits from all of them."""

from pydantic import Field

from shared.model_folder import EMBEDDED_MODEL

LISTEN_ADDRESS = Field(
    None,
    description="address for services on other machines, tcp://HOST or tcp://HOST:PORT; HOST is"
    " an address, an interface or * (default ports: tokenizer 5570, scheduler 5571 and 5572)",
)
SCHEDULER_ADDRESS: list[str] = Field(
    [],
    description="schedulers on other machines, tcp://HOST or tcp://HOST:PORT; every address of a"
    " name is dialled (default ports: 5571, workers 5572)",
)
MODEL = Field(
    str(EMBEDDED_MODEL),
    description="a Hugging Face folder, GGUF file, or org/name[@revision] in the Hugging Face"
    " cache; nothing is downloaded",
)
MAX_MODEL_LEN = Field(
    None, gt=0, description="longest prompt plus output, in tokens (default: the model's)"
)
MAX_OPEN_REQUESTS = Field(4096, gt=0, description="open requests; above it 429")
