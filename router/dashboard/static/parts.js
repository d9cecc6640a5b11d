// Small pieces that every view is made of.
import { html } from "./ui.js";
import { share } from "./format.js";

export function Card({ title, about, actions, children, wide, id }) {
  return html`
    <section class=${`card${wide ? " wide" : ""}`} id=${id} aria-label=${title}>
      <div class="card-head">
        <h2>${title}</h2>
        ${about && html`<p class="about">${about}</p>`}
        ${actions && html`<div class="actions">${actions}</div>`}
      </div>
      ${children}
    </section>
  `;
}

/** One figure with its name. `tone`: good, warn, bad; what it means is in the words too. */
export function Stat({ label, value, unit, detail, tone }) {
  return html`
    <div class="stat">
      <dt>${label}</dt>
      <dd class=${tone ?? ""}><b>${value}</b>${unit && html`<span class="unit">${unit}</span>`}</dd>
      ${detail && html`<dd class="detail">${detail}</dd>`}
    </div>
  `;
}

const ROLE_GLYPHS = { prefill: "▲", decode: "●", both: "◆" };

export const Role = ({ role }) =>
  html`<span class=${`role ${role}`}
    ><span aria-hidden="true">${ROLE_GLYPHS[role] ?? "?"}</span> ${role || "unknown"}</span
  >`;

const STATE_TONES = {
  ready: "good",
  done: "good",
  draining: "warn",
  running: "warn",
  silent: "bad",
  lost: "bad",
  failed: "bad",
};

export const State = ({ state }) =>
  html`<span class=${`state ${STATE_TONES[state] ?? ""}`}>${state || "unknown"}</span>`;

/** A part of a whole, as a bar with its figure. */
export function Meter({ value, of, text, warnAbove = 0.9 }) {
  const part = of > 0 ? Math.min(1, value / of) : 0;
  return html`<span class="meter" title=${`${share(part)} in use`}>
    <span class="figure">${text}</span>
    <span class="track" aria-hidden="true">
      <span class=${`fill${part > warnAbove ? " high" : ""}`} style=${{ width: `${(100 * part).toFixed(1)}%` }}></span>
    </span>
  </span>`;
}

export const Empty = ({ title, children }) => html`<div class="empty"><b>${title}</b><p>${children}</p></div>`;

const MEANINGS = {
  UNIMPLEMENTED: [
    "This router does not tell this yet",
    "It is older than this page. Update the router, and it appears here.",
  ],
  PERMISSION_DENIED: ["This key may not see this", "It takes a key with the scope read."],
  UNAVAILABLE: ["No answer", "It is asked again every second; nothing needs to be done here once it is back."],
  DEADLINE_EXCEEDED: ["No answer in time", "It is asked again every second."],
};

/** Why there is nothing to show. */
export function Failure({ error, of }) {
  const [title, advice] = MEANINGS[error.code] ?? ["That went wrong", ""];
  return html`<div class="empty" role="note">
    <b>${title}${of && `: ${of}`}</b>
    <p>${advice}</p>
    <p class="muted">${error.message}</p>
  </div>`;
}

/** `told` is {data, error}: the children if there is data, otherwise why not. */
export function Known({ told, of, children }) {
  if (told.data) return children;
  if (told.error) return html`<${Failure} error=${told.error} of=${of} />`;
  return html`<div class="empty"><p class="muted">Waiting for the first answer …</p></div>`;
}
