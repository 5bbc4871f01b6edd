// The routes of the control API, as /openapi.json describes them, and a place to try those that only read.
import { get, hasKey, headers, keepKey } from "./api.mjs";
import { html, render, useEffect, useState } from "./html.mjs";
import { written } from "./schema.mjs";

const METHODS = ["get", "post", "put", "patch", "delete"];

function Page() {
  const [api, setApi] = useState(null);
  const [error, setError] = useState(null);
  useEffect(() => {
    get("openapi.json").then(setApi, setError);
  }, []);
  if (error) return html`<main><p class="failure" role="alert">${error.message}</p></main>`;
  if (!api) return html`<main><p class="muted">Loading…</p></main>`;
  return html`<header class="top">
      <a class="brand" href="./">lightning-proxy</a>
      <nav aria-label="Routes by subject">
        ${tagged(api).map(([tag]) => html`<a key=${tag} href=${`#${tag}`}>${tag}</a>`)}
      </nav>
      <a href="openapi.json">openapi.json</a>
    </header>
    <main>
      <h1>Routes of lightning-proxy ${api.info.version}</h1>
      <p class="muted">
        Agents call the model at <code>/v1</code>, as OpenAI's and Anthropic's clients do. These are the routes beside it.
      </p>
      <${Key} schemes=${api.components?.securitySchemes ?? {}} />
      ${tagged(api).map(
        ([tag, routes]) => html`<section class="panel wide" id=${tag} key=${tag}>
          <header><h2>${tag}</h2></header>
          ${routes.map((route) => html`<${Route} key=${route.method + route.path} route=${route} api=${api} />`)}
        </section>`,
      )}
    </main>`;
}

// [[tag, routes], …] in the document's order.
function tagged(api) {
  const found = new Map();
  for (const [path, item] of Object.entries(api.paths)) {
    for (const method of METHODS.filter((one) => one in item)) {
      const tag = item[method].tags?.[0] ?? "other";
      found.set(tag, [...(found.get(tag) ?? []), { path, method, ...item[method] }]);
    }
  }
  return [...found];
}

function Key({ schemes }) {
  const [kept, setKept] = useState(hasKey());
  const keep = (event) => {
    event.preventDefault();
    keepKey(event.target.elements.key.value);
    event.target.reset();
    setKept(hasKey());
  };
  return html`<section class="panel wide">
    <header><h2>Keys</h2></header>
    ${Object.entries(schemes).map(
      ([name, scheme]) => html`<p key=${name}>
        <b>${name}</b> <code>${scheme.type === "apiKey" ? `${scheme.name}: …` : "Authorization: Bearer …"}</code> ${scheme.description}
      </p>`,
    )}
    <form class="row" onSubmit=${keep}>
      <label>Key for this tab <input name="key" type="password" autocomplete="off" /></label>
      <button>${kept ? "Replace" : "Use"}</button>
      ${kept && html`<span class="muted">A key is set. An empty one takes it away.</span>`}
    </form>
  </section>`;
}

function Route({ route, api }) {
  const body = route.requestBody?.content?.["application/json"]?.schema;
  const [first, ...rest] = (route.description ?? route.summary ?? "").split(/\n\n/);
  return html`<details class="route">
    <summary>
      <span class=${`badge ${route.method === "get" ? "good" : ""}`}>${route.method.toUpperCase()}</span>
      <code>${route.path}</code> <span class="muted">${withCode(first)}</span>
    </summary>
    ${rest.map((paragraph) => html`<p key=${paragraph}>${withCode(paragraph)}</p>`)}
    <p class="muted">${keysOf(route)}</p>
    ${route.parameters?.length > 0 && html`<${Parameters} of=${route.parameters} api=${api} />`}
    ${body && html`<h3>Body</h3><pre tabindex="0">${written(body, api)}</pre>`}
    ${answers(route).map(
      ([status, schema]) => html`<div key=${status}><h3>Answer ${status}</h3><pre tabindex="0">${written(schema, api)}</pre></div>`,
    )}
    ${route.method === "get" && route.path !== "/feed" && html`<${Try} route=${route} />`}
  </details>`;
}

// A docstring's text, with what stands in backticks as code.
const withCode = (text) => text.split("`").map((part, i) => (i % 2 ? html`<code>${part}</code>` : part));

const keysOf = (route) =>
  route.security ? `Where there are keys: ${route.security.flatMap(Object.keys).join(", or ")}.` : "It needs no key.";

const answers = (route) =>
  Object.entries(route.responses)
    .filter(([status]) => status.startsWith("2"))
    .map(([status, one]) => [status, one.content?.["application/json"]?.schema])
    .filter(([, schema]) => schema);

function Parameters({ of, api }) {
  return html`<div class="table" tabindex="0" role="region" aria-label="Parameters">
    <table>
      <thead><tr><th>Parameter</th><th>In</th><th>Values</th><th>Default</th></tr></thead>
      <tbody>
        ${of.map(
          (one) => html`<tr key=${one.name}>
            <td><code>${one.name}</code>${one.required && html` <small>needed</small>`}</td>
            <td>${one.in}</td>
            <td><code>${written(one.schema, api)}</code></td>
            <td>${one.schema.default !== undefined && html`<code>${JSON.stringify(one.schema.default)}</code>`}</td>
          </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}

function Try({ route }) {
  const [answer, setAnswer] = useState(null);
  const names = (route.parameters ?? []).filter((one) => one.in !== "header");
  const ask = async (event) => {
    event.preventDefault();
    const given = Object.fromEntries(new FormData(event.target));
    setAnswer("…");
    setAnswer(await fetchAnswer(route, names, given));
  };
  return html`<form class="row" onSubmit=${ask}>
      ${names.map(
        (one) => html`<label key=${one.name}>${one.name} <input name=${one.name} required=${one.required} /></label>`,
      )}
      <button class="primary">Ask</button>
    </form>
    ${answer !== null && html`<pre class="said" tabindex="0">${answer}</pre>`}`;
}

async function fetchAnswer(route, names, given) {
  const path = route.path.replace(/{(\w+)}/g, (_, name) => encodeURIComponent(given[name]));
  const query = names.filter((one) => one.in === "query" && given[one.name]).map((one) => [one.name, given[one.name]]);
  try {
    const response = await fetch(path.slice(1) + (query.length ? `?${new URLSearchParams(query)}` : ""), { headers: headers() });
    const text = await response.text();
    const isJson = response.headers.get("content-type")?.startsWith("application/json");
    return `${response.status}\n${isJson ? JSON.stringify(JSON.parse(text), null, 2) : text}`;
  } catch {
    return "The proxy does not answer.";
  }
}

render(html`<${Page} />`, document.body);
