// The UI library as our own files use it.
import { h, render, Fragment, Component } from "./vendor/preact.mjs";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/hooks.mjs";
import htm from "./vendor/htm.mjs";

export const html = htm.bind(h);
export { render, Fragment, Component, useEffect, useLayoutEffect, useMemo, useRef, useState };

/** Redraws every `everyMs`, for what shows how old something is. */
export function useNow(everyMs) {
  const [now, setNow] = useState(performance.now());
  useEffect(() => {
    const timer = setInterval(() => setNow(performance.now()), everyMs);
    return () => clearInterval(timer);
  }, [everyMs]);
  return now;
}
