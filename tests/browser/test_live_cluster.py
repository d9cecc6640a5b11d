"""The page in a browser with a whole cluster behind it: what comes is seen, and what is set there happens."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import pytest
from selenium import webdriver
from selenium.webdriver.common.keys import Keys

from deploy.local import LocalCluster
from deploy.local_page import PageConfig
from tests.browser.live_cluster import LiveCluster
from tests.browser.visit import Visit
from tests.cluster.timed_cluster import TIMING, prompts, timed_config
from tests.cluster.tiny_model import TinyModel, build_tiny_moe

Open: TypeAlias = Callable[..., Visit]
Run: TypeAlias = Callable[[Coroutine[Any, Any, Any]], Any]
NUM_WORKERS = 4
pytestmark = pytest.mark.timeout(240)  # of which most is for six processes and a browser to start

NUM_SHORT, NUM_LONG = 16, 20  # together fewer than the planner looks back at
SHORT, LONG, ANSWER = 24, 600, 40  # tokens
STREAMED = 300


@pytest.fixture(scope="module")
def cluster(browser: webdriver.Chrome, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Two workers prefill and two decode, until somebody says otherwise."""
    scratch = tmp_path_factory.mktemp("live")
    config = timed_config(
        TinyModel(build_tiny_moe(scratch / "model")),
        scratch,
        arguments=(),
        page=PageConfig(),
        router_arguments=("--plan-every", "0.5"),
    )
    local = LocalCluster(config)
    run(local.start())
    try:
        live = LiveCluster(run, local)
        yield live
        live.assert_at_rest()
        live.close()
    finally:
        run(local.close())


def test_a_shift_of_the_load_is_seen(cluster: LiveCluster, visit: Open) -> None:
    page = visit(cluster)
    assert urlsplit(page.browser.current_url).hostname == "127.0.0.1"
    page.until_text(".ratio", "2 prefill, 2 decode")
    assert page.column(0) == ["decode-0", "decode-1", "prefill-0", "prefill-1"]
    cluster.ask_all(prompts(NUM_SHORT, range(SHORT, SHORT + 1), seed=1), ANSWER)
    page.until(lambda: slowest_ttft_s(page), "first tokens of short prompts")
    page.ask("location.hash = 'tune'")
    page.until(lambda: expects(page) == (SHORT, ANSWER), "short prompts expected")
    cluster.ask_all(prompts(NUM_LONG, range(LONG, LONG + 1), seed=2), ANSWER)
    mean = (NUM_SHORT * SHORT + NUM_LONG * LONG) // (NUM_SHORT + NUM_LONG)
    page.until(lambda: expects(page) == (mean, ANSWER), "longer prompts expected")
    page.ask("location.hash = 'pools'")
    least_s = NUM_LONG * LONG * TIMING["prefill_token_s"] / NUM_WORKERS  # for the last of them, whoever computes it
    page.until(lambda: (slowest_ttft_s(page) or 0) > 0.95 * least_s, "first tokens of long prompts that came late")
    page.ask("location.hash = 'requests'")
    page.until_text(".requests li:first-child .tokens", f"{LONG} → {ANSWER}")


def test_the_slider_changes_roles_and_streams_go_on(cluster: LiveCluster, visit: Open) -> None:
    page = visit(cluster, "tune")
    page.until(lambda: page.one("#ratio-slider").get_attribute("aria-valuetext"), "a ratio")
    assert page.text(".slider label") == "Ratio 2 : 2"
    cluster.stream(STREAMED)
    page.press("#ratio-slider", Keys.ARROW_RIGHT)
    page.until_text("#preview", "1 role would change", "decode-")
    assert cluster.told(lambda client: client.get_plan()).mode == "frozen", "a preview changes nothing"
    page.until(lambda: page.text("#apply") == "Apply 3 : 1", "what would be applied")
    page.click("#apply")
    page.until_text("#modes", "In force: 3 : 1", "It ends in 60 min")
    assert page.one("[data-mode=manual]").get_attribute("aria-pressed") == "true"
    change = page.until_text("#flips tbody tr:first-child", "decode-", "done")
    answers = cluster.streamed()
    num_moves = sum(answered.usage.num_moves for answered in answers)
    assert num_moves > 0 and f"{num_moves} seq" in change, "those that decoded there went on elsewhere"
    for usage in (answered.usage for answered in answers):
        assert usage.num_resumes == usage.num_retries == usage.decode_recomputed_tokens == 0
    page.ask("location.hash = 'pools'")
    page.until_text(".ratio", "3 prefill, 1 decode")
    plan = cluster.told(lambda client: client.get_plan())
    assert (plan.mode, plan.num_prefill, plan.num_decode) == ("manual", 3, 1)
    roles = {worker.worker_id: worker.role for worker in cluster.told(lambda client: client.get_status()).workers}
    page.until(
        lambda: [cell.split()[-1] for cell in page.column(1)] == [roles[name] for name in page.column(0)], "roles"
    )


def test_the_planner_gets_the_pools_back(cluster: LiveCluster, visit: Open) -> None:
    cluster.told(lambda client: client.set_plan("manual", num_prefill=1, num_decode=3))
    page = visit(cluster, "tune")
    page.until_text("#modes", "In force: 1 : 3")
    for mode, about in (("auto", "The planner changes roles"), ("frozen", "Nobody changes a role")):
        page.click(f"[data-mode={mode}]")
        page.until_text("#modes .about", about)
        assert page.one(f"[data-mode={mode}]").get_attribute("aria-pressed") == "true"
        assert cluster.told(lambda client: client.get_plan()).mode == mode
        page.until_text("section[aria-label=Decisions]", mode, "set on the dashboard")


def expects(page: Visit) -> tuple[int, int] | None:
    """Tokens of prompts and answers, as the planner is shown to expect them."""
    found = re.search(r"Prompt\s+([\d,]+).*Answer\s+([\d,]+)", page.text("#proposal"), re.DOTALL)
    return None if found is None else (int(found[1].replace(",", "")), int(found[2].replace(",", "")))


def slowest_ttft_s(page: Visit) -> float | None:
    """The 99th percentile that the summary tells."""
    found = re.search(r"TTFT.*?p99 ([\d.]+) (s|ms)", page.text(".summary .stats"), re.DOTALL)
    return None if found is None else float(found[1]) * (1.0 if found[2] == "s" else 1e-3)
