// Tune: what every ratio is predicted to give, where the planner would go and why, and the means to decide otherwise.
import { html } from "../ui.js";
import { useTopic } from "../live.js";
import { usePolled } from "../ask.js";
import { Card, Known } from "../parts.js";
import { Modes } from "./modes.js";
import { Proposal } from "./proposal.js";
import { Chooser } from "./chooser.js";
import { Decisions, Flips, StepTimes } from "./plan_tables.js";

const DECISIONS = "/api/decisions?limit=100";

export function Tune({ stale }) {
  const plan = useTopic("plan");
  const access = useTopic("access");
  const decisions = usePolled(DECISIONS, 2000);
  const locked = whyLocked(stale, access.data);
  return html`
    <${Known} told=${plan} of="plans of the pools">
      ${locked && html`<p class="notice" role="note">${locked}</p>`}
      <div class="columns">
        <${Modes} plan=${plan.data} locked=${locked} />
        <${Proposal} plan=${plan.data} />
      </div>
      <${Chooser} plan=${plan.data} locked=${locked} />
      <${Flips} flips=${plan.data?.flips ?? []} />
    <//>
    <${Card} title="Decisions" about="Who has set what, at any router that shares the store" wide>
      <${Known} told=${decisions} of="decisions"><${Decisions} decisions=${decisions.data?.decisions} /><//>
    <//>
    ${plan.data && html`<${StepTimes} models=${plan.data.step_times} />`}
  `;
}

/** Why nothing can be changed now; empty if it can. */
function whyLocked(stale, access) {
  if (stale) return "The router does not answer, so nothing can be changed now. What is shown is what it said last.";
  if (!access) return "Asking the router what you may change …";
  if (!access.may_operate) return `Read-only: changing the pools takes a key with the scope operate. ${access.why}`;
  return "";
}
