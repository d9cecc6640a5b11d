"""Which workers change their role for a given number of prefill workers: few, and those best suited. Pure."""

from __future__ import annotations

from router.candidate import Candidate, Role
from router.outlook import Outlook

_STICKY = 1.15  # a worker that is so much better suited takes another's role
_BATCH = 32  # sequences, to compare how fast workers decode


def choose_roles(outlook: Outlook, num_prefill: int) -> dict[str, Role] | None:
    """The roles that change, by name; None where the fixed ones leave no such ratio.

    Those prefill whose prefill is fastest against their decode. Of equal ones those change that have least to do.
    """
    workers, fixed = outlook.workers, outlook.fixed
    free = [worker for worker in workers if worker.id.name not in fixed]
    num_free_prefill = num_prefill - sum(worker.role is Role.PREFILL for worker in workers if worker.id.name in fixed)
    if not 0 <= num_free_prefill <= len(free):
        return None
    ranked = sorted(free, key=lambda worker: _rank(worker, outlook))
    wanted = dict.fromkeys(ranked[:num_free_prefill], Role.PREFILL) | dict.fromkeys(
        ranked[num_free_prefill:], Role.DECODE
    )
    return {worker.id.name: role for worker, role in wanted.items() if worker.role is not role}


def _rank(worker: Candidate, outlook: Outlook) -> tuple[float, bool, int]:
    """The lower the rather it prefills. Equal workers never measure alike: they keep the roles they have."""
    forecast, costs = outlook.forecast, outlook.costs[worker.id.name]
    num_tokens = max(1, round(forecast.num_prompt_tokens * (1 - forecast.hit_rate)))
    num_context = forecast.num_prompt_tokens + forecast.num_output_tokens / 2
    prefill_s = costs.prompt_s(num_tokens, outlook.max_step_tokens)
    decode_s = costs.decode_s(_BATCH, _BATCH * num_context) / costs.tokens_per_step
    prefills = worker.role is Role.PREFILL
    ratio = prefill_s / max(decode_s, 1e-9) / (_STICKY if prefills else 1.0)
    return ratio, not prefills, -worker.num_queued_tokens if prefills else worker.num_active
