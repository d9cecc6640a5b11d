from __future__ import annotations

import errno
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from deploy import options
from deploy.cli import cli
from deploy.conversation import Asking
from deploy.up import cluster_config

ROOT = Path(__file__).resolve().parents[2]


def pdserve(*arguments: str, stdin: str = "") -> Result:
    return CliRunner().invoke(cli, arguments, input=stdin)


@pytest.fixture
def closed_port() -> Iterator[str]:
    """An address that nobody listens at while the test runs."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def test_help_lists_the_commands_in_the_order_a_newcomer_needs_them() -> None:
    result = pdserve("--help")
    assert result.exit_code == 0
    listed = [line.split()[0] for line in result.output.partition("Commands:")[2].splitlines() if line]
    assert " ".join(listed) == (
        "demo up worker router generate chat status role drain pools dashboard decisions requests traffic "
        "model plan key"
    )


@pytest.mark.parametrize("command", [*cli.commands, "model build"])
def test_every_option_of_every_command_is_explained(command: str) -> None:
    node: click.Command = cli
    for name in command.split():
        assert isinstance(node, click.Group)
        node = node.commands[name]
    assert node.help
    assert all(parameter.help for parameter in node.params if isinstance(parameter, click.Option))
    assert pdserve(*command.split(), "--help").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["generate"], "Missing argument 'PROMPT'"),
        (["generate", "x", "--temperature", "warm"], "'warm' is not a valid float"),
        (["up", "--runner", "quantum"], "'quantum' is not one of 'torch', 'timed'"),
        (["role", "decode-0", "sideways"], "'sideways' is not one of 'prefill', 'decode', 'both'"),
        (["fly"], "No such command 'fly'"),
        (["up", "--prefill", "-1"], "-1 is not in the range x>=0"),
        (["up", "--port", "99999"], "99999 is not in the range 0<=x<=65535"),
        (["status", "--router", "127.0.0.1"], "'127.0.0.1' is not of the form HOST:PORT"),
        (["up", "--http-port", "65536"], "'65536' is neither off nor a port from 0 to 65535"),
        (["router", "--http-port", "-1"], "'-1' is neither off nor a port"),
        (["up", "--num-blocks", "9", "--kv-cache-gb", "1"], "--num-blocks and --kv-cache-gb set the same thing"),
        (["worker", "--kv-cache-gb", "1", "--num-blocks", "9"], "--num-blocks and --kv-cache-gb set the same thing"),
        (["up", "--max-context", "1"], "1 is not in the range x>=2"),
        (["demo", "--max-context", "0"], "0 is not in the range x>=2"),
        (["generate", "x", "--deadline-s", "0"], "0.0 is not in the range x>0"),
        (["generate", "x", "--speculation", "on"], "'on' is neither off nor a number of tokens"),
        (["chat", "x", "--speculation", "65"], "'65' is neither off nor a number of tokens from 0 to 64"),
        (["up", "--max-draft-tokens", "65"], "65 is not in the range 0<=x<=64"),
        (["worker", "--max-draft-tokens", "-1"], "-1 is not in the range 0<=x<=64"),
        (
            ["worker", "--faults", "drop comit 3"],
            "'comit' in 'drop comit 3': expected what can be hit by 'drop': describe",
        ),
        (["worker", "--drafter", "oracle"], "'oracle' is not one of 'auto', 'none', 'ngram', 'eagle', 'eagle+ngram'"),
        (["model", "build", "gpt-7"], "unknown: gpt-7; there are demo-dense and demo-moe"),
    ],
)
def test_usage_errors_have_their_own_exit_code(arguments: list[str], complaint: str) -> None:
    result = pdserve(*arguments)
    assert result.exit_code == 2
    assert complaint in result.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["up", "--prefill", "0"], "prefill and decode workers need each other: give at least one of each"),
        (["up", "--prefill", "0", "--decode", "0"], "a cluster has at least one worker"),
        (["up", "--model", "gpt-7"], "'gpt-7' is neither a folder here, nor demo-dense or demo-moe"),
    ],
)
def test_wrong_values_are_one_sentence(arguments: list[str], complaint: str) -> None:
    result = pdserve(*arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
    assert complaint in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--block-size", "0"], "--block-size is 0; it must be at least 1"),
        (["--kv-cache-gb", "0"], "--kv-cache-gb is 0; it must be a number above 0"),
        (
            ["--num-blocks", "1", "--block-size", "1"],
            "--num-blocks is 1; it must be at least 2 where --block-size is 1: "
            "a token of a prompt and one of its answer have to fit",
        ),
    ],
)
def test_worker_says_in_one_sentence_what_is_wrong_with_its_settings(arguments: list[str], complaint: str) -> None:
    """In a process of its own: a worker takes over logging."""
    command = [sys.executable, "-m", "deploy.cli", "worker", *arguments]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (1, f"Error: {complaint}\n")


def test_reader_of_the_output_who_has_enough_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(*_: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("deploy.conversation.generate_once", answer)
    result = pdserve("generate", "Once upon a time")
    assert (result.exit_code, result.stderr) == (1, "")


@pytest.mark.parametrize(
    ("arguments", "most"),
    [([], None), (["--speculation", "off"], 0), (["--speculation", "0"], 0), (["--speculation", "3"], 3)],
)
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_speculation_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, command: str, arguments: list[str], most: int | None
) -> None:
    asked: list[Asking] = []

    async def answer(asking: Asking, *_: object) -> None:
        asked.append(asking)

    monkeypatch.setattr("deploy.conversation.generate_once", answer)
    monkeypatch.setattr("deploy.conversation.Conversation.say", lambda conversation, text: answer(conversation._asking))
    result = pdserve(command, "x", *arguments)
    assert result.exit_code == 0, result.output
    assert [asking.sampling.max_draft_tokens for asking in asked] == [most]


@pytest.mark.parametrize(
    "command", ["status", "generate x", "chat x", "role a both", "drain a", "decisions", "pools", "pools freeze"]
)
def test_router_that_is_not_there(closed_port: str, command: str) -> None:
    result = pdserve(*command.split(), "--router", closed_port)
    assert result.exit_code == 1
    assert closed_port in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_debug_shows_where_an_error_came_from() -> None:
    with pytest.raises(ValueError, match="need each other"):
        CliRunner().invoke(cli, ["--debug", "up", "--prefill", "0"], catch_exceptions=False)


def test_up_gives_its_workers_the_options_it_was_given() -> None:
    config = cluster_config(
        context := cli.commands["up"].make_context(
            "up",
            ["--runner", "timed", "--num-blocks", "64", "--drain-s", "3", "--max-context", "512", "--device", "cuda:1"],
        ),
        context.params,
    )
    assert (config.num_prefill, config.num_decode, config.num_colocated) == (1, 1, 0)
    given = dict(zip(config.worker_arguments[::2], config.worker_arguments[1::2], strict=True))
    assert given == {
        "--runner": "timed",
        "--num-blocks": "64",
        "--block-size": "16",
        "--max-context": "512",
        "--device": "cuda:1",
        "--dtype": "auto",
        "--max-step-tokens": "512",
        "--max-running": "64",
        "--lease-s": "5.0",
        "--verify-kv": "auto",
        "--wire-kv": "as-is",
        "--drafter": "auto",
        "--verification": "block",
        "--max-draft-tokens": "7",
        "--draft-length": "adaptive",
        "--draft-shape": "auto",
        "--calibrate": "on",
        "--drain-s": "3.0",
    }
    worker_flags = {flag for parameter in cli.commands["worker"].params for flag in parameter.opts}
    assert given.keys() <= worker_flags


@pytest.mark.parametrize(
    ("arguments", "counts"),
    [
        ([], (1, 1, 0)),
        (["--prefill", "2", "--decode", "3"], (2, 3, 0)),
        (["--colocated", "2"], (0, 0, 2)),
        (["--colocated", "1", "--decode", "1"], (0, 1, 1)),
    ],
)
def test_up_counts(arguments: list[str], counts: tuple[int, int, int]) -> None:
    context = cli.commands["up"].make_context("up", arguments)
    config = cluster_config(context, context.params)
    assert (config.num_prefill, config.num_decode, config.num_colocated) == counts


@pytest.mark.parametrize(
    ("arguments", "http_port", "of_router"),
    [
        ([], 8080, []),
        (["--http-port", "0"], 0, []),
        (["--http-port", "off", "--no-kserve"], None, ["--no-kserve"]),
    ],
)
def test_up_opens_the_doors_it_is_told_to(arguments: list[str], http_port: int | None, of_router: list[str]) -> None:
    context = cli.commands["up"].make_context("up", list(arguments))
    config = cluster_config(context, context.params)
    assert config.http_port == http_port
    assert [each for each in config.router_arguments if "kserve" in each] == of_router


@pytest.mark.parametrize(
    ("arguments", "port", "told"),
    [
        (["--dashboard-port", "8600"], 8600, []),
        (["--dashboard-port", "0", "--insecure"], 0, ["--insecure"]),
    ],
)
def test_up_starts_a_dashboard_if_told_to(arguments: list[str], port: int, told: list[str]) -> None:
    context = cli.commands["up"].make_context("up", list(arguments))
    page = cluster_config(context, context.params).page
    assert page is not None and (page.port, list(page.arguments), page.is_encrypted) == (port, told, False)
    context = cli.commands["up"].make_context("up", [])
    assert cluster_config(context, context.params).page is None


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--name", "http://dash.example"], "'http://dash.example' is no host name"),
        (["--host", "192.0.2.7"], "--host 192.0.2.7 can be reached from other machines"),
        (["--router", "nowhere"], "'nowhere' is not of the form HOST:PORT"),
        (["--tls-cert", "d.crt"], "there is a TLS certificate and no key"),
    ],
)
def test_dashboard_refuses_what_cannot_be_meant(arguments: list[str], complaint: str) -> None:
    result = pdserve("dashboard", *arguments)
    assert result.exit_code != 0
    assert complaint in " ".join(result.output.split())


def test_fault_plan_of_the_environment_is_read_before_anything_else() -> None:
    result = CliRunner().invoke(cli, ["worker"], env={"PDSERVE_FAULTS": "drop commit 1; kill at lunch 1"})
    assert result.exit_code == 2
    assert "'lunch' in 'kill at lunch 1': expected a stage: reserving, reserved" in " ".join(result.output.split())


def test_up_passes_on_what_it_does_not_decide_itself() -> None:
    passed_on = {option.name for option in cli.commands["up"].params if isinstance(option, options.WorkerOption)}
    decided = {"model", "router_address", "role", "host", "port", "worker_id", "metrics_port", "num_threads"}
    of_worker = {option.name for option in cli.commands["worker"].params}
    trust = {"tls_cert", "tls_key", "tls_ca", "tls_peer_name", "require_client_cert", "secret_file", "insecure"}
    assert trust <= {option.name for option in cli.commands["up"].params}
    of_process = {"drain_s", "metrics_host", "log_level", "log_format"}
    inherited = {"faults", "otlp_endpoint"}  # with the environment
    assert passed_on == of_worker - decided - trust - of_process - inherited


def test_up_passes_on_what_the_router_admits() -> None:
    arguments = ["--max-queued", "7", "--max-queue-s", "2.5", "--max-backlog-s", "3.0", "--max-sequences", "9"]
    context = cli.commands["up"].make_context("up", [*arguments])
    assert list(cluster_config(context, context.params).router_arguments[:8]) == arguments


@pytest.mark.parametrize("switch", ["--plan-dry-run", "--no-plan-dry-run"])
def test_up_passes_on_who_plans(switch: str) -> None:
    classes = ["--slo-class", "a=ttft:0.5", "--slo-class", "b=tpot:1"]
    arguments = ["--plan", "frozen", switch, "--plan-every", "5.0", "--slo-ttft", "0.2", *classes]
    context = cli.commands["up"].make_context("up", [*arguments])
    passed_on = list(cluster_config(context, context.params).router_arguments)
    assert passed_on[passed_on.index("--plan") :][:7] == arguments[:7]
    assert passed_on[passed_on.index("--slo-class") :][:4] == classes
    cli.commands["router"].make_context("router", passed_on)  # which takes them
