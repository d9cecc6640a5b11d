// Tabs whose names are addresses: arrow keys, Home and End go from one to the other.
import { html } from "./ui.js";

export function Tabs({ tabs, current }) {
  const go = (step) => {
    const at = tabs.findIndex(({ id }) => id === current);
    open(tabs[(at + step + tabs.length) % tabs.length].id);
  };
  const onKeyDown = (event) => {
    const moves = { ArrowRight: () => go(1), ArrowLeft: () => go(-1) };
    const ends = { Home: () => open(tabs[0].id), End: () => open(tabs.at(-1).id) };
    const move = moves[event.key] ?? ends[event.key];
    if (!move) return;
    event.preventDefault();
    move();
  };
  return html`
    <nav class="tabs" role="tablist" aria-label="Views" onKeyDown=${onKeyDown}>
      ${tabs.map(
        ({ id, label }) => html`
          <a
            key=${id}
            id=${`tab-${id}`}
            role="tab"
            href=${`#${id}`}
            aria-selected=${id === current ? "true" : "false"}
            aria-controls="view"
            tabindex=${id === current ? 0 : -1}
            >${label}</a
          >
        `,
      )}
    </nav>
  `;
}

function open(id) {
  location.hash = id;
  document.getElementById(`tab-${id}`).focus();
}
