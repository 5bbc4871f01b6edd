// What happens, as it happens: `GET /feed`, read with fetch so that the key goes in a header.
import { address, headers } from "./api.mjs";
import { useEffect, useRef, useState } from "./html.mjs";

const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 15000;
const SILENT_MS = 60000; // the proxy says something more often: a connection without a word is dead
const POLL_MS = 5000; // where there is no feed
const GATHER_MS = 1500; // several events are one reason to ask again

const listeners = new Set();
const watchers = new Set();
let state = "connecting"; // or "live", "off": this key has no feed
let cursor = null;
let wanted = false;
let abort = null;

export function listen(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function useFeedState() {
  const [seen, setSeen] = useState(state);
  useEffect(() => {
    watchers.add(setSeen);
    setSeen(state);
    return () => watchers.delete(setSeen);
  }, []);
  return seen;
}

export function startFeed() {
  wanted = true;
  connect();
}

export function stopFeed() {
  wanted = false;
  abort?.abort();
}

// A browser opens six connections to a host: a hidden tab gives its one back, and reconnects when it is shown.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) abort?.abort();
  else if (wanted) connect();
});

async function connect() {
  abort?.abort();
  const mine = (abort = new AbortController());
  let wait = FIRST_WAIT_MS;
  while (!mine.signal.aborted) {
    const before = cursor;
    const answer = await read(mine.signal).catch(() => null);
    if (mine.signal.aborted) return;
    if ([401, 403, 404].includes(answer)) return become("off");
    become("connecting");
    wait = cursor === before ? Math.min(2 * wait, LONGEST_WAIT_MS) : FIRST_WAIT_MS;
    await new Promise((resolve) => setTimeout(resolve, wait));
  }
}

function become(next) {
  state = next;
  for (const watcher of watchers) watcher(next);
}

// Reads until the connection ends. Returns the status of an answer that is no feed.
async function read(signal) {
  const response = await fetch(address("feed", { cursor }), { headers: headers(), signal });
  if (!response.ok) return response.status;
  become("live");
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const silence = setTimeout(() => reader.cancel(), SILENT_MS);
    const { done, value } = await reader.read();
    clearTimeout(silence);
    if (done) return response.status;
    const frames = (rest + value).split(/\r?\n\r?\n/);
    rest = frames.pop();
    frames.map(frameOf).forEach(tell);
  }
}

// A frame of server-sent events as {id, event, data}.
function frameOf(lines) {
  const frame = { id: null, event: "message", data: "" };
  for (const line of lines.split(/\r?\n/)) {
    const [, name, value] = /^(id|event|data): ?(.*)$/.exec(line) ?? [];
    if (name) frame[name] = value;
  }
  return frame;
}

function tell(frame) {
  if (frame.id !== null) cursor = frame.id;
  if (!frame.data) return;
  const data = JSON.parse(frame.data);
  for (const listener of listeners) listener({ kind: frame.event, data, at: Date.now() / 1000 });
}

// Asks again when one of these kinds of events has come, or every few seconds where there is no feed.
export function useFresh(kinds, reload, matches = () => true) {
  const feed = useFeedState();
  const latest = useRef(matches);
  latest.current = matches;
  useEffect(() => {
    if (feed === "off") {
      const timer = setInterval(reload, POLL_MS);
      return () => clearInterval(timer);
    }
    let timer = null;
    const again = () => {
      timer = null;
      reload();
    };
    const stop = listen(({ kind, data }) => {
      const concerns = kind === "missed" || (kinds.includes(kind) && latest.current(data));
      if (concerns && timer === null) timer = setTimeout(again, GATHER_MS);
    });
    return () => {
      stop();
      clearTimeout(timer);
    };
  }, [feed, reload]);
}
