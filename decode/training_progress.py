"""What a person sees of a training: how far each stage is, loss and acceptance."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

from rich.console import Console

from decode.head_training import Progress


class HelpWithDefaults(argparse.ArgumentDefaultsHelpFormatter):
    """Without "(default: None)"."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


class Ticker:
    """A line at the beginning of a stage and every few seconds: how far it is, and when it will be done."""

    def __init__(self, console: Console, what: str, every_s: float = 10.0) -> None:
        self._console, self._what, self._every_s = console, what, every_s
        self._begin = self._told = time.monotonic()
        self._first: int | None = None
        console.print(f"{what}  begins")

    def tell(self, done: int, total: int) -> None:
        now = time.monotonic()
        self._first = done - 1 if self._first is None else self._first
        if now - self._told >= self._every_s or done == total:
            self._told = now
            left_s = (now - self._begin) / max(1, done - self._first) * (total - done)
            self._console.print(f"{self._what}  {done} of {total}, {left_s / 60:.1f} min left")


class Teller:
    """Loss and acceptance as training goes on, at every tenth step and, if steps are slow, every few seconds; now and
    then on what is held out, too."""

    def __init__(
        self, console: Console, num_steps: int, measure: Callable[[], Progress], every_s: float = 10.0
    ) -> None:
        self._console, self._num_steps, self._measure, self._every_s = console, num_steps, measure, every_s
        self._begin = self._told = time.monotonic()
        self._first: int | None = None

    def tell(self, progress: Progress) -> None:
        self._first = progress.step - 1 if self._first is None else self._first
        now = time.monotonic()
        if progress.step % 10 == 0 or now - self._told >= self._every_s:
            self._told = now
            seconds = (now - self._begin) / (progress.step - self._first)
            left = seconds * (self._num_steps - progress.step) / 60
            self._line(f"step {progress.step:5} of {self._num_steps}, {left:4.0f} min left", progress)
        if progress.step % 100 == 0:
            self._line("held out".rjust(36), self._measure())

    def _line(self, head: str, progress: Progress) -> None:
        self._console.print(f"{head}  loss {progress.loss:.3f}  accepted {percent(progress.acceptance)}")


def percent(shares: Sequence[float]) -> str:
    return " ".join(f"{share:.0%}" for share in shares)
