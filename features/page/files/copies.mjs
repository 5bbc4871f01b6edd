// Requests to copy, and rollouts as files. Nothing leaves the browser but what is asked of the proxy.
import { get } from "./api.mjs";
import { html, useState } from "./html.mjs";
import { asCurl, asPython } from "./requests.mjs";

// Buttons that copy a request to the proxy. `body` undefined: it is a GET.
export function CopyAs({ path, body }) {
  const [said, setSaid] = useState("");
  const copy = (text) => navigator.clipboard.writeText(text).then(() => setSaid("copied"), () => setSaid("the browser does not let the page copy"));
  return html`<button onClick=${() => copy(asCurl(path, body))}>copy as curl</button>
    <button onClick=${() => copy(asPython(path, body))}>copy as Python</button>
    <small role="status">${said}</small>`;
}

// Saves rows as a file: one JSON document, or a line of JSON for each.
export function save(rows, kind, name) {
  const text = kind === "jsonl" ? rows.map((row) => `${JSON.stringify(row)}\n`).join("") : `${JSON.stringify(rows, null, 2)}\n`;
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = `${name}.${kind}`;
  link.click();
  URL.revokeObjectURL(link.href);
}

// Rollouts with their calls, whole, one after the other.
export async function wholeRollouts(ids) {
  const found = [];
  for (const id of ids) found.push(await get(`/rollouts/${encodeURIComponent(id)}`, { requests: "whole" }));
  return found;
}
