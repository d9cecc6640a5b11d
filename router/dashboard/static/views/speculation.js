// Speculation: how far drafts are accepted, how long they are made, and what that gains.
import { html, useMemo } from "../ui.js";
import { axis, Chart, tooltip } from "../chart.js";
import { Card, Empty, Role } from "../parts.js";
import { LookedInto, told, WORKER } from "./looked_into.js";
import * as format from "../format.js";

const KINDS = ["accent", "both", "prefill", "decode"]; // colours of sources, by turn
const SYMBOLS = ["circle", "triangle", "rect", "diamond"]; // and shapes, for who sees no colours

const best = (insights) =>
  insights.drafts.reduce((most, draft) => (draft.drafted_tokens > (most?.drafted_tokens ?? -1) ? draft : most), null);

const COLUMNS = [
  WORKER,
  {
    id: "role",
    label: "Role",
    value: ({ worker }) => worker.role,
    cell: ({ worker }) => html`<${Role} role=${worker.role} />`,
  },
  told(
    {
      id: "sources",
      label: "Drafts from",
      value: (all) => all.map((d) => d.source).join(),
      cell: (all) => all.map((d) => d.source).join(", ") || "nothing",
    },
    (i) => i.drafts,
  ),
  told(
    {
      id: "speedup",
      label: "Speed-up",
      about: "Measured, against the forecast step without drafts",
      numeric: true,
      value: (d) => d.speedup,
      cell: speedup,
    },
    best,
  ),
  told(
    {
      id: "tokens",
      label: "Tok/step",
      about: "Tokens of one sequence in a step",
      numeric: true,
      value: (d) => d.tokens_per_step,
      cell: (d) => d.tokens_per_step.toFixed(2),
    },
    best,
  ),
  told(
    {
      id: "first",
      label: "First accepted",
      about: "Share of drafts whose first token stands",
      numeric: true,
      value: (d) => d.acceptance[0],
      cell: (d) => format.share(d.acceptance[0]),
    },
    best,
  ),
  told(
    {
      id: "share",
      label: "All accepted",
      about: "Share of all drafted tokens that stand",
      numeric: true,
      value: accepted,
      cell: (d) => format.share(accepted(d)),
    },
    best,
  ),
  told(
    {
      id: "k",
      label: "Chosen K",
      about: "The most frequent number of drafted tokens",
      numeric: true,
      value: usualLength,
      cell: (d) => usualLength(d),
    },
    best,
  ),
  told(
    {
      id: "why",
      label: "Why so many",
      broad: true,
      value: (why) => why,
      cell: (why) => html`<span class="prose">${why}</span>`,
    },
    (i) => i.draft_reason,
  ),
];

function speedup({ speedup: times }) {
  return times ? html`<b class=${times >= 1 ? "good" : "bad"}>${times.toFixed(2)}×</b>` : "–";
}

function accepted({ accepted_tokens, drafted_tokens }) {
  return drafted_tokens > 0 ? accepted_tokens / drafted_tokens : null;
}

function usualLength({ lengths }) {
  return lengths.length ? lengths.indexOf(Math.max(...lengths)) : "–";
}

const nobody = html`<${Empty} title="No worker decodes">
  Drafts are made where answers are written: start a decode worker, or let one change its role.
<//>`;

export const Speculation = () => html`
  <${LookedInto}
    title="Speculation"
    about="Lately, by worker; choose one to see more of it below"
    columns=${COLUMNS}
    isWanted=${({ role }) => role !== "prefill"}
    nobody=${nobody}
    detail=${Detail}
  />
`;

function Detail({ worker, insights }) {
  const { drafts } = insights;
  if (!drafts.length) {
    return html`<${Card} title=${worker.worker_id} wide><${Empty} title="Nothing drafts here">
      Start the worker with <code>--drafter auto</code> for speculative decoding. ${insights.draft_reason}
    <//><//>`;
  }
  return html`
    <div class="columns">
      <${Card} title="Acceptance by position" about=${`${worker.worker_id}, of drafts that got that far`}>
        <${Acceptance} drafts=${drafts} />
      <//>
      <${Card} title="Drafted tokens (K)" about=${`${worker.worker_id}, steps by how many each sequence drafted`}>
        <${Lengths} drafts=${drafts} />
      <//>
    </div>
  `;
}

function Acceptance({ drafts }) {
  const option = useMemo(() => (colours) => acceptanceOption(colours, drafts), [JSON.stringify(drafts)]);
  const words = drafts.map(
    ({ source, acceptance }) => `${source}: ${acceptance.map((a) => format.share(a)).join(", ")}`,
  );
  return html`<${Chart} label=${`Acceptance by position. ${words.join(". ")}`} height=${240} option=${option} />`;
}

const most = (drafts, of) => Math.max(1, ...drafts.map((draft) => of(draft).length));
const legend = (colours) => ({ top: 0, right: 0, itemHeight: 9, itemWidth: 16, textStyle: { color: colours.muted } });
const GRID = { left: 4, right: 12, top: 34, bottom: 20, outerBoundsMode: "same", outerBoundsContain: "axisLabel" };
const below = (name) => ({ name, nameLocation: "middle", nameGap: 24 });

function acceptanceOption(colours, drafts) {
  const positions = Array.from({ length: most(drafts, (d) => d.acceptance) }, (_, i) => i + 1);
  return {
    grid: GRID,
    legend: legend(colours),
    tooltip: { ...tooltip(colours), trigger: "axis", valueFormatter: (value) => format.share(value) },
    xAxis: axis(colours, {
      type: "category",
      data: positions,
      splitLine: { show: false },
      ...below("position in the draft"),
    }),
    yAxis: axis(colours, {
      type: "value",
      min: 0,
      max: 1,
      interval: 0.25,
      axisLabel: { color: colours.muted, formatter: (v) => format.share(v) },
    }),
    series: drafts.map(({ source, acceptance }, i) => ({
      type: "line",
      name: source,
      data: acceptance,
      symbol: SYMBOLS[i % SYMBOLS.length],
      symbolSize: 8,
      lineStyle: { color: colours[KINDS[i % KINDS.length]], width: 2 },
      itemStyle: { color: colours[KINDS[i % KINDS.length]] },
    })),
  };
}

function Lengths({ drafts }) {
  const option = useMemo(() => (colours) => lengthsOption(colours, drafts), [JSON.stringify(drafts)]);
  const words = drafts.map(({ source, lengths }) => `${source}: ${lengths.join(", ")} steps`);
  const label = `Steps by drafted tokens from 0 on. ${words.join(". ")}`;
  return html`<${Chart} label=${label} height=${240} option=${option} />`;
}

function lengthsOption(colours, drafts) {
  const lengths = Array.from({ length: most(drafts, (d) => d.lengths) }, (_, i) => i);
  const part = ({ lengths: all }) =>
    all.map(
      (n) =>
        n /
        Math.max(
          1,
          all.reduce((sum, each) => sum + each, 0),
        ),
    );
  return {
    grid: GRID,
    legend: legend(colours),
    tooltip: {
      ...tooltip(colours),
      trigger: "axis",
      axisPointer: { type: "shadow" },
      valueFormatter: (value) => `${format.share(value)} of steps`,
    },
    xAxis: axis(colours, { type: "category", data: lengths, splitLine: { show: false }, ...below("tokens drafted") }),
    yAxis: axis(colours, {
      type: "value",
      splitNumber: 4,
      axisLabel: { color: colours.muted, formatter: (v) => format.share(v) },
    }),
    series: drafts.map((draft, i) => ({
      type: "bar",
      name: draft.source,
      data: part(draft),
      barMaxWidth: 22,
      itemStyle: {
        color: colours[KINDS[i % KINDS.length]],
        borderRadius: [2, 2, 0, 0],
        decal:
          i % 2
            ? { symbol: "rect", rotation: 0.78, dashArrayX: [1, 0], dashArrayY: [2, 4], color: colours.surface }
            : undefined,
      },
    })),
  };
}
