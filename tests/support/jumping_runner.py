"""Stand-in runners that say, now and then, which tokens must follow the sampled one: those that the stand-in model gives."""

from __future__ import annotations

from jserve.runner.fake_runner import FakeRunner, next_token
from jserve.runner.grammar_state import up_to_the_end
from jserve.scheduler import Sequence, StepPlan
from tests.support.kv_runner import KvRunner


class JumpingRunner(FakeRunner):
    """Sequences whose request id ends in an even digit jump by up to `longest` tokens, every third token or so."""

    longest = 11
    num_forced = 0

    def launch(self, plan: StepPlan) -> dict[int, list[int]]:
        super().launch(plan)
        output = self._done[-1]
        output.forced = {}
        for place, row in enumerate(plan.sampling_rows.tolist()):
            sequence, num_before = plan.sequences[row], int(plan.output_index[row])
            token_id = int(output.token_ids[place])
            if int(sequence.request_id[-1]) % 2 or token_id % 3 or place in plan.beams:
                continue
            forced = [token_id]
            for at in range(token_id % self.longest):
                forced.append(next_token(forced[-1], sequence.num_prompt + num_before + at, self._vocab_size, sequence.index))
            forced = up_to_the_end(forced, sequence, num_before)
            output.forced[place] = forced
            self.num_forced += len(forced) - 1
            self._note(sequence, sequence.num_prompt + num_before, forced)
        return output.forced

    def _note(self, sequence: Sequence, position: int, token_ids: list[int]) -> None:
        pass


class JumpingKvRunner(JumpingRunner, KvRunner):
    """And every step reads back what attention would read."""

    def _note(self, sequence: Sequence, position: int, token_ids: list[int]) -> None:
        self._sampled.setdefault(sequence, {}).update(enumerate(token_ids, position))
