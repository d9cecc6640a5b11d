"""When to start a process again that has ended, and when to give up. Knows only how long it had been running."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class BackOff:
    """Delays double from one end to the next; a run of at least `stable_s` starts the count anew."""

    first_s: float = 0.5
    longest_s: float = 15.0
    max_in_a_row: int = 5
    stable_s: float = 60.0
    _in_a_row: int = field(default=0, init=False)

    def after_run_of(self, run_s: float) -> float | None:
        """Seconds to wait before the next start; None: it has ended too often in a row."""
        if run_s >= self.stable_s:
            self._in_a_row = 0
        if self._in_a_row == self.max_in_a_row:
            return None
        delay_s: float = min(self.first_s * 2.0**self._in_a_row, self.longest_s)
        self._in_a_row += 1
        return delay_s
