"""Talking to a model from the terminal: one prompt, or prompt after prompt with what was said before."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from deploy.answer_view import show_answer
from protos.client import PdserveClient
from protos.errors import ServiceError
from protos.values import ChatMessage, Sampling

FORGET, LEAVE = "/new", "/exit"
WELCOME = f"Ctrl-C stops an answer, {FORGET} forgets what was said, {LEAVE} or Ctrl-D ends."
CHAT_SAMPLING = Sampling(temperature=0.2, top_p=0.9, max_tokens=400)  # a talk, not a sample of all that could be said


@dataclass(frozen=True, slots=True)
class Asking:
    """Whom to ask, how, and where the answer goes; without `about` nothing but the text is printed."""

    router_address: str
    sampling: Sampling = field(default_factory=Sampling)
    deadline_s: float | None = None
    out: Console = field(default_factory=Console)
    about: Console | None = None


async def generate_once(asking: Asking, prompt: str) -> None:
    async with PdserveClient(asking.router_address) as client:
        answer = client.generate(prompt, sampling=asking.sampling, deadline_s=asking.deadline_s)
        await show_answer(answer, asking.out, asking.about)


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
        async with PdserveClient(asking.router_address) as client:
            answer = client.chat(messages, sampling=asking.sampling, deadline_s=asking.deadline_s)
            reply = await show_answer(answer, asking.out, asking.about)
        self._messages = [*messages, ChatMessage(role="assistant", content=reply)]


def talk(conversation: Conversation, run: Callable[[Coroutine[Any, Any, None]], None], console: Console) -> None:
    """Reads prompts until the input ends. No loop runs meanwhile: line editing and Ctrl-C are the terminal's own."""
    console.print(WELCOME, style="dim")
    while True:
        try:
            text = input("\n> ").strip()
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:  # perhaps a moment too late to stop an answer
            console.print(f"\n{LEAVE} or Ctrl-D ends.", style="dim")
            continue
        if text == LEAVE:
            return
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
