// What the page reads and writes: requests with the key that the person gave for this browser tab, and `GET /feed`,
// which is read with fetch so that the key goes in a header.
import { useCallback, useEffect, useRef, useState } from "./vendor/hooks.mjs";

const KEY = "lightning-proxy-key";
export const LOGIN = "lightning-login"; // the event that says that a key is needed

export const hasKey = () => sessionStorage.getItem(KEY) !== null;
export const keepKey = (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY));

// Keeps the key that an address of `lightning-proxy dashboard` brings, and takes it out of the address.
export function takeKey() {
  const [view, query] = location.hash.split("?");
  const key = new URLSearchParams(query).get("key");
  if (!key) return;
  keepKey(key);
  history.replaceState(null, "", view);
}

const authorization = () => (hasKey() ? { Authorization: `Bearer ${sessionStorage.getItem(KEY)}` } : {});

// A route's path, in which values may have any characters.
export const route = (parts, ...values) => String.raw({ raw: parts }, ...values.map(encodeURIComponent));

// The address of a route below the page, with those parameters that have a value.
function address(path, params = {}) {
  const query = new URLSearchParams(Object.entries(params).filter(([, value]) => ![undefined, null, ""].includes(value)));
  return path.slice(1) + (String(query) && `?${query}`);
}

// Returns the JSON of an answer; throws an Error with the proxy's own words, and its `status`.
async function ask(method, path, body, signal) {
  const headers = { ...authorization(), ...(body && { "Content-Type": "application/json" }) };
  const response = await fetch(path, { method, headers, body: JSON.stringify(body), signal }).catch((error) => {
    throw error.name === "AbortError" ? error : new Error("The proxy does not answer.");
  });
  const answer = await response.json().catch(() => null);
  if (response.ok) return answer;
  if (response.status === 401 && method === "GET") dispatchEvent(new Event(LOGIN));
  throw Object.assign(new Error(answer?.error?.message ?? `The proxy answered ${response.status}.`), { status: response.status });
}

export const get = (path, params) => ask("GET", address(path, params));
export const post = (path, body) => ask("POST", address(path), body);
export const remove = (path) => ask("DELETE", address(path));

// Whether the key sees all rollouts, by the answer of `/status`. Not before that is known.
export const seesAll = (status) => Boolean(status?.verified);

// Whether the proxy can answer calls. It says so with a 503 as well, which is not an error here.
export const readiness = () => fetch("readyz").then((response) => response.json()).catch(() => ({ status: "away" }));

// The data of a route: what is there stays until the next answer has come. It is read again when an event of one of
// these kinds has come that `concerns` it. `path` null: asks nothing.
export function useData(path, params = {}, kinds = [], concerns = () => true) {
  const [state, setState] = useState({ data: null, error: null });
  const [turn, setTurn] = useState(0);
  const wanted = path && address(path, params);
  useEffect(() => {
    if (!wanted) return undefined;
    const abort = new AbortController();
    setState((before) => ({ ...before, data: before.of === wanted ? before.data : null }));
    ask("GET", wanted, undefined, abort.signal).then(
      (data) => setState({ data, error: null, of: wanted }),
      (error) => error.name !== "AbortError" && setState((before) => ({ ...before, error, of: wanted })),
    );
    return () => abort.abort();
  }, [wanted, turn]);
  const reload = useCallback(() => setTurn((n) => n + 1), []);
  useFresh(kinds, reload, concerns);
  return { ...state, reload };
}

const RETRY_MS = 1000;
const SILENT_MS = 60000; // the proxy says something more often: a connection without a word is dead
const POLL_MS = 5000; // where there is no feed
const GATHER_MS = 1500; // several events are one reason to ask again

const listeners = new Set();
const tell = (kind, data) => listeners.forEach((listener) => listener({ kind, data, at: Date.now() / 1000 }));
let feedState = "connecting"; // or "live", "off": this key has no feed
let cursor = null;
let connection = null; // that is wanted

export function listen(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

function become(next) {
  feedState = next;
  tell("feed", next);
}

export function useFeedState() {
  const [seen, setSeen] = useState(feedState);
  useEffect(() => {
    setSeen(feedState);
    return listen(({ kind, data }) => kind === "feed" && setSeen(data));
  }, []);
  return seen;
}

export function stopFeed() {
  connection?.abort();
  connection = null;
}

// A browser opens six connections to a host: a hidden tab gives its one back, and reconnects when it is shown.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) connection?.abort();
  else if (connection) startFeed();
});

export async function startFeed() {
  stopFeed();
  connection = new AbortController();
  const { signal } = connection;
  while (!signal.aborted) {
    const status = await read(signal).catch(() => null);
    if (signal.aborted) return;
    become([401, 403, 404].includes(status) ? "off" : "connecting");
    if (feedState === "off") return;
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

// Reads until the connection ends. Returns the status of an answer that is not a feed.
async function read(signal) {
  const response = await fetch(address("/feed", { cursor }), { headers: authorization(), signal });
  if (!response.ok) return response.status;
  become("live");
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const silence = setTimeout(() => reader.cancel(), SILENT_MS);
    const { done, value } = await reader.read();
    clearTimeout(silence);
    if (done) return response.status;
    const frames = (rest + value).split("\n\n");
    rest = frames.pop();
    frames.forEach(hear);
  }
}

function hear(frame) {
  const { id, event, data } = Object.fromEntries(frame.split("\n").map((line) => line.split(/: (.*)/, 2)));
  cursor = id ?? cursor;
  if (data) tell(event, JSON.parse(data));
}

// Calls `reload` when an event of one of these kinds has come, or every few seconds where there is no feed.
function useFresh(kinds, reload, concerns) {
  const feed = useFeedState();
  const latest = useRef(concerns);
  latest.current = concerns;
  useEffect(() => {
    if (kinds.length === 0) return undefined;
    if (feed === "off") {
      const poll = setInterval(reload, POLL_MS);
      return () => clearInterval(poll);
    }
    let timer = null;
    const stop = listen(({ kind, data }) => {
      if (timer !== null || !(kind === "missed" || (kinds.includes(kind) && latest.current(data)))) return;
      timer = setTimeout(() => {
        timer = null;
        reload();
      }, GATHER_MS);
    });
    return () => {
      stop();
      clearTimeout(timer);
    };
  }, [feed, reload]);
}
