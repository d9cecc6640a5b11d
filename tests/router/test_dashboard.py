"""The dashboard over HTTP, in front of a router that exists only as messages: what it tells, changes and refuses."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from protos import plans_pb2
from protos.caller import Caller
from protos.security import Exposed
from protos.tls import TlsFiles
from router.dashboard.server import Dashboard, DashboardConfig
from tests.browser.fake_cluster import FakeCluster
from tests.browser.fake_router import AUTO, MANUAL, OPERATOR, READER, FakeRouter, running
from tests.protos.certificates import Authority

KEYS = {"operator-key": OPERATOR, "reader-key": READER}
PREVIEW = {"mode": "manual", "num_prefill": 4, "num_decode": 4, "preview": True}


class Page:
    """Asks as a browser does that has the page open."""

    def __init__(self, dashboard: Dashboard, router: FakeRouter) -> None:
        self.dashboard = dashboard
        self.router = router
        self.client = httpx2.AsyncClient(base_url=dashboard.url, timeout=10)

    async def get(self, path: str, key: str = "") -> Any:
        response = await self.client.get(path, headers=bearer(key))
        assert response.status_code == 200
        return response.json()

    async def set_plan(self, change: object, key: str = "", **headers: str) -> httpx2.Response:
        return await self.client.post("/api/plan", json=change, headers={**bearer(key), **headers})

    @asynccontextmanager
    async def stream(self, key: str = "") -> AsyncIterator[Stream]:
        async with self.client.stream("GET", "/api/stream", headers=bearer(key)) as response:
            yield Stream(response)


class Stream:
    def __init__(self, response: httpx2.Response) -> None:
        self.response = response
        self._lines = response.aiter_lines()
        self._passed_over: list[tuple[str, Any]] = []

    async def next(self, name: str) -> Any:
        """The next event of this name."""
        for event in self._passed_over:
            if event[0] == name:
                self._passed_over.remove(event)
                return event[1]
        async with asyncio.timeout(20):
            while True:
                line = await anext(self._lines)
                if line.startswith("event: "):
                    event = line[7:], json.loads((await anext(self._lines)).removeprefix("data: "))
                    if event[0] == name:
                        return event[1]
                    self._passed_over.append(event)

    async def until(self, name: str, is_it: Any) -> Any:
        while not is_it(told := await self.next(name)):
            pass
        return told


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


@asynccontextmanager
async def opened(
    keys: Mapping[str, Caller] | None = None, *, names: tuple[str, ...] = (), **served: Any
) -> AsyncIterator[Page]:
    router = FakeRouter(FakeCluster(), keys=keys, **served)
    async with running(router), Dashboard(DashboardConfig(router.address, port=0, names=names)) as dashboard:
        page = Page(dashboard, router)
        async with page.client:
            yield page


@pytest.fixture
async def page() -> AsyncIterator[Page]:
    async with opened() as page:
        yield page


@pytest.fixture
async def guarded() -> AsyncIterator[Page]:
    async with opened(KEYS) as page:
        yield page


async def test_streams_what_the_router_says(page: Page) -> None:
    async with page.stream() as stream:
        told = await stream.next("pools")
    status = page.router.cluster.status()
    assert told["error"] is None and told["data"]["model_name"] == "demo-moe"
    by_name = {worker["worker_id"]: worker for worker in told["data"]["workers"]}
    assert by_name.keys() == page.router.cluster.roles.keys()
    expected = next(worker for worker in status.workers if worker.hello.worker_id == "decode-1")
    worker = by_name["decode-1"]
    assert (worker["role"], worker["state"], worker["drafter"]) == ("decode", "ready", "eagle+ngram")
    assert worker["num_running"] == expected.load.num_running > 0
    assert worker["num_quarantined_blocks"] == 4
    assert worker["decode_step_s"] == expected.load.decode_step_s
    assert by_name["worker-0"]["role"] == "both"


async def test_a_change_of_the_cluster_is_streamed(page: Page) -> None:
    async with page.stream() as stream:
        await stream.next("pools")
        page.router.cluster.roles["decode-3"] = page.router.cluster.roles["prefill-0"]

        def has_changed(told: Any) -> bool:
            worker: dict[str, Any] = told["data"]["workers"][5]
            return {"worker_id": "decode-3", "role": "prefill"}.items() <= worker.items()

        await stream.until("pools", has_changed)


async def test_stream_has_every_topic_and_tells_their_ages(page: Page) -> None:
    async with page.stream() as stream:
        access = await stream.next("access")
        assert access["data"] == {"needs_key": False, "may_operate": True, "why": ""}
        beat = await stream.until("beat", lambda told: None not in told["ages_s"].values())
        assert beat["ages_s"].keys() == {"access", "pools", "plan", "traffic"}
        assert all(age >= 0 for age in beat["ages_s"].values())
    assert stream.response.headers["content-encoding"] == "gzip"
    assert stream.response.headers["cache-control"] == "no-store"


async def test_plan_is_told_as_numbers_and_words(page: Page) -> None:
    async with page.stream() as stream:
        plan = (await stream.next("plan"))["data"]
    assert (plan["mode"], plan["manual_for_s"], plan["num_prefill"], plan["num_both"]) == ("auto", None, 3, 1)
    assert [(ratio["num_prefill"], ratio["num_decode"]) for ratio in plan["ratios"]] == [
        (p, 8 - p) for p in range(1, 8)
    ]
    assert plan["ratios"][0]["ttft_s"] is None  # one prefill worker cannot keep up: infinite
    assert plan["slo"] == {"ttft_s": 0.5, "tpot_s": 0.05, "percentile": 0.9}


async def test_preview_changes_nothing_and_says_who_would_change(page: Page) -> None:
    before = dict(page.router.cluster.roles)
    told = (await page.set_plan(PREVIEW)).json()
    assert page.router.cluster.roles == before and page.router.planning.mode == AUTO
    flips = {(flip["worker_id"], flip["before"], flip["after"]) for flip in told["would_flip"]}
    assert flips == {("worker-0", "both", "prefill"), ("decode-0", "decode", "prefill")}


async def test_sets_a_plan(page: Page) -> None:
    change = {"mode": "manual", "num_prefill": 4, "num_decode": 4, "for_s": 900.0, "reason": "lunch"}
    response = await page.set_plan(change)
    assert response.status_code == 200 and response.json()["mode"] == "manual"
    (asked,) = page.router.planning.changes
    assert (asked.mode, asked.num_prefill, asked.num_decode, asked.for_s, asked.reason) == (MANUAL, 4, 4, 900, "lunch")
    assert not asked.preview and not asked.HasField("dry_run")
    decisions = await page.get("/api/decisions?limit=1")
    assert [(each["what"], each["role"]) for each in decisions["data"]["decisions"]] == [("plan manual", "4:4")]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"mode": "sideways"}, "mode"),
        ({"mode": "auto", "num_workers": 3}, "num_workers"),
        ({"mode": "manual", "num_prefill": "4"}, "num_prefill"),
        ({"mode": "manual", "num_prefill": 0, "num_decode": 8}, "num_prefill"),  # the router's own refusal
        ({"mode": "auto", "reason": "x" * 201}, "reason"),
        ({"mode": "manual", "for_s": -1.0}, "for_s"),
        ({"mode": "auto", "reason": "x" * 20_000}, "body"),
        ([], ""),
    ],
)
async def test_a_change_that_is_wrong_names_its_field(page: Page, change: object, field: str) -> None:
    response = await page.set_plan(change)
    assert response.status_code == 400
    assert (response.json()["error"]["code"], response.json()["error"]["field"]) == ("INVALID_ARGUMENT", field)
    assert page.router.planning.mode == AUTO and not page.router.planning.changes


async def test_without_a_key_nothing_is_told(guarded: Page) -> None:
    async with guarded.stream() as stream:
        access, pools = await stream.next("access"), await stream.next("pools")
    assert access["data"]["needs_key"] and not access["data"]["may_operate"]
    assert pools["data"] is None and pools["error"]["code"] == "UNAUTHENTICATED"
    assert (await guarded.get("/api/requests"))["error"]["code"] == "UNAUTHENTICATED"
    assert (await guarded.get("/api/requests", "guess"))["error"]["code"] == "UNAUTHENTICATED"
    assert (await guarded.set_plan(PREVIEW)).status_code == 401


async def test_a_key_that_may_read_changes_nothing(guarded: Page) -> None:
    async with guarded.stream("reader-key") as stream:
        access, pools = await stream.next("access"), await stream.next("pools")
    assert (access["data"]["needs_key"], access["data"]["may_operate"]) == (False, False)
    assert "operate" in access["data"]["why"]
    assert len(pools["data"]["workers"]) == 8
    response = await guarded.set_plan({"mode": "frozen"}, "reader-key")
    assert response.status_code == 403 and response.json()["error"]["code"] == "PERMISSION_DENIED"
    assert guarded.router.planning.mode == AUTO


async def test_who_may_operate_does_so_by_name(guarded: Page) -> None:
    async with guarded.stream("operator-key") as stream:
        assert (await stream.next("access"))["data"]["may_operate"]
    assert (await guarded.set_plan({"mode": "frozen"}, "operator-key")).status_code == 200
    assert guarded.router.planning.mode == plans_pb2.PLAN_MODE_FROZEN
    assert guarded.router.planning.decisions[0].key == "operator"


async def test_an_older_router_says_what_it_does_not_serve() -> None:
    async with opened(serves_plans=False, serves_insights=False) as page:
        async with page.stream() as stream:
            events = {name: await stream.next(name) for name in ("access", "pools", "plan", "traffic")}
        assert events["pools"]["data"]["model_name"] == "demo-moe"
        assert events["plan"]["error"]["code"] == events["traffic"]["error"]["code"] == "UNIMPLEMENTED"
        told = await page.get("/api/insights?worker=decode-0")
        assert told["data"]["workers"]["decode-0"]["error"]["code"] == "UNIMPLEMENTED"


async def test_requests_come_slowest_first(page: Page) -> None:
    slowest = (await page.get("/api/requests?limit=20"))["data"]["requests"]
    times = [request["timeline"]["total_s"] for request in slowest]
    assert len(times) == 20 and times == sorted(times, reverse=True)
    newest = (await page.get("/api/requests?limit=3&order=newest"))["data"]["requests"]
    assert [each["request_id"] for each in newest] == [each.request_id for each in page.router.cluster.requests()[:3]]
    running = (await page.get("/api/requests?running=1"))["data"]["requests"]
    assert {request["state"] for request in running} == {"prefill", "decode"}


@pytest.mark.parametrize("query", ["limit=0", "limit=501", "limit=x", "limit=-1", "order=best"])
async def test_a_question_that_is_wrong_is_refused(page: Page, query: str) -> None:
    told = await page.get(f"/api/requests?{query}")
    assert (told["error"]["code"], told["error"]["field"]) == ("INVALID_ARGUMENT", query.partition("=")[0])


async def test_insights_of_each_worker_or_why_there_are_none(page: Page) -> None:
    told = (await page.get("/api/insights?worker=decode-0&worker=gone"))["data"]["workers"]
    experts = told["decode-0"]["data"]["experts"]
    assert [layer["layer"] for layer in experts if layer["imbalance"] > 2] == [11]
    assert told["gone"]["data"] is None and told["gone"]["error"]["code"] == "NOT_FOUND"
    assert page.router.insights.asked == {"decode-0"}


async def test_few_workers_are_asked_at_a_time() -> None:
    async with opened() as page:
        page.router.cluster.roles |= {f"more-{i}": page.router.cluster.roles["decode-0"] for i in range(40)}
        query = "&".join(f"worker=more-{i}" for i in range(32))
        told = await page.get(f"/api/insights?{query}")
        assert len(told["data"]["workers"]) == 32 and 1 < page.router.insights.most_running <= 8
        refused = await page.get(f"/api/insights?{query}&worker=more-32")
        assert (refused["error"]["code"], refused["error"]["field"]) == ("INVALID_ARGUMENT", "worker")


async def test_stream_outlives_the_router(page: Page) -> None:
    async with page.stream() as stream:
        await stream.next("pools")
        await page.router.server.stop()
        told = await stream.until("pools", lambda told: told["error"] is not None)
        assert told["error"]["code"] == "UNAVAILABLE" and page.router.address in told["error"]["message"]
        beat = await stream.until("beat", lambda told: (told["ages_s"]["pools"] or 0) > 1)
        assert beat["ages_s"]["pools"] > 1
        async with running(FakeRouter(FakeCluster(num_prefill=6), port=page.router.port)):
            back = await stream.until("pools", lambda told: told["error"] is None)
            assert len(back["data"]["workers"]) == 12


async def test_stop_ends_open_streams() -> None:
    async with AsyncExitStack() as stack:
        page = await stack.enter_async_context(opened())
        stream = await stack.enter_async_context(page.stream())
        await stream.next("pools")
        stopping = asyncio.create_task(page.dashboard.stop())
        with pytest.raises(StopAsyncIteration):  # an end, not a broken connection
            await stream.next("never")
        await stopping


@pytest.mark.parametrize("host", ["127.0.0.1:1", "localhost:8600", "[::1]:8600", "10.1.2.3", "dash.example:8600"])
async def test_is_reached_by_address_and_by_its_names(host: str) -> None:
    async with opened(names=("dash.example",)) as page:
        assert (await page.client.get("/", headers={"host": host})).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8600", "", "[x"])
@pytest.mark.parametrize("path", ["/", "/api/stream", "/static/app.js"])
async def test_other_names_are_refused(page: Page, host: str, path: str) -> None:
    """A page elsewhere may point its own name at this machine, and would read what the answers say."""
    response = await page.client.get(path, headers={"host": host})
    assert response.status_code == 403 and response.json()["error"]["reason"] == "OTHER_SITE"


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "http://127.0.0.1:1"},  # another port of the same host is another page
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
async def test_other_pages_change_nothing(page: Page, headers: dict[str, str]) -> None:
    response = await page.set_plan({"mode": "frozen"}, **headers)
    assert response.status_code == 403 and page.router.planning.mode == AUTO


async def test_a_form_of_another_page_changes_nothing(page: Page) -> None:
    """Where a browser sends neither header: what a form can send is no JSON by its type."""
    response = await page.client.post(
        "/api/plan", content=b'{"mode": "frozen"}', headers={"content-type": "text/plain"}
    )
    assert response.status_code == 400 and page.router.planning.mode == AUTO


async def test_the_page_itself_may_change_plans(page: Page) -> None:
    response = await page.set_plan(
        {"mode": "frozen"}, **{"origin": page.dashboard.url, "sec-fetch-site": "same-origin"}
    )
    assert response.status_code == 200


@pytest.mark.parametrize("path", ["/", "/static/app.js", "/static/vendor/preact.mjs", "/api/decisions", "/nothing"])
async def test_browsers_are_told_to_run_nothing_else(page: Page, path: str) -> None:
    headers = (await page.client.get(path)).headers
    directives = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert directives["default-src"] == "'none'" and directives["script-src"] == "'self'"
    assert directives["connect-src"] == directives["style-src"] == "'self'"
    assert directives["frame-ancestors"] == "'none'"
    assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("path", ["/static/../server.py", "/static/%2e%2e/server.py", "/static/vendor"])
async def test_serves_no_file_but_its_own(page: Page, path: str) -> None:
    assert (await page.client.get(path)).status_code == 404


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.7", "dash.example"])
def test_other_machines_come_by_tls_alone(host: str) -> None:
    with pytest.raises(Exposed, match="--tls-cert"):
        DashboardConfig("127.0.0.1:8500", host=host)
    with pytest.raises(Exposed, match="--tls-cert"):  # for the calls to the router alone
        DashboardConfig("127.0.0.1:8500", host=host, tls=TlsFiles(ca=Path("ca.pem")))
    assert DashboardConfig("127.0.0.1:8500", host=host, insecure=True)


async def test_tls_on_both_sides_and_open_to_others_only_where_keys_are_asked_for(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    tls = authority.issue("dashboard")
    trusting = ssl.create_default_context(cafile=str(authority.path))
    for keys in (None, KEYS):
        router = FakeRouter(FakeCluster(), keys=keys, tls=authority.issue("router"))
        async with running(router):
            config = DashboardConfig(router.address, host="0.0.0.0", port=0, tls=tls)
            async with (
                Dashboard(config) as dashboard,
                httpx2.AsyncClient(base_url=dashboard.url.replace("0.0.0.0", "127.0.0.1"), verify=trusting) as client,
            ):
                told = (await client.get("/api/requests", headers=bearer("reader-key"))).json()
        if keys is None:
            assert told["data"] is None and "--keys-file" in told["error"]["message"]
        else:
            assert told["error"] is None and len(told["data"]["requests"]) == 50


async def test_a_key_does_not_leave_this_machine_unencrypted() -> None:
    async with (
        Dashboard(DashboardConfig("192.0.2.1:8500", port=0)) as dashboard,
        httpx2.AsyncClient(base_url=dashboard.url) as client,
    ):
        told = (await client.get("/api/requests", headers=bearer("reader-key"))).json()
    assert told["error"]["code"] == "FAILED_PRECONDITION" and "unencrypted" in told["error"]["message"]
