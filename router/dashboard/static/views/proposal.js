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
  const stays =
    plan.plan && proposed.num_prefill === plan.plan.num_prefill && proposed.num_decode === plan.plan.num_decode;
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

const gain = (value) => `${value >= 0 ? "+" : "−"}${format.number(Math.abs(value))}`;

const Forecast = ({ forecast }) => html`
  <dl class="stats small" aria-label="What the planner expects">
    <${Stat} label="Expected" value=${format.number(forecast.requests_per_s)} unit="requests/s" />
    <${Stat} label="Prompt" value=${format.count(Math.round(forecast.num_prompt_tokens))} unit="tokens" />
    <${Stat} label="Answer" value=${format.count(Math.round(forecast.num_output_tokens))} unit="tokens" />
    <${Stat} label="In caches" value=${format.share(forecast.hit_rate)} />
  </dl>
`;
