// The page: which view is shown, the login, the keys. Each view is a module of its own.
import { LOGIN, get, hasKey, keepKey, startFeed, stopFeed, takeKey, useFeedState, useFresh } from "./data.mjs";
import { Overview } from "./overview.mjs";
import { Dialog, Empty, Folded, html, isTyping, render, useCallback, useEffect, useRef, useState } from "./parts.mjs";
import { Rollout } from "./rollout.mjs";
import { Rollouts } from "./rollouts.mjs";
import { Tasks } from "./tasks.mjs";
import { Compare, Versions } from "./versions.mjs";
import { ROOMS } from "./views.mjs"; // made of features/NAME/views/

// By name: what draws a view, and the letter that leads to it after `g`. `filled`: a route, and whether by its answer
// the view has anything to show; else it is not in the list.
const several = ["/policy/versions", {}, ({ data }) => data.length > 1];
const VIEWS = new Map(Object.entries({
  overview: { View: Overview, key: "o" },
  rollouts: { View: Rollouts, key: "r" },
  tasks: { View: Tasks, key: "t", filled: ["/tasks", { limit: 1 }, ({ data }) => data.length > 0] },
  versions: { View: Versions, key: "v", filled: several },
  compare: { View: Compare, key: "c", filled: several },
  ...ROOMS,
}));
const LETTERS = new Map([...VIEWS].map(([name, { key }]) => [key, name]));
const HELP = [
  ["j, k or ↓, ↑", "next and previous row"],
  ["Enter", "open the row"],
  ["←, →", "in a chart or an answer's tokens: the values before and after"],
  ["/", "search rollouts"],
  ["u", "up, from a rollout to the list"],
  ["?", "this help"],
  ["Esc", "close, or leave a field"],
];

// The place that the address names: `#/view/more?name=value`.
function place() {
  const [path, query] = location.hash.slice(2).split("?");
  try {
    const [view, ...more] = path.split("/").filter(Boolean).map(decodeURIComponent);
    return { view: view ?? "overview", more, params: Object.fromEntries(new URLSearchParams(query)) };
  } catch {
    return { view: "", more: [], params: {} }; // an address that nobody's link leads to
  }
}

function usePlace() {
  const [seen, setSeen] = useState(place);
  useEffect(() => {
    const onChange = () => setSeen(place());
    addEventListener("hashchange", onChange);
    return () => removeEventListener("hashchange", onChange);
  }, []);
  return seen;
}

// The names of the views that have something to show.
function useFilled() {
  const [filled, setFilled] = useState(() => [...VIEWS.keys()].filter((name) => !VIEWS.get(name).filled));
  const look = useCallback(() => {
    for (const [name, { filled: [path, params, isFilled] = [] }] of VIEWS) {
      if (!path) continue;
      const add = (answer) => isFilled(answer) && setFilled((before) => [...new Set([...before, name])]);
      get(path, params).then(add, () => {}); // what a key may not see is not in the list
    }
  }, []);
  useEffect(look, []);
  useFresh(["step", "version"], look);
  return filled;
}

function Header({ view, filled, onHelp, onLogout }) {
  const state = useFeedState();
  const shown = [...VIEWS.keys()].filter((name) => name === view || filled.includes(name));
  return html`<header class="top">
    <a class="brand" href="#/overview">lightning-proxy</a>
    <nav aria-label="Views"><${Folded} key=${view} label=${`views: ${view}`}>
      ${shown.map((name) => html`<a key=${name} href=${`#/${name}`} aria-current=${name === view && "page"}>${name}</a>`)}
      <a href="openapi.json">routes</a>
    <//></nav>
    <span class=${`feed ${state}`} role="status">${state === "off" ? "polling" : state}</span>
    <button onClick=${onHelp} title="Keys" aria-label="Keys">?</button>
    ${hasKey() && html`<button onClick=${onLogout}>log out</button>`}
  </header>`;
}

function Login({ onKey, refused }) {
  const field = useRef(null);
  useEffect(() => field.current.focus(), []);
  const onSubmit = (event) => {
    event.preventDefault();
    onKey(field.current.value.trim());
  };
  return html`<main class="login"><form class="panel" onSubmit=${onSubmit}>
    <h1>lightning-proxy</h1>
    <p>This proxy asks for a key. <code>lightning-proxy keys create NAME</code> makes one; with <code>--admin</code> it also lets you promote and roll back.</p>
    ${refused && html`<p class="failure" role="alert">The proxy does not accept this key.</p>`}
    <label>API key <input ref=${field} type="password" name="key" autocomplete="off" pattern="\\s*[!-~]+\\s*" title="A key has no spaces and only ASCII characters." required /></label>
    <button class="primary">Log in</button>
    <p class="muted">The key stays in this browser tab until you close it.</p>
  </form></main>`;
}

const LETTERS_MS = 1200; // between `g` and the letter of a view
const ACTS = { j: () => move(1), ArrowDown: () => move(1), k: () => move(-1), ArrowUp: () => move(-1), "/": search, u: up };

// Rows are real links, so Enter follows the one in focus; arrows move only from one of them.
function useKeyboard(showHelp) {
  useEffect(() => {
    let wentAt = 0;
    const onKey = (event) => {
      const { key, target } = event;
      if (key === "Escape") document.activeElement?.blur();
      if (event.ctrlKey || event.metaKey || event.altKey || isTyping(target)) return;
      const view = Date.now() - wentAt < LETTERS_MS ? LETTERS.get(key) : undefined;
      wentAt = key === "g" ? Date.now() : 0;
      const act = { "?": showHelp, ...ACTS }[key];
      if (!view && (!act || (key.startsWith("Arrow") && !target.matches(".pick")))) return;
      event.preventDefault();
      if (view) location.hash = `#/${view}`;
      else act();
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, []);
}

function move(by) {
  const rows = [...document.querySelectorAll("main .pick")];
  const next = rows[Math.min(rows.length - 1, Math.max(0, rows.indexOf(document.activeElement) + by))];
  next?.focus();
  next?.scrollIntoView({ block: "nearest" });
}

function up() {
  location.hash = `#/${place().view}`;
}

function search() {
  const field = () => document.querySelector('main input[type="search"]');
  if (!field()) location.hash = "#/rollouts";
  setTimeout(() => field()?.focus(), field() ? 0 : 100);
}

function Help({ filled, onClose }) {
  const letters = filled.map((name) => [`g ${VIEWS.get(name).key}`, VIEWS.get(name).help ?? name]);
  return html`<${Dialog} label="Keys" onClose=${onClose}>
    <dl class="keys">${[...letters, ...HELP].map(([key, what]) => html`<div><dt><kbd>${key}</kbd></dt><dd>${what}</dd></div>`)}</dl>
    <form method="dialog"><button autofocus>Close</button></form>
  <//>`;
}

// Whoever may look, or `onLogout`.
function Views({ onLogout }) {
  const { view, more, params } = usePlace();
  const filled = useFilled();
  const [help, setHelp] = useState(false);
  useKeyboard(() => setHelp(true));
  const path = [view, ...more].join("/");
  useEffect(() => {
    document.title = `${path} – lightning-proxy`;
    scrollTo(0, 0);
  }, [path]);
  const View = view === "rollouts" && more.length > 0 ? Rollout : VIEWS.get(view)?.View;
  return html`<${Header} view=${view} filled=${filled} onHelp=${() => setHelp(true)} onLogout=${onLogout} />
    <main id="main">${View
      ? html`<${View} key=${path} id=${more[0]} more=${more} params=${params} />`
      : html`<${Empty}>There is no such view. <a href="#/overview">Go to the overview.</a><//>`}</main>
    ${help && html`<${Help} filled=${filled} onClose=${() => setHelp(false)} />`}`;
}

function Page() {
  const [login, setLogin] = useState(null); // null: nobody asked for a key; else whether one was refused
  useEffect(() => {
    const onLogin = () => {
      stopFeed();
      const refused = hasKey();
      setLogin((before) => before ?? { refused }); // several requests are refused at once
      keepKey(null);
    };
    addEventListener(LOGIN, onLogin);
    startFeed();
    return () => removeEventListener(LOGIN, onLogin);
  }, []);
  const onKey = (key) => {
    keepKey(key);
    setLogin(null);
    startFeed();
  };
  const onLogout = () => {
    keepKey(null);
    stopFeed();
    setLogin({ refused: false });
  };
  return login === null ? html`<${Views} onLogout=${onLogout} />` : html`<${Login} onKey=${onKey} refused=${login.refused} />`;
}

takeKey();
render(html`<${Page} />`, document.body);
