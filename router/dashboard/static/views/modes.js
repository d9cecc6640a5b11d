// Who decides: the planner, a person for some time, or nobody. And whether the planner only says what it would do.
import { html, useState } from "../ui.js";
import { setPlan } from "../ask.js";
import { Card, Failure } from "../parts.js";
import * as format from "../format.js";

const MODES = [
  { mode: "auto", label: "Automatic", about: "The planner changes roles where that pays." },
  {
    mode: "manual",
    label: "Manual",
    about: "A ratio of yours holds for some time, then it is as before. Set it below.",
  },
  { mode: "frozen", label: "Frozen", about: "Nobody changes a role, except one by one." },
];

export function Modes({ plan, locked }) {
  const [failure, setFailure] = useState(null);
  const [isBusy, setBusy] = useState(false);
  const send = async (change) => {
    setBusy(true);
    setFailure((await setPlan(change)).error);
    setBusy(false);
  };
  const choose = (mode) => {
    if (mode === "manual") document.getElementById("ratio-slider")?.focus();
    else void send({ mode, reason: "set on the dashboard" });
  };
  const current = MODES.find(({ mode }) => mode === plan.mode);
  return html`
    <${Card} title="Who decides" id="modes">
      <div class="segments" role="group" aria-label="Mode">
        ${MODES.map(
          ({ mode, label, about }) => html`
            <button
              key=${mode}
              data-mode=${mode}
              aria-pressed=${plan.mode === mode ? "true" : "false"}
              title=${about}
              disabled=${Boolean(locked) || isBusy}
              onClick=${() => choose(mode)}
            >
              ${label}
            </button>
          `,
        )}
      </div>
      <p class="about">${current?.about ?? "This router does not say."} ${until(plan)}</p>
      ${
        plan.plan &&
        html`<p>
        In force: <b>${plan.plan.num_prefill} : ${plan.plan.num_decode}</b>, plan ${plan.plan.epoch}<br />
        <span class="muted">${plan.plan.reason}</span>
      </p>`
      }
      <label class="switch">
        <input
          type="checkbox"
          role="switch"
          checked=${plan.dry_run}
          disabled=${Boolean(locked) || isBusy}
          onChange=${() => void send({ ...asItIs(plan), dry_run: !plan.dry_run })}
        />
        Dry run: the planner says what it would do, and does not
      </label>
      ${failure && html`<${Failure} error=${failure} />`}
    <//>
  `;
}

function until({ mode, manual_for_s }) {
  return mode === "manual" && manual_for_s !== null ? `It ends in ${format.seconds(manual_for_s)}.` : "";
}

/** The change that changes nothing. */
function asItIs({ mode, plan, manual_for_s }) {
  if (mode !== "manual") return { mode };
  return { mode, num_prefill: plan.num_prefill, num_decode: plan.num_decode, for_s: manual_for_s };
}
