// The small parts that all views share.
import { readiness } from "./api.mjs";
import { absolute, ago, NONE, number, text } from "./format.mjs";
import { html, useEffect, useState } from "./html.mjs";

const SHOWN = 1200; // characters of a long text, until it is asked for
const SCROLLS = /^[^]{500}|(.*\n){20}/; // what may not fit into its place: the keyboard has to reach it to scroll

export const to = (...parts) => `#/${parts.map(encodeURIComponent).join("/")}`;

export const link = (view, params) => `#/${view}?${new URLSearchParams(params)}`;

export function Panel({ title, note, wide, children }) {
  return html`<section class=${`panel${wide ? " wide" : ""}${wide === "all" ? " all" : ""}`}>
    ${title && html`<header><h2>${title}</h2>${note && html`<p class="muted">${note}</p>`}</header>`} ${children}
  </section>`;
}

export function Stat({ label, value, unit, note, warn }) {
  return html`<div class=${warn ? "stat warn" : "stat"}>
    <dt>${label}</dt>
    <dd>${value}${unit && html` <small>${unit}</small>`}</dd>
    ${note ? html`<dd class="note">${note}</dd>` : null}
  </div>`;
}

export function Time({ at }) {
  if (typeof at !== "number") return NONE;
  return html`<time dateTime=${new Date(at * 1000).toISOString()} title=${absolute(at)}>${ago(at)}</time>`;
}

export const Badge = ({ kind, children }) => html`<span class=${`badge ${kind ?? ""}`}>${children}</span>`;

const MADE = /^[0-9a-f]{32}$/; // an id that the proxy gave, of which the beginning is enough

export const RolloutLink = ({ id }) => html`<a class="id pick" href=${to("rollouts", id)} title=${id}>${MADE.test(id) ? id.slice(0, 8) : id}</a>`;

export function Failure({ error, again }) {
  if (!error) return null;
  return html`<div class="failure" role="alert">
    <p>${error.message}</p>
    ${again && html`<button onClick=${again}>Try again</button>`}
  </div>`;
}

// What is not there yet, and the one command that helps.
export const Empty = ({ children }) => html`<div class="empty">${children}</div>`;

// How to begin. Over a store alone nothing begins.
export function Start() {
  const [alone, setAlone] = useState(false);
  useEffect(() => {
    readiness().then(({ status }) => setAlone(status === "alone"));
  }, []);
  return alone ? "This is a store alone." : html`<code>lightning-proxy run --tasks FILE -- COMMAND</code> starts agents.`;
}

// What is folded on a phone, and opens by a button. The others do not see the button.
export function Folded({ label, children }) {
  const [open, setOpen] = useState(false);
  return html`<button type="button" class="fold" aria-expanded=${open} onClick=${() => setOpen(!open)}>${label}</button>
    <div class=${open ? "folded open" : "folded"}>${children}</div>`;
}

// Shows a route's answer: that it is under way, its error, or what `children` makes of the data.
export function Loaded({ of, children }) {
  if (of.data === null) {
    return of.error ? html`<${Failure} error=${of.error} again=${of.reload} />` : html`<p class="muted loading">Loading…</p>`;
  }
  return html`${of.error && html`<${Failure} error=${of.error} again=${of.reload} />`}${children(of.data)}`;
}

// A table that scrolls inside itself. A column: {name, label, num, title, cell(row)}.
export function Table({ columns, rows, rowKey, sort, onSort, label }) {
  const heading = (column) => {
    const order = sort?.name === column.name ? (sort.down ? "descending" : "ascending") : undefined;
    const arrow = { ascending: " ↑", descending: " ↓" }[order] ?? "";
    return html`<th scope="col" class=${column.num && "num"} aria-sort=${order} title=${column.title}>
      ${onSort && column.value
        ? html`<button class="plain" onClick=${() => onSort(column.name)}>${column.label}${arrow}</button>`
        : column.label}
    </th>`;
  };
  return html`<div class="table" tabindex="0" role="region" aria-label=${label}>
    <table>
      <thead><tr>${columns.map(heading)}</tr></thead>
      <tbody>
        ${rows.map((row) => html`<tr key=${rowKey(row)}>
          ${columns.map((column, i) => html`<td class=${[i === 0 && "head", column.num && "num"].filter(Boolean).join(" ")} data-label=${i > 0 || column.num ? column.label : undefined}>${column.cell(row)}</td>`)}
        </tr>`)}
      </tbody>
    </table>
  </div>`;
}

// The rows in the order of a column, and what a click on a heading does. `given`: a column's name, with `-` before it
// the greatest first; `onChange` hears the next one.
export function useSort(columns, rows, given = "", onChange = () => {}) {
  const [sort, setSort] = useState(given ? { name: given.replace(/^-/, ""), down: given.startsWith("-") } : null);
  const column = sort && columns.find(({ name }) => name === sort.name);
  const sorted = column ? [...rows].sort((a, b) => compared(column.value(a), column.value(b)) * (sort.down ? -1 : 1)) : rows;
  const onSort = (name) => {
    const next = sort?.name !== name ? { name, down: true } : sort.down ? { name, down: false } : null;
    setSort(next);
    onChange(next ? `${next.down ? "-" : ""}${next.name}` : "");
  };
  return { sorted, sort, onSort };
}

function compared(a, b) {
  const [noA, noB] = [a === null || a === undefined, b === null || b === undefined];
  if (noA || noB) return noA - noB;
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
}

// A text, cut where it is long.
export function LongText({ children, most = SHOWN }) {
  const [whole, setWhole] = useState(false);
  const all = text(children);
  const cut = all.length > most && !whole;
  return html`<pre class="said" dir="auto" tabindex=${SCROLLS.test(all) ? 0 : undefined}>${cut ? all.slice(0, most) : all}${cut && "…"}</pre>
    ${all.length > most && html`<button class="more" onClick=${() => setWhole(!whole)}>
      ${whole ? "show less" : `show all ${number(all.length)} characters`}
    </button>`}`;
}

// Names and numbers of an object, one below the other.
export function Facts({ of }) {
  const shown = Object.entries(of).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return html`<dl class="facts">${shown.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}

export function Reward({ value }) {
  return value === null || value === undefined ? html`<span class="muted">${NONE}</span>` : html`<b>${number(value)}</b>`;
}
