"""An answer on the terminal: its text as it comes, then where the time went and where the KV cache came from."""

from __future__ import annotations

from contextlib import aclosing

from rich.console import Console
from rich.table import Table

from protos.client import Answer
from protos.errors import ServiceError
from protos.values import Chunk, Summary, Timeline, Usage


async def show_answer(answer: Answer, out: Console, about: Console | None) -> str:
    """Prints the text to `out` and the rest to `about`, if given. Returns the text."""
    text, summary = "", None
    try:
        async with aclosing(answer):
            async for part in answer:
                if isinstance(part, Chunk):
                    out.file.write(part.text)
                    out.file.flush()
                    text += part.text
                else:
                    summary = part
    except ServiceError:
        if text:
            _end_line(out)
        raise
    except BaseException:  # Ctrl-C leaves its mark on the line
        _end_line(out)
        raise
    _end_line(out)
    if about is not None and summary is not None:
        show_summary(summary, about)
    return text


def _end_line(out: Console) -> None:
    out.file.write("\n")
    out.file.flush()


def show_summary(summary: Summary, about: Console) -> None:
    about.print()
    about.print(timeline_table(summary.timeline))
    for line in summary_lines(summary.usage, summary.timeline):
        about.print("  " + line, highlight=False)


def timeline_table(timeline: Timeline) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("  stage")
    table.add_column("worker")
    table.add_column("start", justify="right")
    table.add_column("took", justify="right")
    for stage in timeline.stages:
        worker = stage.worker_id or "router"
        table.add_row(f"  {stage.name}", worker, milliseconds(stage.start_s), milliseconds(stage.duration_s))
    return table


def summary_lines(usage: Usage, timeline: Timeline) -> list[str]:
    times = [f"first token after {milliseconds(timeline.ttft_s)}"]
    if usage.output_tokens > 1:
        times.append(f"then {milliseconds(timeline.tpot_s)} each")
    lines = [", ".join([*times, f"{milliseconds(timeline.total_s)} in all"])]
    prefill = {"computed": usage.prefill_computed_tokens, "cached": usage.prefill_cached_tokens}
    decode = {"recomputed": usage.decode_recomputed_tokens}
    if usage.disaggregated:  # else the decode worker is the prefill worker, and these are counted above
        decode = {
            "received": usage.decode_received_tokens,
            "held already": usage.decode_cached_tokens,
            "computed": usage.decode_computed_tokens,
            **decode,
        }
    for place, sources in (("prefill", prefill), ("decode", decode)):
        if any(sources.values()):
            lines.append(f"{place:<8} {_tokens(sum(sources.values()), sources)}")
    lines.append(f"answer   {_tokens(usage.output_tokens, {})}{_drafts(usage)}")
    if usage.num_moves:
        lines.append(f"moved    to another decode worker, as it ran: {_counted(usage.num_moves)}")
    if usage.num_retries or usage.num_resumes:
        lines.append(
            f"failures {usage.num_retries} placed again before the first token, {usage.num_resumes} resumed after it"
        )
    return lines


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds >= 0.01 or seconds == 0 else f"{seconds * 1000:.1f} ms"


def _drafts(usage: Usage) -> str:
    """What guessing ahead brought; nothing where there was none."""
    if not usage.drafted_tokens:
        return ""
    steps = f"{usage.num_steps} step{'s' * (usage.num_steps != 1)}"
    which = ", since it was resumed" if usage.num_resumes else ""  # the worker that is lost can tell nothing more
    return f" in {steps}, {usage.accepted_tokens} of {usage.drafted_tokens} guesses right{which}"


def _counted(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _tokens(total: int, sources: dict[str, int]) -> str:
    parts = [f"{count} {source}" for source, count in sources.items() if count]
    return f"{total} token{'s' * (total != 1)}" + (f": {' + '.join(parts)}" if parts else "")
