// The curve over all ratios, and the slider that chooses one: previewed as it moves, set only by the button.
import { html, useEffect, useRef, useState } from "../ui.js";
import { setPlan } from "../ask.js";
import { Card, Empty, Failure, Role } from "../parts.js";
import { GoodputChart } from "./goodput_chart.js";
import * as format from "../format.js";

const SETTLED_MS = 250; // that the slider has to stand still before the router is asked
const DURATIONS = [
  ["15 minutes", 900],
  ["1 hour", 3600],
  ["4 hours", 14400],
  ["1 day", 86400],
  ["1 week", 604800],
];

export function Chooser({ plan, locked }) {
  const ratios = plan.ratios.length ? plan.ratios : unpredicted(plan);
  const now = nearest(ratios, plan);
  const [chosen, setChosen] = useState(null);
  if (!ratios.length) {
    return html`<${Card} title="Ratio" wide>
      <${Empty} title="There is nothing to share out yet">
        It takes at least two workers whose roles can be changed: <code>pdserve worker</code>
      <//>
    <//>`;
  }
  const index = chosen === null ? now : Math.min(chosen, ratios.length - 1);
  return html`
    <${Card} title="Goodput by ratio" about=${about(plan)} wide id="chooser">
      ${
        plan.ratios.length
          ? html`<${GoodputChart}
              ratios=${ratios}
              plan=${plan}
              now=${now}
              chosen=${index}
              onChoose=${(i) => !locked && setChosen(i)}
            />`
          : html`<p class="muted">No ratio can be predicted yet: that takes measured steps and a few requests.</p>`
      }
      <${Slider} ratios=${ratios} index=${index} now=${now} locked=${locked} onChange=${setChosen} />
      <${Change}
        ratio=${ratios[index]}
        isNow=${chosen === null || index === now}
        locked=${locked}
        onDone=${() => setChosen(null)}
      />
    <//>
  `;
}

function about({ slo, slo_classes: classes }) {
  if (!slo) return "";
  if (classes?.length) return "Requests a second that meet the SLOs of their class, as predicted for what is expected";
  const limits = `TTFT ${format.seconds(slo.ttft_s)}, TPOT ${format.seconds(slo.tpot_s)}`;
  return `Requests a second that meet both SLOs (${limits}), as predicted for the load that is expected`;
}

/** Every ratio of the workers there are, where nothing is predicted. */
function unpredicted({ num_prefill, num_decode, num_both }) {
  const total = num_prefill + num_decode - num_both;
  return Array.from({ length: Math.max(0, total - 1) }, (_, i) => ({ num_prefill: i + 1, num_decode: total - i - 1 }));
}

/** Where we are. Workers that do both are in both pools; if the plan in force shares them out, as it does. */
function nearest(ratios, { num_prefill, num_decode, num_both, plan }) {
  const total = num_prefill + num_decode - num_both;
  const isShared = num_both > 0 && plan && plan.num_prefill + plan.num_decode === total;
  const here = isShared ? plan.num_prefill : num_prefill - num_both / 2;
  const distance = ({ num_prefill: other }) => Math.abs(other - here);
  return ratios.reduce((best, ratio, i) => (distance(ratio) < distance(ratios[best]) ? i : best), 0);
}

function Slider({ ratios, index, now, locked, onChange }) {
  const ratio = ratios[index];
  return html`
    <div class="slider">
      <label for="ratio-slider">Ratio <b>${ratio.num_prefill} : ${ratio.num_decode}</b></label>
      <input
        id="ratio-slider"
        type="range"
        min="0"
        max=${ratios.length - 1}
        step="1"
        value=${index}
        disabled=${Boolean(locked)}
        aria-valuetext=${inWords(ratio)}
        onInput=${(event) => onChange(Number(event.target.value))}
      />
      <span class="ends" aria-hidden="true"><span>more decode</span><span>more prefill</span></span>
      <p class="predicted">${predicted(ratio, ratios[now])}</p>
    </div>
  `;
}

function inWords({ num_prefill, num_decode, goodput }) {
  const predicted = goodput === undefined ? "" : `: ${format.number(goodput)} requests a second`;
  return `${num_prefill} prefill, ${num_decode} decode${predicted}`;
}

function predicted(ratio, now) {
  if (ratio.goodput === undefined) return "";
  const difference = ratio.goodput - now.goodput;
  const against =
    Math.abs(difference) < 0.005
      ? ""
      : ` (${difference > 0 ? "+" : "−"}${format.number(Math.abs(difference))} against now)`;
  const [goodput, share] = [format.number(ratio.goodput), format.share(ratio.attainment)];
  const classes = (ratio.classes ?? []).map((each) => `${each.slo_class} ${format.share(each.attainment)}`);
  const ofEach = classes.length ? ` (${classes.join(", ")})` : "";
  const rest = `${against}, ${share} of what comes${ofEach} · ${format.times(ratio)}`;
  return html`Predicted: <b>${goodput}</b> requests/s within the SLOs${rest}`;
}

function Change({ ratio, isNow, locked, onDone }) {
  const [duration, setDuration] = useState(3600);
  const [outcome, setOutcome] = useState(null);
  const wanted = { mode: "manual", num_prefill: ratio.num_prefill, num_decode: ratio.num_decode, for_s: duration };
  const preview = usePreview(wanted, locked || isNow);
  const apply = async () => {
    const told = await setPlan({ ...wanted, reason: "set on the dashboard" });
    setOutcome(told.error ? { error: told.error } : { text: `${ratio.num_prefill} : ${ratio.num_decode} is set.` });
    if (!told.error) onDone();
  };
  return html`
    <div class="change">
      <div class="controls">
        <label for="duration">for</label>
        <select
          id="duration"
          value=${duration}
          disabled=${Boolean(locked)}
          onChange=${(event) => setDuration(Number(event.target.value))}
        >
          ${DURATIONS.map(([label, value]) => html`<option key=${value} value=${value}>${label}</option>`)}
        </select>
        <button id="apply" class="primary" disabled=${Boolean(locked) || (!isNow && !preview.data)} onClick=${apply}>
          ${isNow ? "Keep" : "Apply"} ${ratio.num_prefill} : ${ratio.num_decode}
        </button>
      </div>
      <div id="preview" aria-live="polite">
        ${isNow ? html`<${Outcome} outcome=${outcome} />` : html`<${Preview} preview=${preview} />`}
        ${!isNow && outcome?.error && html`<${Failure} error=${outcome.error} />`}
      </div>
    </div>
  `;
}

function Outcome({ outcome }) {
  if (outcome === null) return html`<p class="muted">Move the slider to see which roles would change.</p>`;
  return outcome.error ? html`<${Failure} error=${outcome.error} />` : html`<p class="good">${outcome.text}</p>`;
}

/** What the router says of the wanted plan, once it has stood still: {data, error}. */
function usePreview(wanted, isOff) {
  const [told, setTold] = useState({ data: null, error: null });
  const asked = useRef(0);
  useEffect(() => {
    const number = ++asked.current;
    setTold({ data: null, error: null });
    if (isOff) return undefined;
    const timer = setTimeout(async () => {
      const answer = await setPlan({ ...wanted, preview: true });
      if (asked.current === number) setTold(answer);
    }, SETTLED_MS);
    return () => clearTimeout(timer);
  }, [wanted.num_prefill, wanted.num_decode, Boolean(isOff)]);
  return told;
}

function Preview({ preview }) {
  if (preview.error) return html`<${Failure} error=${preview.error} />`;
  if (!preview.data) return html`<p class="muted">Asking the router …</p>`;
  const flips = preview.data.would_flip;
  if (!flips.length) return html`<p>No role would change.</p>`;
  return html`
    <p><b>${format.plural(flips.length, "role")}</b> would change:</p>
    <ul class="flips">
      ${flips.map(
        (flip) => html`<li key=${flip.worker_id}>
          <b>${flip.worker_id}</b>
          <span><${Role} role=${flip.before} /> <span aria-label="to">→</span> <${Role} role=${flip.after} /></span>
        </li>`,
      )}
    </ul>
  `;
}
