// Numbers as people read them, with their units.
const NONE = "–";
const known = (value) => value !== null && value !== undefined && Number.isFinite(value);
const plain = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** With as many digits as say something: three of them. */
export function number(value) {
  if (!known(value)) return NONE;
  const size = Math.abs(value);
  if (size >= 100 || Number.isInteger(value)) return plain.format(value);
  return value.toFixed(size >= 10 ? 1 : 2);
}

export const count = (value) => (known(value) ? plain.format(value) : NONE);

export function short(value) {
  if (!known(value)) return NONE;
  for (const [unit, size] of [
    ["G", 1e9],
    ["M", 1e6],
    ["k", 1e4],
  ]) {
    if (Math.abs(value) >= size) return `${number(value / (unit === "k" ? 1e3 : size))}${unit}`;
  }
  return number(value);
}

export const share = (value, digits = 0) => (known(value) ? `${(100 * value).toFixed(digits)} %` : NONE);

export const bytes = (value) => (known(value) ? scaled(value, 1000, ["B", "kB", "MB", "GB", "TB"]) : NONE);

function scaled(value, step, units) {
  let rest = value;
  let unit = 0;
  while (rest >= step && unit < units.length - 1) {
    rest /= step;
    unit += 1;
  }
  return `${number(rest)} ${units[unit]}`;
}

/** A duration, from microseconds to days. */
export function seconds(value) {
  if (!known(value)) return NONE;
  if (value === 0) return "0 s";
  if (value < 1e-3) return `${number(value * 1e6)} µs`;
  if (value < 1) return `${number(value * 1e3)} ms`;
  if (value < 120) return `${value < 10 ? value.toFixed(2) : value.toFixed(0)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  return value < 172800 ? `${(value / 3600).toFixed(1)} h` : `${(value / 86400).toFixed(1)} d`;
}

export const milliseconds = (value) => (known(value) && value > 0 ? `${number(value * 1e3)} ms` : NONE);

/** Of a ratio, as predicted; a pool that cannot keep up has none. */
export const times = ({ ttft_s, tpot_s }) =>
  [
    ttft_s === null ? "prefill cannot keep up" : `TTFT ${seconds(ttft_s)}`,
    tpot_s === null ? "decode cannot keep up" : `TPOT ${seconds(tpot_s)}`,
  ].join(" · ");

export const clock = (at) => (known(at) && at > 0 ? new Date(at * 1000).toLocaleTimeString("en-GB") : NONE);

/** The day as well, if it is not today. */
export function moment(at) {
  const when = new Date(at * 1000);
  const isToday = when.toDateString() === new Date().toDateString();
  return isToday ? clock(at) : `${when.toLocaleDateString("en-CA")} ${clock(at)}`;
}

export const plural = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
