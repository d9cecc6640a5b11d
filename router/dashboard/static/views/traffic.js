// The last minutes as three charts above one another's times: what came, and how long it took against the SLOs.
import { html, useMemo } from "../ui.js";
import { axis, Chart, tooltip } from "../chart.js";
import { Empty } from "../parts.js";
import * as format from "../format.js";

export function TrafficCharts({ traffic, slo }) {
  const { slices } = traffic;
  if (!slices.length) {
    return html`<${Empty} title="Nothing has come yet">Ask something: <code>pdserve chat</code><//>`;
  }
  return html`
    <div class="charts">
      <${Line} title="Requests" unit="/s" slices=${slices} lines=${REQUESTS} write=${format.number} />
      <${Line} title="TTFT p90" slices=${slices} lines=${TTFT} limit=${slo?.ttft_s} write=${format.seconds} />
      <${Line} title="TPOT p90" slices=${slices} lines=${TPOT} limit=${slo?.tpot_s} write=${format.seconds} />
    </div>
  `;
}

const REQUESTS = [
  { name: "came", colour: "accent", value: (slice) => slice.requests_per_s },
  { name: "refused", colour: "bad", dashed: true, value: (slice) => slice.refused_per_s },
];
const TTFT = [{ name: "TTFT p90", colour: "prefill", value: (slice) => slice.ttft_p90_s || null }];
const TPOT = [{ name: "TPOT p90", colour: "decode", value: (slice) => slice.tpot_p90_s || null }];

function Line({ title, unit = "", slices, lines, limit, write }) {
  const option = useMemo(() => (colours) => lineOption(colours, slices, lines, limit, write), [slices, limit]);
  const last = lines[0].value(slices.at(-1));
  const told = `${title}: ${write(last)}${unit} now${limit ? `; the SLO is ${write(limit)}` : ""}`;
  return html`
    <figure>
      <figcaption>
        <b>${title}</b> <span class="now">${write(last)}${unit}</span>
        ${limit ? html`<span class="muted">SLO ${write(limit)}</span>` : ""}
        ${lines.length > 1 && html`<span class="muted">dashed: refused</span>`}
      </figcaption>
      <${Chart} label=${told} height=${130} option=${option} />
    </figure>
  `;
}

function lineOption(colours, slices, lines, limit, write) {
  return {
    grid: { left: 4, right: 10, top: 10, bottom: 4, outerBoundsMode: "same", outerBoundsContain: "axisLabel" },
    xAxis: axis(colours, {
      type: "time",
      splitLine: { show: false },
      splitNumber: 3,
      axisLabel: { color: colours.muted, hideOverlap: true, formatter: "{HH}:{mm}" },
    }),
    yAxis: axis(colours, {
      type: "value",
      splitNumber: 3,
      max: limit ? (range) => Math.max(range.max, limit * 1.1) : null,
      axisLabel: { color: colours.muted, formatter: write, showMaxLabel: !limit },
    }),
    tooltip: { ...tooltip(colours), trigger: "axis", valueFormatter: write },
    series: lines.map((line, i) => ({
      type: "line",
      name: line.name,
      data: slices.map((slice) => [slice.at * 1000, line.value(slice)]),
      showSymbol: false,
      connectNulls: false,
      lineStyle: { width: 1.8, color: colours[line.colour], type: line.dashed ? "dashed" : "solid" },
      itemStyle: { color: colours[line.colour] },
      areaStyle: i === 0 ? { color: colours[line.colour], opacity: 0.1 } : undefined,
      markLine: i === 0 && limit ? sloLine(colours, limit) : undefined,
    })),
  };
}

function sloLine(colours, limit) {
  return {
    silent: true,
    symbol: "none",
    data: [{ yAxis: limit }],
    lineStyle: { color: colours.bad, type: "dashed", width: 1.2 },
    label: { formatter: "SLO", position: "insideEndTop", color: colours.bad, fontSize: 10 },
  };
}
