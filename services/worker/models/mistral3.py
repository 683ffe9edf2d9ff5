"""Mistral 3 (Mistral Small 3.1): the text part, a Mistral."""

from services.worker.models.mistral import MistralForCausalLM


class Mistral3ForConditionalGeneration(MistralForCausalLM):
    class Config(MistralForCausalLM.Config, frozen=True):
        model_type: str = "mistral"

        def problems(self) -> list[str]:
            problems = super().problems()
            if self.model_type != "mistral":
                problems.append(
                    f"a text_config of the model_type {self.model_type!r} is not supported; only"
                    " 'mistral' is"
                )
            return problems

    config: Config
