// Pools: how the cluster fares against its SLOs, and every worker.
import { html, useMemo, useState } from "../ui.js";
import { useTopic } from "../live.js";
import { Card, Empty, Known, Meter, Role, Stat, State } from "../parts.js";
import { Table } from "../table.js";
import { TrafficCharts } from "./traffic.js";
import { Ratio } from "./ratio.js";
import * as format from "../format.js";

export function Pools() {
  const pools = useTopic("pools");
  const traffic = useTopic("traffic");
  const { data: plan } = useTopic("plan");
  return html`
    <${Summary} pools=${pools.data} traffic=${traffic.data} slo=${plan?.slo} />
    <${Card} title="Traffic" about="The last five minutes, as this router saw them" wide>
      <${Known} told=${traffic} of="traffic"><${TrafficCharts} traffic=${traffic.data} slo=${plan?.slo} /><//>
    <//>
    <${Known} told=${pools} of="the workers"><${Workers} workers=${pools.data?.workers} /><//>
  `;
}

function Summary({ pools, traffic, slo }) {
  return html`
    <div class="summary">
      <${Ratio} workers=${pools?.workers ?? []} />
      <dl class="stats">
        <${Stat}
          label="In flight"
          value=${format.count(pools?.num_requests_in_flight)}
          detail=${`${format.count(pools?.num_requests_waiting)} wait for room`}
        />
        <${Stat}
          label="Requests"
          value=${format.number(traffic?.requests_per_s)}
          unit="/s"
          detail=${`${format.short(traffic?.output_tokens_per_s)} tokens/s out`}
        />
        <${Stat}
          label="Within both SLOs"
          value=${format.share(traffic?.attainment, 1)}
          tone=${tone(traffic && isWithin(traffic, slo))}
          detail=${html`<${Promised} classes=${traffic?.classes ?? []} slo=${slo} />`}
        />
        <${Latency} label="TTFT" told=${traffic?.ttft_s} limit=${slo?.ttft_s} percentile=${slo?.percentile} />
        <${Latency} label="TPOT" told=${traffic?.tpot_s} limit=${slo?.tpot_s} percentile=${slo?.percentile} />
      </dl>
    </div>
  `;
}

const tone = (isGood) => (isGood === null || isGood === undefined ? "" : isGood ? "good" : "bad");

/** Of each SLO class, where there are several, as of all. */
function isWithin({ attainment, classes }, slo) {
  if (!classes?.length) return attainment >= (slo?.percentile ?? 0);
  return classes.every((each) => each.attainment >= each.share);
}

function Promised({ classes, slo }) {
  if (!classes.length) return slo ? `${format.share(slo.percentile)} are to be` : "no SLO known";
  return classes.map((each) => {
    const told = each.num_answers ? format.share(each.attainment, 1) : "no answers";
    const text = `${each.slo_class} ${told} of ${format.share(each.share)}`;
    return html`<span class="whole" key=${each.slo_class}>${text}</span><br />`;
  });
}

/** p50 / p90 / p99, of which the one that the SLO is about is measured against it. */
function Latency({ label, told, limit, percentile }) {
  const name = ["p50", "p90", "p99"].find((each) => Number(each.slice(1)) >= 100 * (percentile ?? 0.9)) ?? "p99";
  const value = told?.count ? told[name] : null;
  const verdict = value === null || !limit ? "" : value <= limit ? ", within" : ", above";
  return html`<${Stat}
    label=${`${label} ${name}`}
    value=${format.seconds(value)}
    tone=${verdict && tone(value <= limit)}
    detail=${
      told?.count
        ? html`${limit ? `SLO ${format.seconds(limit)}${verdict}` : "no SLO known"}<br />
            <span class="whole">p50 ${format.seconds(told.p50)}</span> ·${" "}
            <span class="whole">p99 ${format.seconds(told.p99)}</span>`
        : "no answers yet"
    }
  />`;
}

const COLUMNS = [
  { id: "name", label: "Worker", value: (w) => w.worker_id, cell: (w) => w.worker_id },
  {
    id: "role",
    label: "Role",
    value: (w) => w.role,
    cell: (w) =>
      html`<${Role} role=${w.role} />${
        !w.flippable && html` <span class="muted" title="Its role cannot be changed">fixed</span>`
      }`,
  },
  { id: "state", label: "State", value: (w) => w.state, cell: (w) => html`<${State} state=${w.state} />` },
  {
    id: "running",
    label: "Running",
    about: "Sequences that decode, of as many as it runs at once",
    numeric: true,
    value: (w) => w.num_running,
    cell: (w) =>
      html`<${Meter}
        value=${w.num_running}
        of=${w.max_running}
        text=${w.max_running ? `${w.num_running} / ${w.max_running}` : w.num_running}
      />`,
  },
  {
    id: "waiting",
    label: "Waiting",
    about: "Requests in its queue",
    numeric: true,
    value: (w) => w.num_waiting,
    cell: (w) => format.count(w.num_waiting),
  },
  {
    id: "queued",
    label: "To prefill",
    about: "Prompt tokens that are not yet computed",
    numeric: true,
    value: (w) => w.queued_prefill_tokens,
    cell: (w) => html`${format.short(w.queued_prefill_tokens)} <span class="unit">tok</span>`,
  },
  {
    id: "blocks",
    label: "KV blocks",
    about: "Blocks of the KV cache that are in use; those in quarantine are among them",
    numeric: true,
    value: (w) => w.num_used_blocks / Math.max(1, w.num_blocks),
    cell: (w) => html`<${Meter} value=${w.num_used_blocks} of=${w.num_blocks} text=${blocks(w)} />`,
  },
  {
    id: "prefill",
    label: "Prefill",
    about: "Prompt tokens a second, as measured lately",
    numeric: true,
    value: (w) => w.prefill_tokens_per_s,
    cell: (w) =>
      w.prefill_tokens_per_s ? html`${format.short(w.prefill_tokens_per_s)} <span class="unit">tok/s</span>` : "–",
  },
  {
    id: "step",
    label: "Step",
    about: "A decode step, as measured lately",
    numeric: true,
    value: (w) => w.decode_step_s,
    cell: (w) => format.milliseconds(w.decode_step_s),
  },
  {
    id: "tokens",
    label: "Tok/step",
    about: "Tokens of one sequence in a step: above 1 where drafts are accepted",
    numeric: true,
    value: (w) => w.tokens_per_step,
    cell: (w) => (w.tokens_per_step ? w.tokens_per_step.toFixed(2) : "–"),
  },
  { id: "drafter", label: "Drafter", value: (w) => w.drafter, cell: (w) => w.drafter || "–" },
  {
    id: "age",
    label: "Heard",
    about: "How long ago it last reported",
    numeric: true,
    value: (w) => w.reported_ago_s,
    cell: (w) => html`<span class=${w.reported_ago_s > 2 ? "bad" : ""}>${w.reported_ago_s.toFixed(1)} s</span>`,
  },
];

const blocks = ({ num_used_blocks: used, num_blocks: all, num_quarantined_blocks: held }) => html`
  ${held > 0 && html`<span class="bad whole" title=${`${format.plural(held, "block")} in quarantine`}>⚠ ${held}</span>`}
  ${` ${format.share(used / Math.max(1, all))}`}
`;

const ROLES = ["prefill", "decode", "both"];
const STATES = ["ready", "draining", "silent", "lost"];

function Workers({ workers }) {
  const [filter, setFilter] = useState({ text: "", role: "", state: "" });
  const shown = useMemo(() => workers.filter((worker) => matches(worker, filter)), [workers, filter]);
  const change = (name) => (event) => setFilter({ ...filter, [name]: event.target.value });
  const actions = html`
    <input
      type="search"
      placeholder="Find a worker"
      aria-label="Find a worker"
      value=${filter.text}
      onInput=${change("text")}
    />
    <${Choice} label="Role" value=${filter.role} of=${ROLES} onChange=${change("role")} />
    <${Choice} label="State" value=${filter.state} of=${STATES} onChange=${change("state")} />
  `;
  const about =
    shown.length === workers.length
      ? format.plural(workers.length, "worker")
      : `${shown.length} of ${workers.length} workers`;
  return html`
    <${Card} title="Workers" about=${about} actions=${actions} wide id="workers">
      <${Table}
        name="Workers"
        columns=${COLUMNS}
        rows=${shown}
        keyOf=${(worker) => worker.worker_id}
        sortedBy="name"
        empty=${html`<${NoWorkers} hasAny=${workers.length > 0} />`}
      />
    <//>
  `;
}

function matches(worker, { text, role, state }) {
  const words = `${worker.worker_id} ${worker.address} ${worker.drafter}`.toLowerCase();
  return (
    words.includes(text.trim().toLowerCase()) && (!role || worker.role === role) && (!state || worker.state === state)
  );
}

const Choice = ({ label, value, of, onChange }) => html`
  <select aria-label=${label} value=${value} onChange=${onChange}>
    <option value="">${label}: all</option>
    ${of.map((each) => html`<option key=${each} value=${each}>${each}</option>`)}
  </select>
`;

const NoWorkers = ({ hasAny }) =>
  hasAny
    ? html`<${Empty} title="No worker matches">Change or clear the filters above.<//>`
    : html`<${Empty} title="No worker has registered">
        Start one with <code>pdserve worker --router HOST:PORT</code>; it appears here by itself.
      <//>`;
