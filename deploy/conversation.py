"""Talking to a model from the terminal: one prompt, or prompt after prompt with what was said before."""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console

from deploy.answer_view import show_answer
from protos.client import PdserveClient
from protos.errors import DeadlineExceeded, InvalidArgument, ServiceError
from protos.values import ChatMessage, Sampling

FORGET, LEAVE, PROMPT = "/new", "/exit", "> "
WELCOME = f"Ctrl-C stops an answer, {FORGET} forgets what was said, {LEAVE} or Ctrl-D ends."
CHAT_SAMPLING = Sampling(temperature=0.0, repetition_penalty=1.05, max_tokens=400)  # small models wander, and loop


@dataclass(frozen=True, slots=True)
class Asking:
    """Whom to ask, how, and where the answer goes; without `about` nothing but the text is printed.

    Where `may_shorten`, nobody insists on max_tokens: what the context leaves will do.
    """

    router_address: str
    sampling: Sampling = field(default_factory=Sampling)
    may_shorten: bool = False
    deadline_s: float | None = None
    out: Console = field(default_factory=Console)
    about: Console | None = None
    connect: Callable[[str], PdserveClient] = field(default=PdserveClient, repr=False)  # may hold a key


async def generate_once(asking: Asking, prompt: str) -> None:
    async with asking.connect(asking.router_address) as client:
        answer = client.generate(prompt, sampling=asking.sampling, deadline_s=asking.deadline_s)
        with _deadline_told(asking):
            await show_answer(answer, asking.out, asking.about)


@contextmanager
def _deadline_told(asking: Asking) -> Iterator[None]:
    """gRPC says only that there was one."""
    try:
        yield
    except DeadlineExceeded as error:
        if asking.deadline_s is None:
            raise
        raise DeadlineExceeded(
            f"the answer was not complete after {asking.deadline_s:g} s, as --deadline-s asks: allow more time, or "
            "fewer tokens with --max-tokens, and see with `pdserve status` whether there are workers for it"
        ) from error


class Conversation:
    """What was said so far; both sides of it."""

    def __init__(self, asking: Asking) -> None:
        self._asking = asking
        self._messages: list[ChatMessage] = []

    def forget(self) -> None:
        self._messages.clear()

    async def say(self, text: str) -> None:
        """Prints the answer. What failed or was stopped counts as not said."""
        asking = self._asking
        messages = [*self._messages, ChatMessage(role="user", content=text)]
        try:
            reply = await self._answer(messages, asking.sampling)
        except InvalidArgument as error:  # nothing has been printed then
            if not asking.may_shorten or error.field != "sampling.max_tokens":
                raise
            reply = await self._answer(messages, replace(asking.sampling, max_tokens=None))
        self._messages = [*messages, ChatMessage(role="assistant", content=reply)]

    async def _answer(self, messages: Sequence[ChatMessage], sampling: Sampling) -> str:
        asking = self._asking
        async with asking.connect(asking.router_address) as client:
            answer = client.chat(messages, sampling=sampling, deadline_s=asking.deadline_s)
            with _deadline_told(asking):
                return await show_answer(answer, asking.out, asking.about)


def talk(conversation: Conversation, run: Callable[[Coroutine[Any, Any, None]], None], console: Console) -> int:
    """Reads prompts until the input ends. No loop runs meanwhile: line editing and Ctrl-C are the terminal's own.

    Returns the number of prompts that got no answer. Input that is no terminal's is not talked to: one prompt a line.
    """
    if not sys.stdin.isatty():
        return _answer_lines(conversation, run, console)
    _edit_lines()
    console.print(WELCOME, style="dim")
    while True:
        try:
            text = _read_line(console).strip()
        except EOFError:
            console.print()
            return 0
        except KeyboardInterrupt:  # perhaps a moment too late to stop an answer
            console.print(f"\n{LEAVE} or Ctrl-D ends.", style="dim")
            continue
        if text == LEAVE:
            return 0
        if text == FORGET:
            conversation.forget()
            console.print("Forgotten.", style="dim")
        elif text.startswith("/"):
            console.print(f"There is no {text.split()[0]}. {WELCOME}", style="dim", markup=False)
        elif text:
            try:
                run(conversation.say(text))
            except KeyboardInterrupt:
                console.print("Stopped.", style="dim")
            except ServiceError as error:
                console.print(f"Error: {error}", markup=False)


def _answer_lines(
    conversation: Conversation, run: Callable[[Coroutine[Any, Any, None]], None], console: Console
) -> int:
    """FORGET and LEAVE are understood here too; Ctrl-C ends all of it."""
    num_failed = 0
    for line in sys.stdin:
        text = line.strip()
        if text == LEAVE:
            break
        if text == FORGET:
            conversation.forget()
        elif text:
            try:
                run(conversation.say(text))
            except ServiceError as error:
                console.print(f"Error: {error}", markup=False)
                num_failed += 1
    return num_failed


def _edit_lines() -> None:
    """Importing readline gives `input` the arrow keys and a history. Some builds of Python lack it."""
    with suppress(ImportError):
        import readline  # noqa: F401


def _read_line(console: Console) -> str:
    """Asks on the terminal, also where the answers go into a file."""
    console.print()
    if sys.stdout.isatty():
        return input(PROMPT)
    console.print(PROMPT, end="")
    return input()
