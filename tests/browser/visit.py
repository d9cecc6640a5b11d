"""One look at the page: what is on it, waited for and used as people do, and what the browser said of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast
from urllib.parse import urlsplit

from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

Found = TypeVar("Found")
WAIT_S = 20.0


class Site(Protocol):
    """Whatever serves the page."""

    @property
    def url(self) -> str: ...


class Visit:
    def __init__(
        self,
        browser: webdriver.Chrome,
        url: str,
        view: str,
        *,
        width: int = 1440,
        theme: str = "light",
        key: str = "",
        refusals: int = 0,
        is_cut_off: bool = False,
    ) -> None:
        """`refusals`: how many changes the router is to refuse, of which the browser complains each time.

        `is_cut_off`: the dashboard itself goes away, of which it complains as well.
        """
        self.browser = browser
        self._refusals = refusals
        self._is_cut_off = is_cut_off
        self._host = urlsplit(url).netloc
        self._takes_logs()
        self._emulate("setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.prefer(theme)
        browser.get(f"{url}/#{view}")
        if key:
            self.type("#api-key", key, Keys.ENTER)

    def end(self) -> None:
        """Nothing to complain of, and nobody else asked."""
        complaints = [entry["message"] for entry in self._log("browser") if entry["level"] != "DEBUG"]
        asked = self._hosts_asked()
        self.browser.get("about:blank")
        if self._is_cut_off:
            complaints = [complaint for complaint in complaints if "ERR_CONNECTION_REFUSED" not in complaint]
        refused = [complaint for complaint in complaints if "/api/plan" in complaint]
        assert len(refused) == self._refusals and len(complaints) == len(refused), f"console: {complaints}"
        assert asked <= {self._host}, f"the page of {self._host} has asked {asked}"

    def prefer(self, theme: str) -> None:
        """As the visitor's system does."""
        self._emulate("setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])

    @property
    def theme(self) -> object:
        return self.ask("return document.documentElement.dataset.theme")

    def until_theme(self, name: str) -> None:
        self.until(lambda: self.theme == name, f"the theme is {name}")

    def all(self, selector: str) -> list[WebElement]:
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        """Once it is there."""
        return self.until(lambda: next(iter(self.all(selector)), None), f"{selector} is there")

    def text(self, selector: str) -> str:
        return self.one(selector).text

    def until(self, found: Callable[[], Found | None], what: str) -> Found:
        def look(_: webdriver.Chrome) -> Found | bool | None:
            return found() or False

        ignored = (StaleElementReferenceException,)
        waiting = WebDriverWait(self.browser, WAIT_S, poll_frequency=0.05, ignored_exceptions=ignored)
        return cast("Found", waiting.until(look, f"not {what} within {WAIT_S:g} s"))

    def until_text(self, selector: str, *words: str) -> str:
        """Returns what is there as soon as all of these words are."""

        def text() -> str:
            return " ".join(element.text for element in self.all(selector))

        def shown() -> str | None:
            told = text()
            return told if all(word in told for word in words) else None

        return self.until(shown, f"{selector} tells {', '.join(words)}")

    def press(self, selector: str, *keys: str) -> None:
        """Once it takes keys."""

        def pressed() -> bool:
            element = self.one(selector)
            if element.is_enabled():
                element.send_keys(*keys)
                return True
            return False

        self.until(pressed, f"{selector} takes keys")

    def type(self, selector: str, *keys: str) -> None:
        self.press(selector, *keys)

    def click(self, selector: str) -> None:
        def clicked() -> bool:
            element = self.one(selector)
            if not element.is_enabled():
                return False
            element.click()
            return True

        self.until(clicked, f"{selector} can be clicked")

    def is_enabled(self, selector: str) -> bool:
        return self.one(selector).is_enabled()

    def ask(self, script: str, *arguments: object) -> Any:
        return self.browser.execute_script(script, *arguments)

    def column(self, number: int) -> list[str]:
        """Of the first table, without its heading."""
        script = (
            "return [...document.querySelectorAll('main table tbody tr')].map(r => r.cells[arguments[0]].innerText)"
        )
        cells: list[str] = self.ask(script, number)
        return cells

    def _emulate(self, command: str, **settings: object) -> None:
        self.browser.execute_cdp_cmd(f"Emulation.{command}", settings)

    def _takes_logs(self) -> None:
        for log in ("browser", "performance"):
            self._log(log)

    def _log(self, name: str) -> list[dict[str, Any]]:
        """What has come since it was read last."""
        entries: list[dict[str, Any]] = self.browser.get_log(name)  # type: ignore[no-untyped-call]
        return entries

    def _hosts_asked(self) -> set[str]:
        messages = [json.loads(entry["message"])["message"] for entry in self._log("performance")]
        sent = [each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"]
        return {parts.netloc for parts in map(urlsplit, sent) if parts.scheme in ("http", "https", "ws", "wss")}
