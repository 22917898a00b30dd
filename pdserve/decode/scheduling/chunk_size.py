"""The chunk: how many tokens of prompts a step of the engine computes beside running streams. It is what fits between
two promised tokens at the measured speed; without a promise that of the configuration, or less where prompts are slow
(docs/slo.md)."""

from pdserve.decode.scheduling.prefill_times import Estimator
from pdserve.engine.base import Engine, Step

STEADY = 8
"""a chunk that changes by less than this part is not set anew, since that costs the engine some time"""


class ChunkLimit:
    """Keeps the engine's chunk at what the estimator says."""

    def __init__(self, engine: Engine, estimator: Estimator) -> None:
        self._engine, self._estimator, self._set = engine, estimator, estimator.usual

    async def stepped(self, step: Step) -> None:
        """A step of the engine ended, whose outputs are noted."""
        if step.ended:
            self._estimator.stepped(step.ended, step.prompt_tokens)
        usual = self._estimator.usual
        if not usual:
            return
        wanted = self._estimator.chunk
        enough = wanted == usual or abs(wanted - self._set) * STEADY > self._set
        if wanted != self._set and enough:
            self._set = wanted
            await self._engine.limit_chunk(wanted)
