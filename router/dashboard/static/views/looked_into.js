// The workers that a view looks into: a page of them at a time, since each is asked by itself.
import { html, useState } from "../ui.js";
import { useTopic } from "../live.js";
import { usePolled } from "../ask.js";
import { Card, Empty, Failure, Known } from "../parts.js";
import { Table } from "../table.js";

const ON_A_PAGE = 16;
const EVERY_MS = 1000;
const order = new Intl.Collator("en", { numeric: true });

/** `isWanted` says of which workers, `summary` draws what is known of those on the page, `detail` of the chosen one. */
export function LookedInto({ title, about, columns, isWanted = () => true, nobody, summary: Summary, detail: Detail }) {
  const pools = useTopic("pools");
  const [page, setPage] = useState(0);
  const [chosen, setChosen] = useState("");
  const wanted = (pools.data?.workers ?? [])
    .filter((worker) => worker.state !== "lost" && isWanted(worker))
    .sort((one, other) => order.compare(one.worker_id, other.worker_id));
  const last = Math.max(0, Math.ceil(wanted.length / ON_A_PAGE) - 1);
  const at = Math.min(page, last);
  const shown = wanted.slice(at * ON_A_PAGE, (at + 1) * ON_A_PAGE);
  const told = usePolled(shown.length ? `/api/insights?${query(shown)}` : null, EVERY_MS);
  const rows = rowsOf(shown, told);
  const row = rows.find(({ worker }) => worker.worker_id === chosen) ?? rows[0];
  if (pools.data && !wanted.length) return nobody;
  const pages = last > 0 && html`<${Pages} at=${at} last=${last} total=${wanted.length} onChange=${setPage} />`;
  return html`
    <${Known} told=${pools} of="the workers">
      <${Card} title=${title} about=${about} actions=${pages} wide>
        ${told.error && html`<${Failure} error=${told.error} />`}
        ${Summary && rows.some(({ insights }) => insights) && html`<${Summary} rows=${rows} />`}
        ${
          unserved(rows) ??
          html`<${Table}
          name=${title}
          columns=${columns}
          rows=${rows}
          keyOf=${({ worker }) => worker.worker_id}
          sortedBy="worker"
          chosen=${Detail && row?.worker.worker_id}
          onChoose=${Detail && setChosen}
          empty=${html`<${Empty} title="No worker">…<//>`}
        />`
        }
      <//>
      ${Detail && row?.insights && html`<${Detail} worker=${row.worker} insights=${row.insights} rows=${rows} />`}
    <//>
  `;
}

const query = (workers) => workers.map(({ worker_id }) => `worker=${encodeURIComponent(worker_id)}`).join("&");

function rowsOf(workers, told) {
  return workers.map((worker) => {
    const { data, error } = told.data?.workers[worker.worker_id] ?? { data: null, error: null };
    return { worker, insights: data, error };
  });
}

/** Said once, where the router itself cannot tell it of any worker. */
function unserved(rows) {
  const isUnserved = rows.length > 0 && rows.every(({ error }) => error?.code === "UNIMPLEMENTED");
  return isUnserved ? html`<${Failure} error=${rows[0].error} of="what goes on inside workers" />` : null;
}

const Pages = ({ at, last, total, onChange }) => html`
  <span class="pages">
    <button aria-label="Workers before" disabled=${at === 0} onClick=${() => onChange(at - 1)}>←</button>
    <span>${at * ON_A_PAGE + 1}–${Math.min(total, (at + 1) * ON_A_PAGE)} of ${total}</span>
    <button aria-label="Workers after" disabled=${at === last} onClick=${() => onChange(at + 1)}>→</button>
  </span>
`;

/** The first column of every such table. */
export const WORKER = {
  id: "worker",
  label: "Worker",
  value: ({ worker }) => worker.worker_id,
  cell: ({ worker }) => worker.worker_id,
};

/** A column of what insights tell; without them, it says so. */
export const told = (column, of) => ({
  ...column,
  value: (row) => (row.insights ? column.value(of(row.insights), row) : null),
  cell: (row) => {
    if (row.error) return html`<span class="muted" title=${row.error.message}>no answer</span>`;
    return row.insights && of(row.insights) ? column.cell(of(row.insights), row) : "–";
  },
});
