// What all views are drawn with: numbers, times and texts as people read them, tables, and small parts.
// User text goes in as text nodes only.
import htm from "./vendor/htm.mjs";
import { h, render } from "./vendor/preact.mjs";
import { useState } from "./vendor/hooks.mjs";

export * from "./vendor/hooks.mjs";
export { render };
export const html = htm.bind(h);

const NONE = "–";

// A number with about three significant digits; a whole or a large one whole.
export function number(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return NONE;
  const size = Math.abs(value);
  if (Number.isInteger(value) || size >= 1000) return Math.round(value).toLocaleString("en-US");
  return size < 0.0005 ? value.toExponential(1) : String(Number(value.toPrecision(3)));
}

// The same, and its sign: what a difference or an advantage needs.
export const signed = (value) => (value > 0 ? `+${number(value)}` : number(value).replace("-", "−"));

export const plural = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;

export function seconds(value) {
  if (typeof value !== "number") return NONE;
  if (value < 1) return `${Math.round(1000 * value)} ms`;
  if (value < 60) return `${number(value)} s`;
  return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}

// USD; a question mark where some calls' cost is not known.
export function usd({ usd: value, unpriced = 0, unknown = 0 }) {
  const some = unpriced + unknown > 0;
  if (value === 0 && some) return "?";
  return `$${value === 0 || value < 0.01 ? number(value) : value.toFixed(2)}${some ? " + ?" : ""}`;
}

// Any JSON value as text.
export function text(value) {
  if (typeof value === "string") return value;
  return value === null || value === undefined ? "" : JSON.stringify(value, null, 2);
}

const UNITS = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];

// How long ago a Unix time was.
export function Time({ at }) {
  if (typeof at !== "number") return NONE;
  const passed = Math.max(0, Date.now() / 1000 - at);
  const [size, unit] = UNITS.find(([one]) => passed >= 1.5 * one) ?? UNITS.at(-1);
  const when = new Date(at * 1000);
  return html`<time dateTime=${when.toISOString()} title=${when.toLocaleString("sv-SE", { timeZoneName: "short" })}>${Math.round(passed / size)} ${unit} ago</time>`;
}

// Addresses inside the page.
export const to = (...parts) => `#/${parts.map(encodeURIComponent).join("/")}`;
export const link = (view, params) => `#/${view}?${new URLSearchParams(params)}`;

export const isTyping = (target) => target.closest("input, select, textarea, dialog") !== null;

export function Panel({ title, note, children }) {
  return html`<section class="panel">
    ${title && html`<header><h2>${title}</h2>${note && html`<p class="muted">${note}</p>`}</header>`} ${children}
  </section>`;
}

export function Stat({ label, value, unit, note, warn }) {
  return html`<div class=${warn ? "stat warn" : "stat"}>
    <dt>${label}</dt><dd>${value}${unit && html` <small>${unit}</small>`}</dd>${note ? html`<dd class="note">${note}</dd>` : null}
  </div>`;
}

export const Badge = ({ kind, children }) => html`<span class=${`badge ${kind ?? ""}`}>${children}</span>`;

const MADE = /^[0-9a-f]{32}$/; // an id that the proxy gave, of which the beginning is enough

export const RolloutLink = ({ id }) => html`<a class="id pick" href=${to("rollouts", id)} title=${id}>${MADE.test(id) ? id.slice(0, 8) : id}</a>`;

export const TaskLink = ({ id }) => id && html`<a class="id" href=${link("rollouts", { task_id: id })} title=${id}>${id}</a>`;

export const Reward = ({ value }) => (typeof value === "number" ? html`<b>${number(value)}</b>` : html`<span class="muted">${NONE}</span>`);

// A mean reward, and over how many rollouts.
export const Mean = ({ of }) => html`<${Reward} value=${of?.mean} />${of && html` <small>of ${number(of.rollouts)}</small>`}`;

export function Failure({ error, again }) {
  return error && html`<div class="failure" role="alert"><p>${error.message}</p>${again && html`<button onClick=${again}>Try again</button>`}</div>`;
}

// What is not there yet, and the one command that helps.
export const Empty = ({ children }) => html`<div class="empty">${children}</div>`;

export const Start = () => html`<code>lightning-proxy run --tasks FILE -- COMMAND</code> starts agents.`;

// Shows a route's answer: that it is under way, its error, or what `children` makes of the data.
export function Loaded({ of: { data, error, reload }, children }) {
  if (data === null && !error) return html`<p class="muted loading">Loading…</p>`;
  return html`<${Failure} error=${error} again=${reload} />${data !== null && children(data)}`;
}

// What is folded on a phone, and opens by a button. The others do not see the button.
export function Folded({ label, children }) {
  const [open, setOpen] = useState(false);
  return html`<button type="button" class="fold" aria-expanded=${open} onClick=${() => setOpen(!open)}>${label}</button>
    <div class=${open ? "folded open" : "folded"}>${children}</div>`;
}

// A choice among `options`: values, or [value, label].
export function Select({ label, name, options, value = "", onChange }) {
  const pairs = options.map((one) => (Array.isArray(one) ? one : [one, one]));
  return html`<label>${label}<select name=${name} onChange=${onChange}>
    ${pairs.map(([one, words]) => html`<option value=${one} selected=${String(one) === String(value)}>${words}</option>`)}
  </select></label>`;
}

export const MODES = [["", "any"], "train", "eval"];

// Fields of which the address has the values: Enter, or another choice, leads to the address with the new ones.
export function Filters({ view, children }) {
  const go = (event) => {
    event.preventDefault();
    location.hash = link(view, [...new FormData(event.currentTarget)].filter(([, value]) => value !== ""));
  };
  const onChange = (event) => event.target.tagName === "SELECT" && go(event);
  return html`<form class="filters" role="search" onSubmit=${go} onChange=${onChange}>${children}</form>`;
}

// Leads to the next page of a list. `params`: of the first page.
export const Older = ({ view, params, cursor }) => cursor && html`<a class="button" href=${link(view, { ...params, cursor })}>Show older ${view}</a>`;

// A table that scrolls inside itself. A column: {name, label, num, title, value(row), cell(row)}; what it does not say
// follows from its name. `optional` ones without any value are left out. `sortable`: headings sort its rows.
export function Table({ label, columns, rows, rowKey, sortable }) {
  const [{ by, down }, setSort] = useState({});
  const shown = columns.map(whole).filter(({ optional, value }) => !optional || rows.some(value));
  const order = shown.find(({ name }) => name === by)?.value;
  const sorted = order ? [...rows].sort((a, b) => compared(order(a), order(b)) * (down ? -1 : 1)) : rows;
  const heading = ({ name, label: words, num, title }) => html`<th scope="col" class=${num && "num"} aria-sort=${name === by ? (down ? "descending" : "ascending") : undefined} title=${title}>
    ${sortable ? html`<button class="plain" onClick=${() => setSort({ by: name, down: name !== by || !down })}>${words}${name === by && (down ? " ↓" : " ↑")}</button>` : words}
  </th>`;
  const cell = ({ label: words, num, cell: draw }, row, i) => html`<td class=${`${i === 0 ? "head" : ""} ${num ? "num" : ""}`} data-label=${i > 0 || num ? words : undefined}>${draw(row)}</td>`;
  return html`<div class="table" tabindex="0" role="region" aria-label=${label}><table>
    <thead><tr>${shown.map(heading)}</tr></thead>
    <tbody>${sorted.map((row) => html`<tr key=${rowKey(row)} class=${row.live === true && "live"}>${shown.map((column, i) => cell(column, row, i))}</tr>`)}</tbody>
  </table></div>`;
}

function whole(column) {
  const { name, num, value = (row) => row[name] } = column;
  const plain = (row) => (num && typeof value(row) === "number" ? number(value(row)) : value(row));
  return { label: name, value, cell: plain, ...column };
}

function compared(a, b) {
  const [noA, noB] = [a ?? null, b ?? null].map((value) => value === null);
  if (noA || noB) return noA - noB;
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
}

const SHOWN = 1200; // characters of a long text, until it is asked for
const SCROLLS = /^[^]{500}|(.*\n){20}/; // what may not fit into its place: the keyboard has to reach it to scroll

// A text, cut where it is long.
export function LongText({ children, most = SHOWN }) {
  const [whole, setWhole] = useState(false);
  const all = text(children);
  const shown = whole || all.length <= most ? all : `${all.slice(0, most)}…`;
  return html`<pre class="said" dir="auto" tabindex=${SCROLLS.test(all) ? 0 : undefined}>${shown}</pre>
    ${all.length > most && html`<button class="more" onClick=${() => setWhole(!whole)}>${whole ? "show less" : `show all ${number(all.length)} characters`}</button>`}`;
}

// Names and values of an object, one below the other.
export function Facts({ of }) {
  const shown = Object.entries(of).filter(([, value]) => ![null, undefined, "", false].includes(value));
  return html`<dl class="facts">${shown.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}
