// The page: its header, its tabs, and the view that the address names.
import { html, render, useEffect, useState } from "./ui.js";
import { Header } from "./header.js";
import { Login } from "./login.js";
import { Tabs } from "./tabs.js";
import { restart, useStale, useTopic } from "./live.js";
import { apply } from "./theme.js";
import { Pools } from "./views/pools.js";
import { Tune } from "./views/tune.js";
import { Speculation } from "./views/speculation.js";
import { Experts } from "./views/experts.js";
import { Transfers } from "./views/transfers.js";
import { Requests } from "./views/requests.js";

const VIEWS = {
  pools: { label: "Pools", view: Pools },
  tune: { label: "Tune", view: Tune },
  speculation: { label: "Speculation", view: Speculation },
  experts: { label: "Experts", view: Experts },
  transfers: { label: "Transfers", view: Transfers },
  requests: { label: "Requests", view: Requests },
};

const named = () => (location.hash.slice(1) in VIEWS ? location.hash.slice(1) : "pools");

function App() {
  const [name, setName] = useState(named());
  useEffect(() => {
    const follow = () => setName(named());
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  useEffect(() => {
    document.title = `${VIEWS[name].label} | pdserve`;
  }, [name]);
  const access = useTopic("access");
  const wantsKey = access.data?.needs_key || access.error?.code === "UNAUTHENTICATED";
  return html`
    <${Header} />
    ${wantsKey ? html`<${Login} why=${access.data?.why ?? access.error?.message} />` : html`<${Open} name=${name} />`}
  `;
}

function Open({ name }) {
  const stale = useStale();
  const { view: View } = VIEWS[name];
  const tabs = Object.entries(VIEWS).map(([id, { label }]) => ({ id, label }));
  return html`
    <${Tabs} tabs=${tabs} current=${name} />
    <main id="view" role="tabpanel" aria-labelledby=${`tab-${name}`} class=${stale ? "stale" : ""} tabindex="-1">
      <${View} stale=${stale} />
    </main>
  `;
}

apply();
restart();
render(html`<${App} />`, document.getElementById("app"));
