// A chart in the colours of the page. `option` is ECharts' own, made by a function that is given the colours.
import { html, useEffect, useRef } from "./ui.js";
import { colour, onThemeChange } from "./theme.js";

const library = () => import("./vendor/echarts.esm.min.mjs");
const NAMES = [
  "text",
  "muted",
  "line",
  "surface",
  "accent",
  "prefill",
  "decode",
  "both",
  "good",
  "warn",
  "bad",
  "even",
];
const isStill = matchMedia("(prefers-reduced-motion: reduce)");

/** `label` says in words what is seen. `onChoose` is called with the index of what is clicked. */
export function Chart({ label, height, option, onChoose }) {
  const box = useRef(null);
  const drawn = useRef(null);
  const latest = useRef(null);
  latest.current = { option, onChoose };
  useEffect(() => opened(box.current, drawn, latest), []);
  useEffect(() => draw(drawn.current, latest.current.option), [option]);
  return html`<div class="chart" role="img" aria-label=${label} ref=${box} style=${{ height: `${height}px` }}></div>`;
}

/** Returns what closes it. */
function opened(box, drawn, latest) {
  let isOpen = true;
  const ends = [];
  void library().then((echarts) => {
    if (!isOpen) return;
    const chart = echarts.init(box, null, { renderer: "canvas" });
    drawn.current = chart;
    draw(chart, latest.current.option);
    chart.getZr().on("click", (event) => choose(chart, event, latest.current.onChoose));
    const watching = new ResizeObserver(() => chart.resize());
    watching.observe(box);
    ends.push(
      () => watching.disconnect(),
      onThemeChange(() => draw(chart, latest.current.option)),
      () => chart.dispose(),
    );
  });
  return () => {
    isOpen = false;
    drawn.current = null;
    ends.forEach((end) => end());
  };
}

function choose(chart, event, onChoose) {
  const point = [event.offsetX, event.offsetY];
  if (!onChoose || !chart.containPixel("grid", point)) return;
  onChoose(chart.convertFromPixel({ seriesIndex: 0 }, point)[0]);
}

function draw(chart, option) {
  if (!chart) return;
  const colours = Object.fromEntries(NAMES.map((name) => [name, colour(name)]));
  chart.setOption({ ...frame(colours), ...option(colours) }, { notMerge: true });
}

/** What all charts have in common. Tooltips are drawn, not HTML: that would need styles of its own. */
function frame(colours) {
  return {
    animation: false,
    animationDuration: isStill.matches ? 0 : 200,
    textStyle: { fontFamily: "system-ui, sans-serif", color: colours.muted, fontSize: 11 },
    tooltip: tooltip(colours),
    grid: { left: 8, right: 12, top: 16, bottom: 4, outerBoundsMode: "same" },
  };
}

export function tooltip(colours) {
  return {
    renderMode: "richText",
    confine: true,
    backgroundColor: colours.surface,
    borderColor: colours.line,
    padding: [6, 8],
    textStyle: { color: colours.text, fontSize: 12 },
  };
}

export function axis(colours, more) {
  return {
    axisLine: { lineStyle: { color: colours.line } },
    axisTick: { show: false },
    axisLabel: { color: colours.muted, hideOverlap: true },
    splitLine: { lineStyle: { color: colours.line, opacity: 0.6 } },
    nameTextStyle: { color: colours.muted },
    ...more,
  };
}
