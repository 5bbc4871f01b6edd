// Rollouts: search, filter, sort, and what can be done with those that are chosen. The filters are in the address.
import { get, post, route, usePages } from "./data.mjs";
import { Badge, Empty, Failure, Filters, Folded, Loaded, MODES, Reward, RolloutLink, Select, Table, TaskLink, Time, html, link, number, plural, save, seconds, useMemo, useState } from "./parts.mjs";

const PAGE = 100;
const SINCE = [["", "any time"], [3600, "last hour"], [86400, "last day"], [604800, "last week"]];
const STATUS = [["", "any"], "running", "completed", "failed", "discarded"];
const STATUS_KIND = { completed: "good", failed: "bad", discarded: "bad" };

// `call`: the status of its last call. Nobody may end a rollout of a single call, which then runs on with no agent.
export function RolloutStatus({ status, call }) {
  const open = status === "running" && !["incomplete", undefined, null].includes(call);
  return html`<${Badge} kind=${STATUS_KIND[status]}>${open ? "not ended" : status}<//>${open && call === "error" && html` <${Badge} kind="bad">last call failed<//>`}`;
}

const COLUMNS = [
  { name: "rollout", value: (row) => row.rollout_id, cell: (row) => html`<${RolloutLink} id=${row.rollout_id} />` },
  { name: "reward", num: true, cell: (row) => html`<${Reward} value=${row.reward} />` },
  { name: "status", cell: (row) => html`<${RolloutStatus} status=${row.status} call=${row.last_call} />` },
  { name: "question", label: "question and answer", cell: (row) => html`<div class="words"><span>${row.question}</span><span class="muted">${row.answer}</span></div>` },
  { name: "task", optional: true, value: (row) => row.task_id, cell: (row) => html`<${TaskLink} id=${row.task_id} />` },
  { name: "agent", optional: true },
  { name: "mode" },
  { name: "calls", num: true },
  { name: "tokens", num: true, title: "sampled tokens" },
  { name: "version", num: true, value: (row) => row.policy_version },
  { name: "model", title: "that its first call asked for" },
  { name: "latency", num: true, title: "mean of its first calls", value: (row) => row.latency_ms, cell: (row) => seconds(row.latency_ms === null ? null : row.latency_ms / 1000) },
  { name: "key", optional: true },
  { name: "trained", title: "the step that took it, or why none will", value: (row) => row.step, cell: (row) => html`<${Fate} row=${row} />` },
  { name: "opened", num: true, value: (row) => row.created_at, cell: (row) => html`<${Time} at=${row.created_at} />` },
];

// What became of a rollout in training.
export function Fate({ row }) {
  if (typeof row.step === "number") return html`<a href=${link("rollouts", { step: row.step })}>step ${row.step}</a>`;
  if (row.dropped) return html`<span class="dropped" title=${row.dropped}>${row.dropped}</span>`;
  return row.status === "completed" && row.mode === "train" && html`<span class="muted">waits</span>`;
}

export function Rollouts({ params }) {
  const field = (name, label, attributes) => html`<label>${label}<input name=${name} value=${params[name] ?? ""} ...${attributes} /></label>`;
  const folded = Object.keys(params).filter((name) => !["text", "sort"].includes(name)).length;
  const reward = { type: "number", step: "any" };
  const count = { type: "number", min: 0 };
  return html`<h1 class="hidden">Rollouts</h1>
    <${Filters} key=${JSON.stringify(params)} view="rollouts">
      ${field("text", "text", { type: "search", placeholder: "in requests and answers", maxlength: 200 })}
      <${Folded} label=${folded > 0 ? `filters: ${folded}` : "filters"}>
        ${field("prefix", "id begins with")} ${field("task_id", "task")} ${field("agent", "agent")}
        <${Select} name="status" label="status" options=${STATUS} value=${params.status} />
        <${Select} name="mode" label="mode" options=${MODES} value=${params.mode} />
        ${field("min_reward", "reward from", reward)} ${field("max_reward", "to", reward)}
        ${field("version", "version", count)} ${field("step", "step", count)} ${field("model", "model")} ${field("key", "key")}
        <${Select} name="ago" label="opened" options=${SINCE} value=${params.ago} />
      <//>
      <button class="primary">Search</button>
      ${Object.keys(params).length > 0 && html`<a class="button" href="#/rollouts">Clear</a>`}
    <//>
    <${List} key=${JSON.stringify(params)} params=${params} />`;
}

function List({ params }) {
  const wanted = useMemo(() => {
    const { ago, sort, ...others } = params;
    return { ...others, since: ago && Math.floor(Date.now() / 1000 - Number(ago)), limit: PAGE, words: true };
  }, []);
  // A search reads requests and answers: it is not done again by itself.
  const kinds = params.text ? [] : ["call", "reward", "rollout", "step"];
  const { first, rows, onMore, error } = usePages("/rollouts", wanted, (row) => row.rollout_id, kinds);
  const [chosen, setChosen] = useState([]);
  const choose = (ids, isChosen) => setChosen((before) => [...before.filter((id) => !ids.includes(id)), ...(isChosen ? ids : [])]);
  const box = (label, ids) => html`<input type="checkbox" aria-label=${label} checked=${ids.every((id) => chosen.includes(id))} onChange=${(event) => choose(ids, event.currentTarget.checked)} />`;
  const [rollout, ...others] = COLUMNS;
  const columns = [{ ...rollout, cell: (row) => html`${box(`choose ${row.rollout_id}`, [row.rollout_id])} ${rollout.cell(row)}` }, ...others];
  const onOrder = (sort) => history.replaceState(null, "", link("rollouts", { ...params, sort }));
  return html`<${Loaded} of=${first}>${() => (rows.length === 0 && !onMore ? html`<${Nothing} filtered=${Object.keys(params).length > 0} />` : html`
    <p class="muted" role="status">${box("choose all", rows.map((row) => row.rollout_id))} ${plural(rows.length, "rollout")}${onMore && " so far; sorted are those on this page"}</p>
    ${chosen.length > 0 && html`<${Chosen} rows=${rows.filter((row) => chosen.includes(row.rollout_id))} onClear=${() => setChosen([])} />`}
    <${Table} label="Rollouts" columns=${columns} rows=${rows} rowKey=${(row) => row.rollout_id} order=${params.sort} onOrder=${onOrder} />
    <div class="below">${onMore && html`<button onClick=${onMore}>Show older rollouts</button>`}
      <button onClick=${() => save(rows, "json", "rollouts")}>this list as JSON</button> <button onClick=${() => save(rows, "jsonl", "rollouts")}>JSONL</button></div>
    <${Failure} error=${error} />`)}<//>`;
}

function Nothing({ filtered }) {
  if (filtered) return html`<${Empty}>No rollout is like that. <a href="#/rollouts">Show all rollouts</a><//>`;
  return html`<${Empty}>No rollouts yet. Start your agent with the proxy's address: <code>OPENAI_BASE_URL=${location.origin}/v1 python agent.py</code><//>`;
}

const NUMBER = /^\s*[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*$/i;

// One after the other; the first that is refused stops the rest, and is told.
async function each(rows, work) {
  const answers = [];
  for (const row of rows) answers.push(await work(row.rollout_id));
  return answers;
}

// Reward, note, discard, train again, download: rollouts that are chosen.
function Chosen({ rows, onClear }) {
  const [state, setState] = useState({ busy: false, error: null, done: "" });
  const [value, setValue] = useState("");
  const run = (work, done) => () => {
    setState({ busy: true, error: null, done: "working…" });
    work().then(() => setState({ busy: false, error: null, done }), (error) => setState({ busy: false, error, done: "" }));
  };
  const running = rows.filter(({ status }) => status === "running");
  const rewarded = rows.filter(({ own_reward, mode }) => own_reward !== null && mode === "train");
  const reward = () => post("/reward", rows.map(({ rollout_id }) => ({ rollout_id, reward: Number(value), source: "page" })));
  const again = () => post("/reward", rewarded.map(({ rollout_id, own_reward }) => ({ rollout_id, reward: own_reward, retrain: true, source: "page" })));
  const note = () => each(rows, (id) => post(route`/rollouts/${id}/events`, { kind: "note", value }));
  const discard = () => each(running, (id) => post(route`/rollouts/${id}/end`, { status: "discarded", reason: value || "discarded on the page" }));
  const download = (kind) => () => each(rows, (id) => get(route`/rollouts/${id}`, { requests: "whole" })).then((all) => save(all, kind, "rollouts"));
  const button = (label, isPossible, work, done) => html`<button disabled=${state.busy || !isPossible} onClick=${run(work, done)}>${label}</button>`;
  return html`<div class="chosen-rows" role="group" aria-label="Chosen rollouts">
    <b>${plural(rows.length, "rollout")} chosen</b>
    <label>number or note<input value=${value} onInput=${(event) => setValue(event.currentTarget.value)} maxlength="2000" /></label>
    ${button("reward", NUMBER.test(value), reward, "rewarded")}
    ${button("note", value !== "", note, "noted")}
    ${button(`discard ${running.length || ""}`, running.length > 0, discard, "discarded")}
    ${button(`train again ${rewarded.length || ""}`, rewarded.length > 0, again, "offered to the trainer again")}
    ${button("JSON", true, download("json"), "saved")} ${button("JSONL", true, download("jsonl"), "saved")}
    <button onClick=${onClear}>choose none</button>
    <span role="status">${state.done}</span><${Failure} error=${state.error} />
  </div>`;
}
