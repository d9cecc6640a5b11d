// Experts: which of them the tokens choose, layer by layer, and where that is so uneven that one holds up the rest.
import { html, useMemo } from "../ui.js";
import { axis, Chart, tooltip } from "../chart.js";
import { Card, Empty, Role } from "../parts.js";
import { LookedInto, told, WORKER } from "./looked_into.js";
import * as format from "../format.js";

const ALERT = 2; // greatest share over the mean
const worst = ({ experts }) =>
  experts.reduce((most, layer) => (layer.imbalance > (most?.imbalance ?? 0) ? layer : most), null);
const layers = ({ experts }) => (experts.length ? experts : null);
const alarming = (all) => all.filter(({ imbalance }) => imbalance > ALERT);

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
      id: "layers",
      label: "Layers",
      numeric: true,
      value: (all) => all.length,
      cell: (all) => format.count(all.length),
    },
    layers,
  ),
  told(
    {
      id: "experts",
      label: "Experts each",
      numeric: true,
      value: (all) => all[0].shares.length,
      cell: (all) => format.count(all[0].shares.length),
    },
    layers,
  ),
  told(
    {
      id: "worst",
      label: "Worst imbalance",
      about: "Greatest share over the mean share; 1 is even",
      numeric: true,
      value: (w) => w.imbalance,
      cell: (w) => html`<${Imbalance} value=${w.imbalance} />`,
    },
    worst,
  ),
  told({ id: "where", label: "In layer", numeric: true, value: (w) => w.layer, cell: (w) => w.layer }, worst),
  told(
    {
      id: "alerts",
      label: `Layers above ${ALERT}`,
      numeric: true,
      value: (all) => alarming(all).length,
      cell: (all) => (alarming(all).length ? html`<b class="bad">${alarming(all).length}</b>` : "none"),
    },
    layers,
  ),
];

const Imbalance = ({ value }) =>
  html`<span class=${value > ALERT ? "bad" : ""}>${value > ALERT ? "⚠ " : ""}${value.toFixed(2)}</span>`;

const nobody = html`<${Empty} title="No worker is there">Their experts appear once workers have registered.<//>`;

export const Experts = () => html`
  <${LookedInto}
    title="Experts"
    about="Lately, by worker; choose one to see its layers below"
    columns=${COLUMNS}
    nobody=${nobody}
    detail=${Detail}
  />
`;

function Detail({ worker, insights, rows }) {
  const { experts } = insights;
  if (!experts.length) {
    return html`<${Card} title="Experts" wide><${Empty} title="This model has no experts">
      Every layer of it is dense. A Mixture-of-Experts model, such as demo-moe, shows here which experts its tokens
      choose.
    <//><//>`;
  }
  return html`
    <${Alerts} rows=${rows} />
    <${Card} title="Load of experts" about=${`${worker.worker_id}: times the even share; outlined above ${ALERT}`} wide>
      <${Heatmap} experts=${experts} />
    <//>
  `;
}

function Alerts({ rows }) {
  const found = rows.flatMap(({ worker, insights }) =>
    alarming(insights?.experts ?? []).map((layer) => ({ worker, ...layer })),
  );
  if (!found.length)
    return html`<p class="notice good" role="status">
      No layer of the workers above leans on one expert: every imbalance is ${ALERT} or less.
    </p>`;
  return html`
    <div class="notice bad" role="alert">
      <b>⚠ ${format.plural(found.length, "layer")} above ${ALERT}</b>
      <ul>
        ${found.slice(0, 8).map(
          ({ worker, layer, shares, imbalance }) => html`<li key=${`${worker.worker_id} ${layer}`}>
            ${worker.worker_id}, layer ${layer}: expert ${shares.indexOf(Math.max(...shares))} gets
            ${` ${imbalance.toFixed(2)} times its even share`}
          </li>`,
        )}
      </ul>
      ${found.length > 8 && html`<p>and ${found.length - 8} more</p>`}
    </div>
  `;
}

function Heatmap({ experts }) {
  const option = useMemo(() => (colours) => heatmapOption(colours, experts), [JSON.stringify(experts)]);
  const top = worst({ experts });
  const worstOf = `The most uneven is layer ${top.layer}, with an imbalance of ${top.imbalance.toFixed(2)}`;
  const label = `Load of ${experts[0].shares.length} experts in ${experts.length} layers. ${worstOf}`;
  const height = Math.min(900, 84 + Math.max(12, Math.min(20, 520 / experts.length)) * experts.length);
  return html`<${Chart} label=${label} height=${Math.round(height)} option=${option} />`;
}

function heatmapOption(colours, experts) {
  const width = experts[0].shares.length;
  const cells = experts.flatMap(({ shares }, y) =>
    shares.map((share, x) => cell(colours, x, y, share * shares.length)),
  );
  const names = Array.from({ length: width }, (_, i) => i);
  return {
    grid: { left: 34, right: 8, top: 8, bottom: 66, outerBoundsMode: "same", outerBoundsContain: "axisLabel" },
    xAxis: axis(colours, {
      type: "category",
      data: names,
      name: "expert",
      nameLocation: "middle",
      nameGap: 22,
      splitLine: { show: false },
    }),
    yAxis: axis(colours, {
      type: "category",
      data: experts.map(({ layer }) => layer),
      inverse: true,
      name: "layer",
      nameLocation: "middle",
      nameGap: 26,
      splitLine: { show: false },
    }),
    tooltip: {
      ...tooltip(colours),
      formatter: ({ value: [x, y, load] }) =>
        `layer ${experts[y].layer}, expert ${x}\n${load.toFixed(2)} times the even share`,
    },
    visualMap: {
      min: 0,
      max: ALERT,
      calculable: false,
      orient: "horizontal",
      left: "center",
      bottom: 0,
      itemHeight: 160,
      itemWidth: 10,
      text: [`${ALERT} and more`, "0"],
      textStyle: { color: colours.muted },
      inRange: { color: [colours.surface, colours.even, colours.bad] },
    },
    series: [
      {
        type: "heatmap",
        data: cells,
        label: { show: width <= 16, fontSize: 10, formatter: ({ value }) => value[2].toFixed(1) },
      },
    ],
  };
}

function cell(colours, x, y, load) {
  const isAlarming = load > ALERT;
  return {
    value: [x, y, Number(load.toFixed(3))],
    itemStyle: { borderColor: isAlarming ? colours.text : colours.surface, borderWidth: isAlarming ? 2 : 1 },
    label: { color: load > 1.6 ? colours.surface : colours.text, fontWeight: isAlarming ? 700 : 400 },
  };
}
