// Requests: where the time of each went, the slowest first.
import { html, useState } from "../ui.js";
import { usePolled } from "../ask.js";
import { Card, Empty, Known } from "../parts.js";
import * as format from "../format.js";

const STAGES = ["tokenize", "wait", "queue", "prefill", "handover", "decode"];
const NAMES = { handover: "hand-over" };

export function Requests() {
  const [order, setOrder] = useState("slowest");
  const [running, setRunning] = useState(false);
  const [chosen, setChosen] = useState("");
  const told = usePolled(`/api/requests?limit=60&order=${order}&running=${running ? 1 : 0}`, 1000);
  const actions = html`
    <select aria-label="Order" value=${order} onChange=${(event) => setOrder(event.target.value)}>
      <option value="slowest">Slowest first</option>
      <option value="newest">Newest first</option>
    </select>
    <label class="check">
      <input type="checkbox" checked=${running} onChange=${() => setRunning(!running)} /> Running only
    </label>
  `;
  return html`
    <${Card} title="Requests" about="That this router is serving or has answered lately" actions=${actions} wide>
      <${Known} told=${told} of="requests">
        <${List}
          requests=${told.data?.requests ?? []}
          chosen=${chosen}
          onChoose=${(id) => setChosen(id === chosen ? "" : id)}
        />
      <//>
    <//>
  `;
}

function List({ requests, chosen, onChoose }) {
  if (!requests.length)
    return html`<${Empty} title="No request to show">
      Ask something: <code>pdserve chat</code>. Answered ones are kept for a while.
    <//>`;
  const longest = Math.max(...requests.map(({ timeline }) => timeline?.total_s ?? 0), 1e-6);
  return html`
    <${Legend} longest=${longest} />
    <ol class="requests">
      ${requests.map(
        (request) =>
          html`<${Request}
            key=${request.request_id}
            request=${request}
            longest=${longest}
            isOpen=${chosen === request.request_id}
            onChoose=${onChoose}
          />`,
      )}
    </ol>
  `;
}

const Legend = ({ longest }) => html`
  <p class="legend stages" aria-hidden="true">
    ${STAGES.map(
      (name) => html`<span key=${name}><i class=${`swatch stage ${name}`}></i>${NAMES[name] ?? name}</span>`,
    )}
    <span class="scale">bars end at ${format.seconds(longest)}</span>
  </p>
`;

function Request({ request, longest, isOpen, onChoose }) {
  const { request_id: id, timeline, state } = request;
  const running = !["done", "failed", "cancelled"].includes(state);
  return html`
    <li class=${isOpen ? "open" : ""}>
      <button class="request" aria-expanded=${isOpen ? "true" : "false"} onClick=${() => onChoose(id)}>
        <span class="id">${id}</span>
        <span class=${`state ${running ? "warn" : state === "done" ? "good" : "bad"}`}>${state}</span>
        <span class="tokens">
          ${format.count(request.num_prompt_tokens)} → ${format.count(request.num_output_tokens)}${" "}
          <span class="unit">tok</span>
        </span>
        <${Bar} timeline=${timeline} longest=${longest} running=${running} />
        <span class="total">${format.seconds(timeline?.total_s)}</span>
      </button>
      ${isOpen && html`<${Detail} request=${request} />`}
    </li>
  `;
}

const percent = (part) => `${(100 * Math.max(0, part)).toFixed(2)}%`;

function Bar({ timeline, longest, running }) {
  const stages = timeline?.stages ?? [];
  const words = stages.map(({ name, duration_s }) => `${NAMES[name] ?? name} ${format.seconds(duration_s)}`).join(", ");
  return html`
    <span class=${`timeline${running ? " running" : ""}`} role="img" aria-label=${words}>
      ${stages.map(
        ({ name, start_s, duration_s }) => html`<span
          class=${`stage ${name}`}
          title=${`${NAMES[name] ?? name} ${format.seconds(duration_s)}`}
          style=${{ left: percent(start_s / longest), width: percent(duration_s / longest) }}
        ></span>`,
      )}
    </span>
  `;
}

function Detail({ request }) {
  const { timeline } = request;
  const facts = [
    ["First token after", format.seconds(timeline?.ttft_s)],
    ["Then each", format.milliseconds(timeline?.tpot_s)],
    ["Received at", format.moment(request.received_at)],
    ["From caches", `${format.count(request.num_cached_tokens)} of ${format.count(request.num_prompt_tokens)} tokens`],
    ["Tenant", request.tenant || "–"],
    ["Retries, resumes, moves", `${request.num_retries}, ${request.num_resumes}, ${request.num_moves}`],
    ...(request.error ? [["Failed with", html`<b class="bad">${request.error}</b>`]] : []),
  ];
  return html`
    <div class="request-detail">
      <table>
        <caption class="unseen">Stages</caption>
        <thead>
          <tr>
            <th scope="col">Stage</th>
            <th scope="col">Worker</th>
            <th scope="col" class="numeric">Start</th>
            <th scope="col" class="numeric">Took</th>
          </tr>
        </thead>
        <tbody>
          ${(timeline?.stages ?? []).map(
            ({ name, worker_id, start_s, duration_s }, i) => html`<tr key=${i}>
              <th scope="row"><i class=${`swatch stage ${name}`} aria-hidden="true"></i>${NAMES[name] ?? name}</th>
              <td data-label="Worker">${worker_id || "router"}</td>
              <td data-label="Start" class="numeric">${format.seconds(start_s)}</td>
              <td data-label="Took" class="numeric">${format.seconds(duration_s)}</td>
            </tr>`,
          )}
        </tbody>
      </table>
      <dl>${facts.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
    </div>
  `;
}
