"""The page in a browser: what people see and do, with any router behind it that there may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest
from selenium.webdriver.common.keys import Keys

from protos import insights_pb2, workers_pb2
from protos.errors import FailedPrecondition
from tests.browser.fake_cluster import DECODE, PREFILL, FakeCluster
from tests.browser.fake_router import AUTO, FROZEN, MANUAL, OPERATOR, READER
from tests.browser.served import Served
from tests.browser.visit import Visit

Serve: TypeAlias = Callable[..., Served]
Open: TypeAlias = Callable[..., Visit]
VIEWS = ("pools", "tune", "speculation", "experts", "transfers", "requests")
KEYS = {"operator-key": OPERATOR, "reader-key": READER}
LOADED = {  # something that is there when a view has all it shows
    "pools": "#workers tbody tr",
    "tune": "#chooser canvas",
    "speculation": ".columns canvas",
    "experts": ".chart canvas",
    "transfers": "tbody td.numeric b.bad",
    "requests": ".timeline .stage",
}


def test_shows_the_pools(serve: Serve, visit: Open) -> None:
    page = visit(serve())
    page.one(LOADED["pools"])
    assert page.one(".ratio").get_attribute("aria-label") == "P:D ratio: 2 prefill, 5 decode, 1 both"
    assert page.column(0) == [*(f"decode-{i}" for i in range(5)), "prefill-0", "prefill-1", "worker-0"]
    stats = page.until_text(".summary .stats", "93.4 %", "341 ms", "31.2 ms")
    assert "SLO 500 ms, within" in stats and "SLO 50 ms, within" in stats
    assert page.text(".freshness") == "Live"
    assert len(page.until(lambda: page.all(".charts canvas")[2:] and page.all(".charts canvas"), "charts drawn")) == 3


def test_shows_classes_of_slos_where_there_are_several(serve: Serve, visit: Open) -> None:
    cluster = FakeCluster()
    cluster.classes = [
        insights_pb2.ClassTraffic(slo_class="default", num_answers=900, attainment=0.963, share=0.9),
        insights_pb2.ClassTraffic(slo_class="batch", num_answers=100, attainment=0.412, share=0.5),
        insights_pb2.ClassTraffic(slo_class="idle", num_answers=0, attainment=1.0, share=0.5),
    ]
    served = serve(cluster=cluster)
    page = visit(served)
    told = page.until_text(".summary .stats", "default 96.3 % of 90 %", "batch 41.2 % of 50 %")
    assert "idle no answers of 50 %" in told
    assert page.one(".summary .stat:nth-child(3) dd").get_attribute("class") == "bad"  # though 93.4 % of all are within
    page = visit(served, "tune")
    page.until_text(
        "#chooser", "of what comes (default ", "meet the SLOs of their class", "gives every class its share"
    )


def test_is_live(serve: Serve, visit: Open) -> None:
    served = serve()
    page = visit(served)
    page.until_text(".ratio", "2 prefill, 5 decode, 1 both")
    served.cluster.roles["decode-4"] = PREFILL
    served.cluster.states["decode-3"] = workers_pb2.WORKER_STATE_SILENT
    page.until_text(".ratio", "3 prefill, 4 decode, 1 both")
    page.until(lambda: page.column(2)[3] == "silent", "shown silent")


def test_workers_are_sorted_and_found(serve: Serve, visit: Open) -> None:
    served = serve()
    page = visit(served)
    page.one(LOADED["pools"])
    heading = "#workers th:nth-child(4)"
    page.click(f"{heading} button")
    running = [worker.load.num_running for worker in served.cluster.status().workers]
    expected = [f"{number} / 64" for number in sorted(running, reverse=True)]
    page.until(lambda: [cell.strip() for cell in page.column(3)] == expected, "sorted, most first")
    assert page.one(heading).get_attribute("aria-sort") == "descending"
    page.type("#workers input[type=search]", "prefill")
    page.until(lambda: sorted(page.column(0)) == ["prefill-0", "prefill-1"], "the two that match")
    page.type("#workers input[type=search]", "x")
    page.until_text("#workers .empty", "No worker matches")


def test_slider_previews_and_the_button_applies(serve: Serve, visit: Open) -> None:
    served = serve()
    page = visit(served, "tune")
    page.until_text("#proposal", "Would go to 4 : 4", "prefill is the bottleneck", "82 %")
    page.press("#ratio-slider", Keys.ARROW_RIGHT)
    words = page.one("#ratio-slider").get_attribute("aria-valuetext")
    assert words == "4 prefill, 4 decode: 14.7 requests a second"
    page.until_text("#preview", "2 roles would change", "worker-0", "decode-0")
    assert served.cluster.roles["decode-0"] == DECODE, "a preview changes nothing"
    assert [change.preview for change in served.planning.changes] == [True]
    page.click("#apply")
    page.until_text("#preview", "4 : 4 is set.")
    *previews, change = served.planning.changes
    assert all(preview.preview for preview in previews) and not change.preview
    assert (change.mode, change.num_prefill, change.num_decode, change.for_s) == (MANUAL, 4, 4, 3600)
    assert served.cluster.roles["decode-0"] == served.cluster.roles["worker-0"] == PREFILL
    page.until_text("#modes", "In force: 4 : 4", "It ends in 60 min")
    assert page.one("[data-mode=manual]").get_attribute("aria-pressed") == "true"
    page.until(lambda: "worker-0" in page.text("#flips tbody tr:nth-child(1)") or None, "the flip listed first")
    page.until_text("section[aria-label=Decisions]", "manual 4:4")


def test_a_slider_that_moves_on_is_previewed_where_it_stops(serve: Serve, visit: Open) -> None:
    served = serve()
    page = visit(served, "tune")
    page.press("#ratio-slider", *[Keys.ARROW_RIGHT] * 3)
    page.until_text("#preview", "4 roles would change")
    assert page.one("#apply").text == "Apply 6 : 2"
    assert {(change.num_prefill, change.preview) for change in served.planning.changes} == {(6, True)}
    page.press("#ratio-slider", Keys.HOME)
    page.until_text("#preview", "would change", "prefill-0")
    assert page.one("#apply").text == "Apply 1 : 7"


def test_modes_and_dry_run_are_set(serve: Serve, visit: Open) -> None:
    served = serve()
    page = visit(served, "tune")
    page.click("[data-mode=frozen]")
    page.until(lambda: served.planning.mode == FROZEN, "frozen")
    page.until(lambda: page.one("[data-mode=frozen]").get_attribute("aria-pressed") == "true", "shown as frozen")
    page.click("#modes input[role=switch]")
    page.until(lambda: served.planning.dry_run, "a dry run")
    assert served.planning.mode == FROZEN
    page.click("[data-mode=auto]")
    page.until(lambda: served.planning.mode == AUTO and served.planning.dry_run, "automatic, and dry still")


def test_what_the_router_refuses_is_said(serve: Serve, visit: Open) -> None:
    served = serve()
    page = visit(served, "tune", refusals=1)
    served.planning.refusal = FailedPrecondition("decode-2 has a layout of its own and keeps its role")
    page.press("#ratio-slider", Keys.ARROW_RIGHT)
    page.until_text("#preview", "decode-2 has a layout of its own")
    assert not page.is_enabled("#apply"), "what cannot be previewed cannot be set"
    served.planning.refusal = None
    page.press("#ratio-slider", Keys.ARROW_RIGHT)
    page.until_text("#preview", "would change")
    assert page.is_enabled("#apply")


def test_workers_that_come_and_go_move_the_slider_along(serve: Serve, visit: Open) -> None:
    served = serve(cluster=FakeCluster(num_both=0))
    page = visit(served, "tune")
    page.until(lambda: page.one("#ratio-slider").get_attribute("max") == "5", "six ratios of seven workers")
    assert page.text(".slider label") == "Ratio 2 : 5"
    served.cluster.roles["late"] = DECODE
    page.until(lambda: page.one("#ratio-slider").get_attribute("max") == "6", "one ratio more")
    assert page.text(".slider label") == "Ratio 2 : 6"


def test_read_only_without_operate(serve: Serve, visit: Open) -> None:
    served = serve(keys=KEYS)
    page = visit(served, "tune", key="reader-key")
    page.until_text(".notice", "Read-only", "operate")
    page.until_text(".top", "Read-only")
    for control in ("#ratio-slider", "#apply", "#duration", "[data-mode=frozen]", "#modes input[role=switch]"):
        assert not page.is_enabled(control), control
    page.one(LOADED["tune"])
    page.ask("document.querySelector('[data-mode=frozen]').click()")
    assert served.planning.mode == AUTO and not served.planning.changes


def test_a_key_is_asked_for_and_forgotten(serve: Serve, visit: Open) -> None:
    page = visit(serve(keys=KEYS), "tune", key="a-guess")
    page.until_text(".login [role=alert]", "not known")
    page.type("#api-key", "operator-key", Keys.ENTER)
    page.until(lambda: page.is_enabled("#ratio-slider"), "controls that may be used")
    assert page.ask("return document.cookie") == "" and page.ask("return localStorage.length") == 0
    page.click(".top button")
    page.until_text(".login", "An API key, please")
    assert page.ask("return sessionStorage.length") == 0


def test_stale_data_is_shown_as_stale_until_the_router_is_back(serve: Serve, visit: Open) -> None:
    served = serve()
    page = visit(served, "tune")
    page.until(lambda: page.is_enabled("#ratio-slider"), "controls that may be used")
    served.stop_router()
    page.until_text(".freshness", "Stale:", "s old")
    assert page.one("main").get_attribute("class") == "stale"
    page.until_text(".notice", "The router does not answer")
    assert not page.is_enabled("#apply") and not page.is_enabled("#ratio-slider")
    assert page.all("#chooser canvas"), "what was known last is still shown"
    served.cluster.roles["decode-0"] = PREFILL
    served.restart_router()
    page.until_text(".freshness", "Live")
    page.until(lambda: page.is_enabled("#ratio-slider"), "controls that may be used again")
    page.ask("location.hash = 'pools'")
    page.until_text(".ratio", "3 prefill, 4 decode, 1 both")


def test_the_page_comes_back_to_a_dashboard_that_was_restarted(serve: Serve, visit: Open) -> None:
    served = serve()
    page = visit(served, is_cut_off=True)
    page.until_text(".freshness", "Live")
    served.stop_dashboard()
    page.until_text(".freshness", "Stale:")
    assert page.one(".freshness").get_attribute("title") == "the dashboard does not answer"
    served.cluster.roles["decode-0"] = PREFILL
    served.restart_dashboard()
    page.until_text(".freshness", "Live")
    page.until_text(".ratio", "3 prefill, 4 decode, 1 both")


def test_an_older_router_is_told_plainly(serve: Serve, visit: Open) -> None:
    page = visit(serve(serves_plans=False, serves_insights=False))
    page.until(lambda: len(page.column(0)) == 8, "the workers, all the same")
    page.until_text("section[aria-label=Traffic]", "does not tell this yet")
    for view in ("tune", "speculation", "experts", "transfers", "requests"):
        page.ask("location.hash = arguments[0]", view)
        page.until_text("main", "This router does not tell this yet", "Update the router")


def test_without_workers_it_says_what_to_do(serve: Serve, visit: Open) -> None:
    page = visit(serve(cluster=FakeCluster(0, 0, 0)))
    page.until_text("#workers", "No worker has registered", "pdserve worker")
    for view, words in (("tune", "There is nothing to share out"), ("speculation", "No worker decodes")):
        page.ask("location.hash = arguments[0]", view)
        page.until_text("main", words)


def test_two_hundred_workers(serve: Serve, visit: Open) -> None:
    served = serve(cluster=FakeCluster(80, 110, 10))
    page = visit(served)
    page.until(lambda: len(page.column(0)) == 200, "200 rows")
    page.ask(
        "window.tasks = []; new PerformanceObserver(l => tasks.push(...l.getEntries())).observe({type: 'longtask'})"
    )
    served.cluster.roles["decode-109"] = PREFILL
    page.until_text(".ratio", "81 prefill, 109 decode, 10 both")
    page.type("#workers input[type=search]", "decode-109")
    page.until(lambda: page.column(0) == ["decode-109"], "the one that is looked for")
    assert page.ask("return Math.max(0, ...tasks.map(t => t.duration))") < 1000
    page.ask("location.hash = 'tune'")
    page.press("#ratio-slider", Keys.ARROW_RIGHT)
    page.until_text("#preview", "would change")
    page.ask("location.hash = 'transfers'")
    page.until_text(".pages", "16 of 200")
    page.until(lambda: len(served.router.insights.asked) == 16, "a page of them asked")
    page.click(".pages button:last-child")
    page.until(lambda: len(served.router.insights.asked) == 32, "and the next")
    assert served.router.insights.most_running <= 8


def test_keyboard_goes_through_the_tabs(serve: Serve, visit: Open) -> None:
    page = visit(serve())
    page.press("#tab-pools", Keys.ARROW_RIGHT)
    page.until(lambda: page.browser.switch_to.active_element.get_attribute("id") == "tab-tune", "the next tab focused")
    assert page.browser.title == "Tune | pdserve"
    page.press("#tab-tune", Keys.END)
    page.one(".requests .request")
    assert page.one("#tab-requests").get_attribute("aria-selected") == "true"
    page.press("#tab-requests", Keys.ARROW_RIGHT)
    page.one(LOADED["pools"])
    outline = "return getComputedStyle(document.activeElement).outlineStyle"
    assert page.ask(outline) == "solid", "what has the focus is seen to have it"


def test_requests_open_to_their_stages(serve: Serve, visit: Open) -> None:
    served = serve()
    page = visit(served, "requests")
    slowest = max(served.cluster.requests(), key=lambda each: each.timeline.total_s)
    page.one(LOADED["requests"])
    first = page.one(".requests li:first-child .request")
    assert slowest.request_id in first.text and f"{slowest.timeline.total_s:.2f} s" in first.text
    page.press(".requests li:first-child .request", Keys.ENTER)
    shown = page.until_text(".request-detail", "First token after", slowest.decode_worker)
    assert all(name in shown for name in ("queue", "prefill", "hand-over", "decode"))
    page.click(".check input")
    page.until(lambda: len(page.all(".requests li")) == 8, "those that run")


def test_experts_alert_above_two(serve: Serve, visit: Open) -> None:
    page = visit(serve(), "experts")
    page.until_text("[role=alert]", "1 layer above 2", "decode-0, layer 11: expert 5 gets 2.5")
    page.until(lambda: "layer 11" in (page.one(".chart").get_attribute("aria-label") or ""), "the heatmap's own words")


def test_speculation_of_the_chosen_worker(serve: Serve, visit: Open) -> None:
    served = serve()
    page = visit(served, "speculation")
    page.click("tbody tr:nth-child(2) button")
    page.until_text("main .columns", "decode-1, of drafts that got that far")
    first = served.cluster.insights("decode-1").drafts[0].acceptance[0]
    label = page.one(".columns .chart").get_attribute("aria-label") or ""
    assert f"eagle: {100 * first:.0f} %" in label
    assert "prefill-0" not in page.column(0)


@pytest.mark.parametrize("width", [1440, 900, 390])
def test_every_view_fits_and_is_legible(serve: Serve, visit: Open, width: int) -> None:
    page = visit(serve(), width=width)
    for view in VIEWS:
        page.ask("location.hash = arguments[0]", view)
        page.one(LOADED[view])
        widths = page.ask("const d = document.documentElement; return [d.scrollWidth, d.clientWidth]")
        assert widths[0] <= widths[1], f"{view} is wider than the window"
        for theme in ("light", "dark"):
            page.prefer(theme)
            page.until_theme(theme)
            assert page.ask(CONTRASTS) == [], f"{view}, {theme}"


def test_theme_is_turned_and_kept(serve: Serve, visit: Open) -> None:
    served = serve()
    page = visit(served, theme="light")
    for name, shown in (("light", "light"), ("dark", "dark")):
        page.click(".theme")
        page.until_text(".theme", name)
        assert page.theme == shown
    page.browser.refresh()
    page.one(LOADED["pools"])
    assert page.theme == "dark"
    page.click(".theme")
    page.until_text(".theme", "system")


CONTRASTS = """
const light = (colour) => {
  const [r, g, b] = colour.match(/[\\d.]+/g).map(Number).map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const behind = (element) => {
  for (let e = element; e; e = e.parentElement) {
    const colour = getComputedStyle(e).backgroundColor;
    if (/^rgb\\(/.test(colour)) return colour;
  }
  return "rgb(255, 255, 255)";
};
const poor = [];
for (const element of document.querySelectorAll("main *, header *, nav *")) {
  const hasText = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
  if (!hasText || element.closest(":disabled, .unseen, main.stale") || !element.offsetParent) continue;
  const [one, other] = [light(getComputedStyle(element).color), light(behind(element))];
  const contrast = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
  if (contrast < 4.5) poor.push(`${element.className} ${element.textContent.slice(0, 30)}: ${contrast.toFixed(2)}`);
}
return [...new Set(poor)];
"""
