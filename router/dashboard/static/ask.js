// Questions to the dashboard that are not in its stream: asked once, or again and again while a view is open.
import { useEffect, useState } from "./ui.js";
import { credentials } from "./session.js";

/** {data, error} of `path`, asked for every `everyMs` while the page is seen. `path` null asks nothing. */
export function usePolled(path, everyMs = 1000) {
  const [told, setTold] = useState({ data: null, error: null });
  useEffect(() => {
    if (path === null) return undefined;
    const stopping = new AbortController();
    void poll(path, everyMs, stopping.signal, (next) =>
      setTold((last) => ({ data: next.data ?? last.data, error: next.error })),
    );
    return () => stopping.abort();
  }, [path, everyMs]);
  return told;
}

async function poll(path, everyMs, stopped, take) {
  while (!stopped.aborted) {
    if (!document.hidden) {
      const told = await get(path, stopped);
      if (stopped.aborted) return;
      take(told);
    }
    await new Promise((resolve) => setTimeout(resolve, everyMs));
  }
}

async function get(path, signal) {
  try {
    const response = await fetch(path, { headers: credentials(), signal, cache: "no-store" });
    return await response.json();
  } catch {
    return { data: null, error: away };
  }
}

const away = { code: "UNAVAILABLE", message: "the dashboard does not answer", field: "" };

/** Sets the plan, or with `preview` asks what that would do. Returns {data, error}. */
export async function setPlan(change) {
  try {
    const response = await fetch("/api/plan", {
      method: "POST",
      headers: { ...credentials(), "content-type": "application/json" },
      body: JSON.stringify(change),
    });
    const told = await response.json();
    return response.ok ? { data: told, error: null } : { data: null, error: told.error };
  } catch {
    return { data: null, error: away };
  }
}
