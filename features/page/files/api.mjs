// Requests to the proxy's control API, with the key that the person gave for this browser tab.
import { useCallback, useEffect, useState } from "./html.mjs";

const KEY = "lightning-proxy-key";
export const LOGIN = "lightning-login"; // the event that says that a key is needed

class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const hasKey = () => sessionStorage.getItem(KEY) !== null;

export function keepKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

// Keeps the key that an address of `lightning-proxy dashboard` brings, and takes it out of the address.
export function takeKey() {
  const [view, query] = location.hash.split("?");
  const given = new URLSearchParams(query);
  if (!given.has("key")) return;
  keepKey(given.get("key"));
  history.replaceState(null, "", view);
}

export function headers() {
  const key = sessionStorage.getItem(KEY);
  return key === null ? {} : { Authorization: `Bearer ${key}` };
}

// The address of a route below the page, with those parameters that have a value.
export function address(path, params = {}) {
  const given = Object.entries(params).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const query = new URLSearchParams(given).toString();
  return path.replace(/^\//, "") + (query ? `?${query}` : "");
}

// Returns the JSON of an answer; throws ApiError with the proxy's own words.
export async function get(path, params, signal) {
  return answerOf(() => fetch(address(path, params), { headers: headers(), signal }), true);
}

export async function post(path, body) {
  const own = { ...headers(), "Content-Type": "application/json" };
  return answerOf(() => fetch(address(path), { method: "POST", headers: own, body: JSON.stringify(body) }), false);
}

export async function remove(path) {
  return answerOf(() => fetch(address(path), { method: "DELETE", headers: headers() }), false);
}

async function answerOf(ask, asksForLogin) {
  let response;
  try {
    response = await ask();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The proxy does not answer.");
  }
  const body = await response.json().catch(() => null);
  if (response.ok) return body;
  if (response.status === 401 && asksForLogin) dispatchEvent(new Event(LOGIN));
  throw new ApiError(response.status, body?.error?.message ?? `The proxy answered ${response.status}.`);
}

// Whether the key sees all rollouts, by the answer of `/status`. Not before that is known.
export const seesAll = (status) => Boolean(status?.verified);

// Whether the proxy can answer calls. It says so with a 503 as well, which is no error here.
export async function readiness() {
  return fetch("readyz").then((response) => response.json(), () => ({ status: "away" }));
}

// The data of a route: what is there stays until the next answer has come. `path` null: asks nothing.
export function useData(path, params = {}) {
  const [state, setState] = useState({ data: null, error: null });
  const [turn, setTurn] = useState(0);
  const wanted = path === null ? null : address(path, params);
  useEffect(() => {
    if (wanted === null) return undefined;
    const abort = new AbortController();
    setState((before) => ({ ...before, data: before.of === wanted ? before.data : null }));
    get(wanted, {}, abort.signal).then(
      (data) => setState({ data, error: null, of: wanted }),
      (error) => {
        if (error.name !== "AbortError") setState((before) => ({ ...before, error, of: wanted }));
      },
    );
    return () => abort.abort();
  }, [wanted, turn]);
  return { ...state, reload: useCallback(() => setTurn((n) => n + 1), []) };
}
