// The page: which view is shown, the login, the keys. Each view is a module of its own.
import { LOGIN, hasKey, keepKey, startFeed, stopFeed, takeKey, useData, useFeedState } from "./data.mjs";
import { Overview } from "./overview.mjs";
import { Empty, Folded, html, isTyping, render, useEffect, useRef, useState } from "./parts.mjs";
import { Rollout } from "./rollout.mjs";
import { Rollouts } from "./rollouts.mjs";
import { Tasks } from "./tasks.mjs";
import { Versions } from "./versions.mjs";
import { ROOMS } from "./views.mjs"; // made of features/NAME/views/

// By name: what draws a view. `filled`: a route, and whether by its answer the view has anything to show; else it is not
// in the list.
const VIEWS = new Map(Object.entries({
  overview: { View: Overview },
  rollouts: { View: Rollouts },
  tasks: { View: Tasks, filled: ["/tasks", { limit: 1 }, ({ data }) => data.length > 0] },
  versions: { View: Versions, filled: ["/policy/versions", {}, ({ data }) => data.length > 1] },
  ...ROOMS,
}));

// The place that the address names: `#/view/more?name=value`.
function place() {
  const [path, query] = location.hash.slice(2).split("?");
  try {
    const [view = "overview", ...more] = path.split("/").filter(Boolean).map(decodeURIComponent);
    return { view, more, params: Object.fromEntries(new URLSearchParams(query)) };
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

function Header({ view, onLogout }) {
  const state = useFeedState();
  const isShown = ([name, { filled: [path = null, params, isFilled] = [] }]) => {
    const { data } = useData(path, params, ["step", "version"]);
    return name === view || !path || (data !== null && isFilled(data)); // what a key may not see is not in the list
  };
  return html`<header class="top">
    <a class="brand" href="#/overview">lightning-proxy</a>
    <nav aria-label="Views"><${Folded} key=${view} label=${`views: ${view}`}>
      ${[...VIEWS].filter(isShown).map(([name]) => html`<a key=${name} href=${`#/${name}`} aria-current=${name === view && "page"}>${name}</a>`)}
    <//></nav>
    <span class=${`feed ${state}`} role="status">${state === "off" ? "polling" : state}</span>
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

const up = () => (location.hash = `#/${place().view}`);
const KEYS = { j: () => move(1), ArrowDown: () => move(1), k: () => move(-1), ArrowUp: () => move(-1), "/": search, u: up };

// Rows are real links, so Enter follows the one in focus; arrows move only from one of them.
function onKey(event) {
  const { key, target } = event;
  if (key === "Escape") document.activeElement?.blur();
  if (event.ctrlKey || event.metaKey || event.altKey || isTyping(target) || !(key in KEYS)) return;
  if (key.startsWith("Arrow") && !target.matches(".pick")) return;
  event.preventDefault();
  KEYS[key]();
}

function move(by) {
  const rows = [...document.querySelectorAll("main .pick")];
  const next = rows[Math.min(rows.length - 1, Math.max(0, rows.indexOf(document.activeElement) + by))];
  next?.focus();
  next?.scrollIntoView({ block: "nearest" });
}

function search() {
  const field = () => document.querySelector('main input[type="search"]');
  if (!field()) location.hash = "#/rollouts";
  setTimeout(() => field()?.focus(), field() ? 0 : 100);
}

// What is shown to whoever may look.
function Views({ onLogout }) {
  const { view, more, params } = usePlace();
  const path = [view, ...more].join("/");
  useEffect(() => {
    document.title = `${path} – lightning-proxy`;
    scrollTo(0, 0);
  }, [path]);
  const View = view === "rollouts" && more.length > 0 ? Rollout : VIEWS.get(view)?.View;
  return html`<${Header} view=${view} onLogout=${onLogout} />
    <main id="main">${View
      ? html`<${View} key=${path} id=${more[0]} more=${more} params=${params} />`
      : html`<${Empty}>There is no such view. <a href="#/overview">Go to the overview.</a><//>`}</main>`;
}

function Page() {
  const [login, setLogin] = useState(null); // null: nobody asked for a key; else whether one was refused
  const leave = (refused) => {
    stopFeed();
    keepKey(null);
    setLogin((before) => before ?? { refused }); // several requests are refused at once
  };
  useEffect(() => {
    addEventListener(LOGIN, () => leave(hasKey()));
    addEventListener("keydown", onKey);
    startFeed();
  }, []);
  const onLogin = (key) => {
    keepKey(key);
    setLogin(null);
    startFeed();
  };
  return login ? html`<${Login} onKey=${onLogin} refused=${login.refused} />` : html`<${Views} onLogout=${() => leave(false)} />`;
}

takeKey();
render(html`<${Page} />`, document.body);
