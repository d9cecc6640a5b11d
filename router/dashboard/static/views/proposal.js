// What the planner would do, why, and what it would gain; and what it expects to come.
import { html } from "../ui.js";
import { Card, Empty, Stat } from "../parts.js";
import * as format from "../format.js";

export function Proposal({ plan }) {
  const { proposed } = plan;
  return html`
    <${Card} title="The planner" about=${asked(plan)} id="proposal">
      ${
        proposed
          ? html`<${Advice} plan=${plan} proposed=${proposed} />`
          : html`<${Empty} title="Nothing is known yet">
              It proposes a ratio once workers have measured their steps and requests have come.
            <//>`
      }
      ${plan.forecast && html`<${Forecast} forecast=${plan.forecast} />`}
    <//>
  `;
}

const asked = ({ planned_by, planned_ago_s }) =>
  planned_by ? `asked ${format.seconds(planned_ago_s)} ago, at ${planned_by}` : "";

function Advice({ plan, proposed }) {
  const stays = isAsItIs(proposed, plan);
  return html`
    <p class="advice">
      ${stays ? "Would stay at " : "Would go to "}
      <b>${proposed.num_prefill} : ${proposed.num_decode}</b>
      ${!stays && html`, for <b class="good">${gain(plan.proposed_gain)}</b> requests/s within the SLOs`}
    </p>
    <p class="reason">${proposed.reason}</p>
    <p class="muted">
      ${format.number(proposed.goodput)} requests/s predicted in all, with a confidence of
      ${` ${format.share(proposed.confidence)}`}
    </p>
  `;
}

/** Until there has been a plan, what is in force is what there is; workers that do both count once there. */
function isAsItIs({ num_prefill, num_decode }, { plan, num_prefill: prefill, num_decode: decode, num_both: both }) {
  if (plan) return num_prefill === plan.num_prefill && num_decode === plan.num_decode;
  return num_prefill === prefill - both && num_decode === decode - both;
}

const gain = (value) => `${value >= 0 ? "+" : "−"}${format.number(Math.abs(value))}`;

const Forecast = ({ forecast }) => html`
  <dl class="stats small" aria-label="What the planner expects">
    <${Stat} label="Expected" value=${format.number(forecast.requests_per_s)} unit="requests/s" />
    <${Stat} label="Prompt" value=${format.count(Math.round(forecast.num_prompt_tokens))} unit="tokens" />
    <${Stat} label="Answer" value=${format.count(Math.round(forecast.num_output_tokens))} unit="tokens" />
    <${Stat} label="In caches" value=${format.share(forecast.hit_rate)} />
  </dl>
`;
