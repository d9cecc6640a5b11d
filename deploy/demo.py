"""`pdserve demo`: a chat model on one prefill and one decode worker of this machine, for somebody who sees it first."""

from __future__ import annotations

import asyncio
import signal
import sys
from types import FrameType

from rich.console import Console

from deploy.conversation import CHAT_SAMPLING, Asking, Conversation, talk
from deploy.local import ClusterConfig, LocalCluster
from deploy.progress import ConsoleProgress
from deploy.signals import ending_signals
from deploy.up import prepare_model
from protos.values import Sampling

SAMPLING_ONCE = Sampling(temperature=0, max_tokens=100)  # the same answer every time


def run_demo(config: ClusterConfig, prompt: str | None, out: Console, about: Console) -> int:
    """With a prompt it answers that and ends, else it lets the user talk. Leaves no process in either case.

    Returns the number of prompts that got no answer.
    """
    for number in set(ending_signals()) - {signal.SIGINT}:
        signal.signal(number, _leave)
    about.print(f"pdserve demo: {config.model} on one prefill and one decode worker of this machine", markup=False)
    prepare_model(config.model)
    with asyncio.Runner() as runner:
        cluster = LocalCluster(config, ConsoleProgress(about))
        runner.run(cluster.start())
        try:
            if prompt is None:
                asking = Asking(cluster.router_address, CHAT_SAMPLING, may_shorten=True, out=out, about=about)
                return talk(Conversation(asking), runner.run, about)
            out.print(f"\n> {prompt}", markup=False)
            asking = Asking(cluster.router_address, SAMPLING_ONCE, may_shorten=True, out=out, about=out)
            runner.run(Conversation(asking).say(prompt))
            return 0
        finally:
            runner.run(cluster.close())


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
