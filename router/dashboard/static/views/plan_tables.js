// What has been done to the pools and by whom, and the models of step times that plans rest on.
import { html } from "../ui.js";
import { Card, Empty, Meter, Role, State } from "../parts.js";
import { Table } from "../table.js";
import * as format from "../format.js";

const FLIPS = [
  { id: "worker", label: "Worker", value: (f) => f.worker_id, cell: (f) => f.worker_id },
  {
    id: "change",
    label: "Change",
    broad: true,
    cell: (f) => html`<${Role} role=${f.before} /> <span aria-label="to">→</span> <${Role} role=${f.after} />`,
  },
  { id: "state", label: "State", value: (f) => f.state, cell: (f) => html`<${State} state=${f.state} />` },
  { id: "at", label: "When", numeric: true, value: (f) => f.at, cell: (f) => format.moment(f.at) },
  {
    id: "took",
    label: "Took",
    about: "Until nothing of the old role ran there any more",
    numeric: true,
    value: (f) => f.took_s,
    cell: (f) => format.seconds(f.took_s),
  },
  {
    id: "moved",
    label: "Moved",
    about: "Sequences that were handed over for it",
    numeric: true,
    value: (f) => f.num_moved,
    cell: (f) => html`${format.count(f.num_moved)} <span class="unit">seq</span>`,
  },
  { id: "reason", label: "Why", broad: true, cell: (f) => html`<span class="prose">${f.reason || "–"}</span>` },
];

export function Flips({ flips }) {
  const running = flips.filter(({ state }) => state === "running").length;
  return html`
    <${Card} title="Role changes" about=${running ? `${running} under way` : "none under way"} wide id="flips">
      <${Table}
        name="Role changes"
        columns=${FLIPS}
        rows=${flips}
        keyOf=${(flip) => `${flip.worker_id} ${flip.at}`}
        sortedBy="at"
        descending
        empty=${html`<${Empty} title="No role has changed lately">
          The planner's changes and those set by hand are listed here.
        <//>`}
      />
    <//>
  `;
}

const DECISIONS = [
  { id: "when", label: "When", value: (d) => d.at, cell: (d) => format.moment(d.at) },
  { id: "what", label: "What", broad: true, value: (d) => d.what, cell: (d) => html`${d.what} <b>${d.role}</b>` },
  { id: "worker", label: "Worker", value: (d) => d.worker_id, cell: (d) => d.worker_id || "–" },
  { id: "router", label: "At", value: (d) => d.router, cell: (d) => d.router },
  {
    id: "key",
    label: "By",
    about: "The name of the key that was shown",
    value: (d) => d.key,
    cell: (d) => d.key || "–",
  },
];

export const Decisions = ({ decisions }) => html`
  <div class="scrolled" tabindex="0" role="region" aria-label="Decisions">
    <${Table}
      name="Decisions"
      columns=${DECISIONS}
      rows=${decisions}
      keyOf=${(d) => `${d.at} ${d.what} ${d.worker_id} ${d.role}`}
      sortedBy="when"
      descending
      empty=${html`<${Empty} title="Nothing has been decided yet">
        Plans, roles and drains that are set appear here, with the key that set them.
      <//>`}
    />
  </div>
`;

const MODELS = [
  {
    id: "kind",
    label: "Kind of worker",
    value: (m) => m.kind,
    cell: (m) => html`<span class="prose">${m.kind}</span>`,
  },
  {
    id: "number",
    label: "Workers",
    numeric: true,
    value: (m) => m.num_workers,
    cell: (m) => format.count(m.num_workers),
  },
  {
    id: "prompt",
    label: "1,000-token prompt",
    about: "To compute a prompt of 1,000 tokens by itself",
    numeric: true,
    value: (m) => prefillS(m, 1000),
    cell: (m) => format.seconds(prefillS(m, 1000)),
  },
  {
    id: "one",
    label: "Step of 1",
    about: "A decode step of one sequence with a context of 1,000 tokens",
    numeric: true,
    value: (m) => decodeS(m, 1),
    cell: (m) => format.seconds(decodeS(m, 1)),
  },
  {
    id: "many",
    label: "of 32",
    about: "A decode step of 32 such sequences",
    numeric: true,
    value: (m) => decodeS(m, 32),
    cell: (m) => format.seconds(decodeS(m, 32)),
  },
  {
    id: "tokens",
    label: "Tok/step",
    numeric: true,
    value: (m) => m.tokens_per_step,
    cell: (m) => format.number(m.tokens_per_step),
  },
  {
    id: "sure-prefill",
    label: "Sure of prefill",
    about: "Confidence of the model",
    numeric: true,
    value: (m) => m.prefill_confidence,
    cell: (m) => html`<${Sure} value=${m.prefill_confidence} />`,
  },
  {
    id: "sure-decode",
    label: "of decode",
    about: "Confidence of the model",
    numeric: true,
    value: (m) => m.decode_confidence,
    cell: (m) => html`<${Sure} value=${m.decode_confidence} />`,
  },
];

const Sure = ({ value }) => html`<${Meter} value=${value} of=${1} text=${format.share(value)} warnAbove=${2} />`;

const prefillS = (m, tokens) => m.prefill_base_s + m.prefill_token_s * tokens + m.prefill_pair_s * tokens * tokens;

/** Without what experts add, which depends on how many are touched. */
const decodeS = (m, sequences) => m.decode_base_s + (m.decode_sequence_s + 1000 * m.decode_context_token_s) * sequences;

export const StepTimes = ({ models }) => html`
  <${Card} title="Models of step times" about="Learnt from what workers measure; plans rest on them" wide>
    <${Table}
      name="Models of step times"
      columns=${MODELS}
      rows=${models}
      keyOf=${(m) => m.kind}
      sortedBy="kind"
      empty=${html`<${Empty} title="Nothing is learnt yet">
        Workers report their steps as soon as they have requests.
      <//>`}
    />
  <//>
`;
