// The page: which view is shown, the login, the theme. Each view is a module of its own.
import { hasKey, keepKey, LOGIN, takeKey } from "./api.mjs";
import { Compare } from "./compare.mjs";
import { Costs } from "./costs.mjs";
import { startFeed, stopFeed, useFeedState } from "./feed.mjs";
import { html, render, useEffect, useRef, useState } from "./html.mjs";
import { Help, useKeyboard } from "./keyboard.mjs";
import { Overview } from "./overview.mjs";
import { Empty, Folded } from "./parts.mjs";
import { Rollout } from "./rollout.mjs";
import { Rollouts } from "./rollouts.mjs";
import { Rows } from "./rows.mjs";
import { SideBySide } from "./siblings.mjs";
import { Tasks } from "./tasks.mjs";
import { Versions } from "./versions.mjs";
import { ROOMS } from "./views.mjs"; // made of proxy/ROOM/views/

// By name: what draws a view, and the letter that leads to it after `g`.
const VIEWS = new Map(Object.entries({
  overview: { View: Overview, key: "o" },
  rollouts: { View: Rollouts, key: "r" },
  tasks: { View: Tasks, key: "t" },
  versions: { View: Versions, key: "v" },
  compare: { View: Compare, key: "c" },
  costs: { View: Costs, key: "m" },
  ...ROOMS,
}));
const GO = new Map([...VIEWS].map(([name, { key }]) => [key, name]));
const PARTS_OF_A_ROLLOUT = new Map([[undefined, Rollout], ["rows", Rows], ["beside", SideBySide]]);
const FEED_SAYS = {
  live: ["live", "Events arrive as they happen."],
  connecting: ["connecting", "The page connects to the proxy."],
  off: ["polling", "There is no feed for this key: the page asks every few seconds."],
};
const THEME = "lightning-proxy-theme";
const isDark = matchMedia("(prefers-color-scheme: dark)");

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

function useTheme() {
  const chosen = () => localStorage.getItem(THEME) ?? (isDark.matches ? "dark" : "light");
  const [theme, setTheme] = useState(chosen);
  document.documentElement.dataset.theme = theme;
  useEffect(() => {
    const onChange = () => setTheme(chosen());
    isDark.addEventListener("change", onChange);
    return () => isDark.removeEventListener("change", onChange);
  }, []);
  const toggle = () => {
    localStorage.setItem(THEME, theme === "dark" ? "light" : "dark");
    setTheme(chosen());
  };
  return [theme, toggle];
}

function Header({ view, onHelp, onLogout, theme, onTheme }) {
  const [state, meaning] = FEED_SAYS[useFeedState()];
  return html`<header class="top">
    <a class="brand" href="#/overview">lightning-proxy</a>
    <nav aria-label="Views">
      <${Folded} key=${view} label=${`views: ${view}`}>
        ${[...VIEWS.keys()].map((name) => html`<a href=${`#/${name}`} aria-current=${name === view && "page"}>${name}</a>`)}
        <a href="docs">routes</a>
      <//>
    </nav>
    <span class=${`feed ${state}`} title=${meaning} role="status">${state}</span>
    <button onClick=${onTheme} title="Change between light and dark">${theme === "dark" ? "light" : "dark"}</button>
    <button onClick=${onHelp} title="Keys" aria-label="Keys">?</button>
    ${hasKey() && html`<button onClick=${onLogout}>log out</button>`}
  </header>`;
}

function Login({ onKey, refused }) {
  const field = useRef(null);
  useEffect(() => field.current.focus(), []);
  const onSubmit = (event) => {
    event.preventDefault();
    if (field.current.value.trim()) onKey(field.current.value.trim());
  };
  return html`<main class="login">
    <form class="panel" onSubmit=${onSubmit}>
      <h1>lightning-proxy</h1>
      <p>This proxy asks for a key. <code>lightning-proxy keys create NAME</code> makes one; with <code>--admin</code> it also lets you promote and roll back.</p>
      ${refused && html`<p class="failure" role="alert">The proxy does not accept this key.</p>`}
      <label>API key <input ref=${field} type="password" name="key" autocomplete="off" pattern="\\s*[!-~]+\\s*" title="A key has no spaces and only ASCII characters." required /></label>
      <button class="primary">Log in</button>
      <p class="muted">The key stays in this browser tab until you close it.</p>
    </form>
  </main>`;
}

function viewOf({ view, more }) {
  if (view === "rollouts" && more.length > 0) return PARTS_OF_A_ROLLOUT.get(more[1]);
  return VIEWS.get(view)?.View;
}

function Page() {
  const here = usePlace();
  const [theme, onTheme] = useTheme();
  const [help, setHelp] = useState(false);
  const [login, setLogin] = useState(null); // null: nobody asked for a key; else whether one was refused
  useKeyboard(GO, () => setHelp(true));
  const path = [here.view, ...here.more].join("/");
  useEffect(() => {
    document.title = `${path} – lightning-proxy`;
    scrollTo(0, 0);
  }, [path]);
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
  if (login !== null) return html`<${Login} onKey=${onKey} refused=${login.refused} />`;
  const View = viewOf(here);
  return html`<${Header} view=${here.view} theme=${theme} onTheme=${onTheme} onHelp=${() => setHelp(true)} onLogout=${onLogout} />
    <main id="main">
      ${View ? html`<${View} key=${path} id=${here.more[0]} more=${here.more} params=${here.params} />` : html`<${Empty}>There is no such view. <a href="#/overview">Go to the overview.</a><//>`}
    </main>
    ${help && html`<${Help} views=${[...VIEWS]} onClose=${() => setHelp(false)} />`}`;
}

takeKey();
render(html`<${Page} />`, document.body);
