"""What can be asked of an answer that its client reads at the decode worker."""

from __future__ import annotations

from dataclasses import replace

from protos.errors import FailedPrecondition, InvalidArgument
from router.validation import UnresolvedRequest


def checked_direct(unresolved: UnresolvedRequest, *, is_offered: bool) -> UnresolvedRequest:
    """Raises FailedPrecondition where the router does not offer it, InvalidArgument for what only the router tells."""
    if not is_offered:
        raise FailedPrecondition("this router sends no client to its workers: it was started without --direct")
    if unresolved.num_choices > 1:
        problem = f"n is {unresolved.num_choices}; with Route it must be 1: use Generate or Chat for several answers"
        raise InvalidArgument(problem, field="n")
    if unresolved.echo:
        raise InvalidArgument("echo is true; with Route it must be false: use Generate for the prompt", field="echo")
    if unresolved.sampling.HasField("prompt_logprobs"):
        raise InvalidArgument(
            "sampling.prompt_logprobs is set; with Route it must not be: use Generate or Chat for the prompt's",
            field="sampling.prompt_logprobs",
        )
    return replace(unresolved, is_direct=True)
