// Asks for the API key that the router asks for.
import { html, useEffect, useRef, useState } from "./ui.js";
import { restart } from "./live.js";
import { apiKey, setApiKey } from "./session.js";

export function Login({ why }) {
  const [key, setKey] = useState("");
  const field = useRef(null);
  useEffect(() => field.current.focus(), []);
  const submit = (event) => {
    event.preventDefault();
    setApiKey(key.trim());
    restart();
  };
  return html`
    <main class="login" id="view">
      <form class="card" onSubmit=${submit}>
        <h1>An API key, please</h1>
        <p>
          This router asks for keys. One with the scope <code>read</code> shows everything; changing the pools
          takes${" "}<code>operate</code>. It is kept in this tab until you close it.
        </p>
        <label for="api-key">API key</label>
        <input
          id="api-key"
          ref=${field}
          type="password"
          autocomplete="off"
          spellcheck=${false}
          value=${key}
          onInput=${(event) => setKey(event.target.value)}
        />
        ${apiKey() && html`<p class="problem" role="alert">${why}</p>`}
        <button class="primary" disabled=${!key.trim()}>Open</button>
      </form>
    </main>
  `;
}
