"""How long production's steps take, learned from each of them away from the step path: a fit takes 20 us, with the interpreter's lock."""

from __future__ import annotations

import collections

from vllm_plugin.step_log import first_model

MOST_BEHIND = 64
"""Steps that wait to be learned from; older ones are forgotten."""
FITTED_UNWATCHED = 8
"""Steps per round that are learned from while no rollout engine may run: nobody asks for a prediction then, and these keep it right."""


class StepLearner:
    """See the module.

    Attributes:
        model: Step times, as far as they are known.
        measured: From the engine thread: prompt tokens, requests that decode, encoder tokens and seconds of each step.
    """

    def __init__(self) -> None:
        self.model = first_model()
        self.measured: collections.deque[tuple[int, int, int, float]] = collections.deque(maxlen=MOST_BEHIND)

    def learn(self, *, watched: bool) -> None:
        """Background thread.  ``watched``: a rollout engine steers by what is predicted."""
        measured = self.measured
        if not watched:
            for _ in range(len(measured) - FITTED_UNWATCHED):
                measured.popleft()
        while measured:
            prefill, decode, encoder, seconds = measured.popleft()
            self.model.observe(
                prefill_tokens=prefill, num_decodes=decode, encoder_tokens=encoder, seconds=seconds
            )
