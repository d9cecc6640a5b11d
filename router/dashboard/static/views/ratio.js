// How the workers are shared between the pools, in figures and as a bar.
import { html } from "../ui.js";

export function counted(workers) {
  const of = (role) => workers.filter((worker) => worker.role === role && worker.state !== "lost").length;
  return { prefill: of("prefill"), decode: of("decode"), both: of("both") };
}

export function Ratio({ workers }) {
  const { prefill, decode, both } = counted(workers);
  const words = `${prefill} prefill, ${decode} decode${both ? `, ${both} both` : ""}`;
  const parts = [
    ["prefill", prefill],
    ["both", both],
    ["decode", decode],
  ].filter(([, number]) => number > 0);
  return html`
    <div class="ratio" role="group" aria-label=${`P:D ratio: ${words}`}>
      <span class="label">P : D</span>
      <span class="figures">
        <b class="prefill">${prefill}</b> : <b class="decode">${decode}</b>
        ${both > 0 && html`<span class="both"> + ${both}</span>`}
      </span>
      <span class="bar" aria-hidden="true">
        ${parts.map(
          ([role, number]) => html`<span key=${role} class=${role} style=${{ flexGrow: String(number) }}></span>`,
        )}
      </span>
      <span class="detail">${words}</span>
    </div>
  `;
}
