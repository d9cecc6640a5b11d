// Whose page this is, how old what it shows is, what this visitor may do, and light or dark.
import { html, useNow, useState } from "./ui.js";
import { ageOf, isConnected, restart, STALE_S, useTopic } from "./live.js";
import { apiKey, setApiKey } from "./session.js";
import { setTheme, theme, THEMES } from "./theme.js";
import { seconds } from "./format.js";

export function Header() {
  const { data } = useTopic("pools");
  return html`
    <header class="top">
      <a class="brand" href="#pools"><img src="/static/icon.svg" alt="" width="20" height="20" /> pdserve</a>
      <span class="model" title="The model that is served">${data?.model_name ?? ""}</span>
      <span class="gap"></span>
      <${Freshness} />
      <${Access} />
      <${ThemeChoice} />
    </header>
  `;
}

function Freshness() {
  const age = ageOf("pools", useNow(500));
  const { error } = useTopic("pools");
  const { kind, text, title } = freshness(age, error);
  return html`<span class=${`freshness ${kind}`} role="status" aria-live="polite" title=${title}>
    <span class="dot" aria-hidden="true"></span>${text}
  </span>`;
}

function freshness(age, error) {
  if (age !== null && age <= STALE_S) return { kind: "live", text: "Live", title: "As of less than three seconds ago" };
  const who = isConnected() ? "the router" : "the dashboard";
  const title = error?.message ?? `${who} does not answer`;
  if (error?.code === "UNAUTHENTICATED") return { kind: "waiting", text: "Needs a key", title };
  if (age === null) return { kind: "waiting", text: error ? `No answer from ${who}` : "Connecting", title };
  return { kind: "old", text: `Stale: ${seconds(Math.floor(age))} old`, title };
}

function Access() {
  const { data } = useTopic("access");
  const leave = () => {
    setApiKey("");
    restart();
  };
  return html`
    ${data && !data.needs_key && !data.may_operate && html`<span class="badge" title=${data.why}>Read-only</span>`}
    ${apiKey() && html`<button class="quiet" onClick=${leave} title="Forget the API key">Forget key</button>`}
  `;
}

function ThemeChoice() {
  const [name, setName] = useState(theme());
  const next = THEMES[(THEMES.indexOf(name) + 1) % THEMES.length];
  const change = () => {
    setTheme(next);
    setName(next);
  };
  const glyph = { system: "◐", light: "○", dark: "●" }[name];
  return html`<button class="quiet theme" onClick=${change} aria-label=${`Theme: ${name}. Change to ${next}`}>
    <span aria-hidden="true">${glyph}</span> ${name}
  </button>`;
}
