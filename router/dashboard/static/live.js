// What the dashboard tells as it happens, by topic: access, pools, plan, traffic. Connects again by itself.
import { useEffect, useState } from "./ui.js";
import { credentials } from "./session.js";

const SILENT_MS = 4000; // there is a beat every second
const RETRY_MS = 1000;
export const STALE_S = 3; // older than that, it is shown as stale

const nothing = { data: null, error: null };
let topics = {};
let heardAt = {}; // when the router last answered, on this page's clock
let connected = false;
let stopping = null;
const listeners = new Set();

const tell = (name) => listeners.forEach((listener) => listener(name));

/** A topic as it was told last: {data, error}. What is there is kept when the router goes away. */
export function useTopic(name) {
  const [, redraw] = useState(0);
  useEffect(() => {
    const listener = (changed) => (changed === name || changed === "all") && redraw((n) => n + 1);
    listeners.add(listener);
    return () => listeners.delete(listener);
  }, [name]);
  return topics[name] ?? nothing;
}

/** Seconds since the router last said something of the topic; null before it ever has. */
export function ageOf(name, now = performance.now()) {
  return heardAt[name] === undefined ? null : Math.max(0, (now - heardAt[name]) / 1000);
}

export const isConnected = () => connected;

const isStale = () => {
  const age = ageOf("pools");
  return age === null || age > STALE_S;
};

/** Whether what is shown is old. Redraws when that changes, not as time goes by. */
export function useStale() {
  const [stale, setStale] = useState(isStale());
  useEffect(() => {
    const timer = setInterval(() => setStale(isStale()), 250);
    return () => clearInterval(timer);
  }, []);
  return stale;
}

/** Forgets what was told and listens anew, as for another key. */
export function restart() {
  stopping?.abort();
  topics = {};
  heardAt = {};
  connected = false;
  tell("all");
  stopping = new AbortController();
  void listen(stopping.signal);
}

async function listen(stopped) {
  while (!stopped.aborted) {
    await readOnce(stopped).catch(() => undefined); // whatever ended it, the next try tells
    if (stopped.aborted) return;
    connected = false;
    tell("connection");
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

/** One connection, until it ends or falls silent. */
async function readOnce(stopped) {
  const ending = new AbortController();
  const end = () => ending.abort();
  stopped.addEventListener("abort", end);
  let timer = setTimeout(end, SILENT_MS);
  try {
    const response = await fetch("/api/stream", { headers: credentials(), signal: ending.signal, cache: "no-store" });
    if (!response.ok) return refused(await response.json());
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      clearTimeout(timer);
      timer = setTimeout(end, SILENT_MS);
      connected = true;
      text = takeEvents(text + value);
    }
  } finally {
    clearTimeout(timer);
    stopped.removeEventListener("abort", end);
  }
}

/** Takes the events that are whole, and returns what is left. */
function takeEvents(text) {
  const parts = text.split("\n\n");
  for (const part of parts.slice(0, -1)) {
    const [, name, data] = /^event: (\w+)\ndata: (.*)$/s.exec(part) ?? [];
    if (name) take(name, JSON.parse(data));
  }
  return parts.at(-1);
}

function take(name, told) {
  const now = performance.now();
  if (name === "beat") {
    for (const [topic, age] of Object.entries(told.ages_s)) if (age !== null) heardAt[topic] = now - age * 1000;
    return tell("beat");
  }
  if (told.error === null) heardAt[name] = now;
  topics[name] = { data: told.data ?? topics[name]?.data ?? null, error: told.error };
  tell(name);
}

function refused({ error }) {
  for (const name of ["access", "pools"]) topics[name] = { data: null, error };
  tell("all");
}
