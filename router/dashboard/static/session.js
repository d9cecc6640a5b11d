// The API key of this visitor. It is kept for this tab alone: a cookie would be sent to every other port of this host.
const NAME = "pdserve-api-key";

export const apiKey = () => sessionStorage.getItem(NAME) ?? "";

export function setApiKey(key) {
  if (key) sessionStorage.setItem(NAME, key);
  else sessionStorage.removeItem(NAME);
}

/** Of a call to the dashboard. */
export function credentials() {
  const key = apiKey();
  return key ? { authorization: `Bearer ${key}` } : {};
}
