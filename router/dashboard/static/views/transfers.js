// Transfers: how much KV moves, what of it is not hidden behind prefill, and what hand-overs have left behind.
import { html } from "../ui.js";
import { Empty, Role, Stat } from "../parts.js";
import { LookedInto, told, WORKER } from "./looked_into.js";
import * as format from "../format.js";

const of = (insights) => insights.transfers;
const column = (column) => told({ numeric: true, ...column }, of);
const number = (id, label, about, field) =>
  column({ id, label, about, value: (t) => t[field], cell: (t) => format.count(t[field]) });
const suspect = (id, label, about, field) =>
  column({
    id,
    label,
    about,
    value: (t) => t[field],
    cell: (t) => (t[field] ? html`<b class="bad">${format.count(t[field])}</b>` : "0"),
  });
const rate = (id, label, field) =>
  column({
    id,
    label,
    value: (t) => t[field],
    cell: (t) => html`${format.bytes(t[field])}<span class="unit">/s</span>`,
  });
const time = (id, label, about, field) =>
  column({ id, label, about, value: (t) => t[field], cell: (t) => format.milliseconds(t[field]) });

const COLUMNS = [
  WORKER,
  {
    id: "role",
    label: "Role",
    value: ({ worker }) => worker.role,
    cell: ({ worker }) => html`<${Role} role=${worker.role} />`,
  },
  rate("sent", "Sent", "sent_bytes_per_s"),
  rate("received", "Received", "received_bytes_per_s"),
  time("p50", "Exposed p50", "What of a hand-over was not hidden behind prefill", "exposed_p50_s"),
  time("p90", "Exposed p90", "What of a hand-over was not hidden behind prefill", "exposed_p90_s"),
  number("handovers", "Hand-overs", "Since the start", "num_handovers"),
  number("leases", "Leases", "Tickets that are open now", "num_leases"),
  suspect("expired", "Expired", "Leases that have run out, since the start", "num_expired_leases"),
  column({
    id: "quarantine",
    label: "Quarantine",
    about: "Blocks into which somebody may still write, and since when",
    value: (t) => t.num_quarantined_blocks,
    cell: quarantine,
  }),
  suspect("failed", "Failed writes", "Since the start", "num_failed_writes"),
  suspect("rejected", "Rejected", "Hand-overs that failed their checks, since the start", "num_rejected"),
];

function quarantine({ num_quarantined_blocks: number, oldest_quarantine_s: age }) {
  return number
    ? html`<b class="bad">${format.plural(number, "block")}</b> <span class="unit">${format.seconds(age)}</span>`
    : "0";
}

function Summary({ rows }) {
  const known = rows.flatMap(({ insights }) => (insights?.transfers ? [insights.transfers] : []));
  const sum = (field) => known.reduce((total, each) => total + each[field], 0);
  const held = sum("num_quarantined_blocks");
  const worst = Math.max(0, ...known.map((each) => each.exposed_p90_s));
  return html`
    <dl class="stats ruled" aria-label="Of the workers below">
      <${Stat} label="Sent in all" value=${format.bytes(sum("sent_bytes_per_s"))} unit="/s" />
      <${Stat} label="Worst exposed p90" value=${format.milliseconds(worst)} />
      <${Stat} label="Open leases" value=${format.count(sum("num_leases"))} />
      <${Stat} label="Blocks in quarantine" value=${format.count(held)} tone=${held ? "bad" : ""} />
    </dl>
  `;
}

const nobody = html`<${Empty} title="No worker is there">Their hand-overs appear once workers have registered.<//>`;

export const Transfers = () => html`
  <${LookedInto}
    title="Transfers"
    about="KV between workers: rates and exposed times lately, counts since each worker's start"
    columns=${COLUMNS}
    nobody=${nobody}
    summary=${Summary}
  />
`;
