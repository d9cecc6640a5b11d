// Predicted goodput over every ratio, with where we are, where the planner would go and what is chosen.
import { html, useMemo } from "../ui.js";
import { axis, Chart, tooltip } from "../chart.js";
import * as format from "../format.js";

export function GoodputChart({ ratios, plan, now, chosen, onChoose }) {
  const goal = plan.proposed ? ratios.findIndex((ratio) => ratio.num_prefill === plan.proposed.num_prefill) : -1;
  const enough = plan.slo?.percentile ?? 0;
  const shares = JSON.stringify({ default: enough, ...sharesOf(plan.slo_classes ?? []) });
  const option = useMemo(
    () => (colours) => goodputOption(colours, ratios, { now, goal, chosen, shares: JSON.parse(shares) }),
    [ratios, now, goal, chosen, shares],
  );
  const planned = goal >= 0 ? `, ${told(ratios[goal])} where the planner would go` : "";
  const label = `Predicted goodput by ratio: ${told(ratios[now])} now${planned}`;
  return html`
    <${Chart} label=${label} height=${230} option=${option} onChoose=${onChoose} />
    <p class="legend" aria-hidden="true">
      <span><i class="swatch solid"></i>${meaning(enough, plan.slo_classes ?? [])}</span>
      <span><i class="swatch pale"></i>does not</span>
      <span><i class="swatch ring"></i>chosen</span>
    </p>
  `;
}

const sharesOf = (classes) => Object.fromEntries(classes.map(({ name, slo }) => [name, slo.percentile]));
const meaning = (enough, classes) =>
  classes.length ? "gives every class its share" : `meets the SLO for ${format.share(enough)} of what comes`;

function isEnough({ attainment, classes }, shares) {
  if (!classes?.length) return attainment >= shares.default;
  return classes.every((each) => each.attainment >= (shares[each.slo_class] ?? 0));
}

const told = (ratio) =>
  `${format.number(ratio.goodput)} requests a second at ${ratio.num_prefill} to ${ratio.num_decode}`;
const name = (ratio) => `${ratio.num_prefill}:${ratio.num_decode}`;

function goodputOption(colours, ratios, marks) {
  return {
    grid: { left: 4, right: 8, top: 34, bottom: 18, outerBoundsMode: "same", outerBoundsContain: "axisLabel" },
    xAxis: axis(colours, {
      type: "category",
      data: ratios.map(name),
      splitLine: { show: false },
      name: "prefill : decode",
      nameLocation: "middle",
      nameGap: 24,
    }),
    yAxis: axis(colours, {
      type: "value",
      splitNumber: 4,
      axisLabel: { color: colours.muted, formatter: (value) => format.number(value) },
    }),
    tooltip: {
      ...tooltip(colours),
      trigger: "axis",
      axisPointer: { type: "shadow" },
      formatter: ([{ dataIndex }]) => inWords(ratios[dataIndex]),
    },
    series: [
      {
        type: "bar",
        barCategoryGap: ratios.length > 60 ? "8%" : "28%",
        barMaxWidth: 46,
        data: ratios.map((ratio, i) => bar(colours, ratio, i === marks.chosen, isEnough(ratio, marks.shares))),
        markPoint: { silent: true, symbol: "circle", symbolSize: 0.1, data: labels(colours, ratios, marks) },
      },
    ],
  };
}

function bar(colours, ratio, isChosen, isGood) {
  const border = isChosen ? { borderColor: colours.text, borderWidth: 2 } : {};
  return {
    value: ratio.goodput,
    itemStyle: { color: isGood ? colours.accent : colours.even, borderRadius: [3, 3, 0, 0], ...border },
  };
}

/** One label at a place, whatever falls together there. */
function labels(colours, ratios, { now, goal, chosen }) {
  const words = new Map();
  for (const [word, i] of [
    ["now", now],
    ["planner", goal],
    ["chosen", chosen === now ? -1 : chosen],
  ]) {
    if (i >= 0) words.set(i, [...(words.get(i) ?? []), word]);
  }
  return [...words].map(([i, list]) => ({
    coord: [i, ratios[i].goodput],
    label: {
      show: true,
      formatter: `${list.join(" + ")}\n▼`,
      position: "top",
      distance: 2,
      color: colours.text,
      fontWeight: 600,
      fontSize: 11,
      lineHeight: 12,
    },
  }));
}

function inWords(ratio) {
  return [
    `${ratio.num_prefill} prefill : ${ratio.num_decode} decode`,
    `${format.number(ratio.goodput)} requests/s within the SLOs (${format.share(ratio.attainment)})`,
    ...(ratio.classes ?? []).map((each) => `${each.slo_class}: ${format.share(each.attainment)}`),
    format.times(ratio),
  ].join("\n");
}
