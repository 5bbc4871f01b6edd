// The newest events of the feed, in words.
import { listen, useFeedState } from "./feed.mjs";
import { milliseconds, number } from "./format.mjs";
import { html, useEffect, useState } from "./html.mjs";
import { Badge, Empty, RolloutLink, Start, Time } from "./parts.mjs";

const KEPT = 40;
const FAILED = new Set(["error", "cancelled"]);

const SAID = {
  call: (one) => html`<${Badge} kind=${FAILED.has(one.status) ? "bad" : ""}>call ${one.seq}, ${one.status === "incomplete" ? "under way" : one.status}<//> <${RolloutLink} id=${one.rollout_id} /> <small>${one.model} ${milliseconds(one.latency_ms)}</small>`,
  reward: (one) => html`<${Badge} kind="good">reward ${number(one.reward)}<//> <${RolloutLink} id=${one.rollout_id} /> <small>${one.source}</small>`,
  rollout: (one) => html`<${Badge}>rollout ${one.status}<//> <${RolloutLink} id=${one.rollout_id} /> <small>${one.task_id}</small>`,
  step: (one) => html`<${Badge} kind="accent">step ${one.step}<//> <small>reward ${number(one.reward)}</small>`,
  version: (one) => html`<${Badge} kind="accent">version ${one.version}<//> <a href="#/versions">${one.live ? "live" : one.status}</a>`,
};

export function Happening() {
  const state = useFeedState();
  const [events, setEvents] = useState([]);
  useEffect(() => listen((event) => {
    if (SAID[event.kind]) setEvents((before) => [{ ...event, key: (before[0]?.key ?? 0) + 1 }, ...before].slice(0, KEPT));
  }), []);
  if (state === "off") return html`<${Empty}>This key has no feed. The numbers above are read every few seconds.<//>`;
  if (events.length === 0) {
    return html`<${Empty}>Nothing has happened since you opened this page. <${Start} /><//>`;
  }
  return html`<ol class="happening">${events.map(({ key, kind, data, at }) => html`<li key=${key}><span>${SAID[kind](data)}</span><${Time} at=${at} /></li>`)}</ol>`;
}
