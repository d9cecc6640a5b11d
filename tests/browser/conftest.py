"""A headless Chromium, and the dashboard in front of a router of messages, in a loop of its own."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from tests.browser.served import Served
from tests.browser.visit import Site, Visit

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MOST_S = 180.0  # that anything awaited takes: a whole cluster may have to start
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1440,900",
)
Run: TypeAlias = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("there is no Chromium here: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = webdriver.Chrome(options, Service(DRIVER))
    yield chrome
    chrome.quit()


@pytest.fixture(scope="session")
def run() -> Iterator[Run]:
    """Runs what is awaited in a loop of another thread: the browser has to be answered while a test waits for it."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="dashboard")
    thread.start()
    yield lambda coroutine: asyncio.run_coroutine_threadsafe(coroutine, loop).result(MOST_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def serve(run: Run) -> Iterator[Callable[..., Served]]:
    """Starts a router and a dashboard; both are gone at the test's end."""
    all_served: list[Served] = []

    def start(**settings: Any) -> Served:
        served = Served(run, **settings)
        all_served.append(served)
        served.start()
        return served

    yield start
    for served in all_served:
        served.stop()


@pytest.fixture
def visit(browser: webdriver.Chrome) -> Iterator[Callable[..., Visit]]:
    """Opens a page. At the end of the test the browser has complained of nothing, and asked nobody else."""
    visits: list[Visit] = []

    def open_page(site: Site, view: str = "pools", **settings: Any) -> Visit:
        one = Visit(browser, site.url, view, **settings)
        visits.append(one)
        return one

    yield open_page
    for one in visits:
        one.end()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One browser for all of them, wherever tests are shared out."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("browser"))
