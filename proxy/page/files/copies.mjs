// Requests as commands to copy, and rollouts as files. Nothing leaves the browser but what is asked of the proxy.
import { get } from "./api.mjs";
import { html, useState } from "./html.mjs";

const JSON_TYPE = "Content-Type: application/json";
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`; // for a shell
const literal = (value) => JSON.stringify(JSON.stringify(value)); // a JSON text is a string of Python, too

const urlOf = (path) => new URL(path, location.href.split("#")[0]).href;

export function asCurl(path, body) {
  const data = body === undefined ? "" : ` \\\n  -H ${quoted(JSON_TYPE)} \\\n  -d ${quoted(JSON.stringify(body))}`;
  return `curl ${quoted(urlOf(path))} \\\n  -H "Authorization: Bearer $OPENAI_API_KEY"${data}`;
}

export function asPython(path, body) {
  const lines = [
    "import json, os, urllib.request",
    "",
    `headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}`,
    body === undefined ? "body = None" : `body = json.dumps(json.loads(${literal(body)})).encode()`,
    `with urllib.request.urlopen(urllib.request.Request(${JSON.stringify(urlOf(path))}, body, headers)) as answer:`,
    "    print(json.dumps(json.load(answer), indent=2))",
  ];
  return `${lines.join("\n")}\n`;
}

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
