"""How many drafts a worker makes of each sequence."""

from shared.messages import Capacity, StepPlan, StepResult


class DraftDepth:
    """``now`` is the depth for the plan that is made next."""

    def __init__(self, capacity: Capacity) -> None:
        self.now = capacity.num_speculative_tokens

    def note(self, plan: StepPlan, result: StepResult) -> None:
        """``plan`` has brought ``result``."""
