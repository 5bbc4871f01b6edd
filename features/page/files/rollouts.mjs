// Rollouts: search, filter, sort. The filters are in the address.
import { address, get, useData } from "./api.mjs";
import { Chosen } from "./chosen.mjs";
import { CopyAs, save } from "./copies.mjs";
import { useFresh } from "./feed.mjs";
import { milliseconds, number, plural } from "./format.mjs";
import { html, useEffect, useMemo, useState } from "./html.mjs";
import { Badge, Empty, Failure, Folded, Loaded, Reward, RolloutLink, Table, Time, link, useSort } from "./parts.mjs";

const PAGE = 100;
const SINCE = { "": "any time", 3600: "last hour", 86400: "last day", 604800: "last week" };
const STATUS = ["", "running", "completed", "failed", "discarded"];
const STATUS_KIND = { completed: "good", failed: "bad", discarded: "bad" };

// `call`: the status of its last call. Nobody may end a rollout of a single call, which then runs on with no agent.
export function RolloutStatus({ status, call }) {
  const open = status === "running" && !["incomplete", undefined, null].includes(call);
  return html`<${Badge} kind=${STATUS_KIND[status]}>${open ? "not ended" : status}<//>${open && call === "error" && html` <${Badge} kind="bad">last call failed<//>`}`;
}

const COLUMNS = [
  { name: "rollout", label: "rollout", cell: ({ rollout_id }) => html`<${RolloutLink} id=${rollout_id} />` },
  { name: "reward", label: "reward", num: true, value: (row) => row.reward, cell: (row) => html`<${Reward} value=${row.reward} />` },
  { name: "status", label: "status", value: (row) => row.status, cell: (row) => html`<${RolloutStatus} status=${row.status} call=${row.last_call} />` },
  { name: "words", label: "question and answer", cell: (row) => html`<div class="words"><span>${row.question}</span><span class="muted">${row.answer}</span></div>` },
  { name: "task", label: "task", value: (row) => row.task_id, cell: ({ task_id }) => task_id && html`<a class="id" href=${link("rollouts", { task_id })} title=${task_id}>${task_id}</a>` },
  { name: "agent", label: "agent", value: (row) => row.agent, cell: (row) => row.agent },
  { name: "mode", label: "mode", value: (row) => row.mode, cell: (row) => row.mode },
  { name: "calls", label: "calls", num: true, value: (row) => row.calls, cell: (row) => number(row.calls) },
  { name: "tokens", label: "tokens", num: true, title: "sampled tokens", value: (row) => row.tokens, cell: (row) => number(row.tokens) },
  { name: "version", label: "version", num: true, value: (row) => row.policy_version, cell: (row) => number(row.policy_version) },
  { name: "model", label: "model", title: "that its first call asked for", value: (row) => row.model, cell: (row) => row.model },
  { name: "latency", label: "latency", num: true, title: "mean of its first calls", value: (row) => row.latency_ms, cell: (row) => milliseconds(row.latency_ms) },
  { name: "key", label: "key", value: (row) => row.key, cell: (row) => row.key },
  { name: "trained", label: "trained", title: "the step that took it, or why none will", value: (row) => row.step, cell: (row) => html`<${Fate} row=${row} />` },
  { name: "opened", label: "opened", num: true, value: (row) => row.created_at, cell: (row) => html`<${Time} at=${row.created_at} />` },
];

// What became of a rollout in training.
function Fate({ row }) {
  if (row.step !== null) return html`<a href=${link("rollouts", { step: row.step })}>step ${row.step}</a>`;
  if (row.dropped) return html`<span class="dropped" title=${row.dropped}>${row.dropped}</span>`;
  return row.status === "completed" && row.mode === "train" ? html`<span class="muted">waits</span>` : null;
}

export function Rollouts({ params }) {
  return html`<h1 class="hidden">Rollouts</h1><${Filters} key=${JSON.stringify(params)} params=${params} /><${List} key=${JSON.stringify(params)} params=${params} />`;
}

function Filters({ params }) {
  const onSubmit = (event) => {
    event.preventDefault();
    const given = [...new FormData(event.currentTarget)].filter(([, value]) => value !== "");
    location.hash = link("rollouts", given);
  };
  const onChange = (event) => event.currentTarget.form.requestSubmit();
  const options = (all, chosen = "") => all.map(([value, label]) => html`<option value=${value} selected=${String(value) === chosen}>${label}</option>`);
  const field = (name, label, attributes = {}) => html`<label>${label}<input name=${name} value=${params[name] ?? ""} ...${attributes} /></label>`;
  const reward = { type: "number", step: "any", size: 6 };
  const count = { type: "number", min: 0, size: 6 };
  const folded = Object.keys(params).filter((name) => !["text", "sort"].includes(name)).length;
  return html`<form class="filters" role="search" onSubmit=${onSubmit}>
    ${field("text", "text", { type: "search", placeholder: "in requests and answers", maxlength: 200 })}
    <${Folded} label=${folded > 0 ? `filters: ${folded}` : "filters"}>
      ${field("prefix", "id begins with")} ${field("task_id", "task")} ${field("agent", "agent")}
      <label>status<select name="status" onChange=${onChange}>${options(STATUS.map((one) => [one, one || "any"]), params.status)}</select></label>
      <label>mode<select name="mode" onChange=${onChange}>${options([["", "any"], ["train", "train"], ["eval", "eval"]], params.mode)}</select></label>
      ${field("min_reward", "reward from", reward)} ${field("max_reward", "to", reward)}
      ${field("version", "version", count)} ${field("step", "step", count)} ${field("model", "model")} ${field("key", "key")}
      <label>opened<select name="ago" onChange=${onChange}>${options(Object.entries(SINCE), params.ago)}</select></label>
    <//>
    <button class="primary">Search</button>
    ${Object.keys(params).length > 0 && html`<a class="button" href="#/rollouts">Clear</a>`}
  </form>`;
}

function List({ params }) {
  const wanted = useMemo(() => {
    const { ago, sort, ...others } = params;
    return { ...others, since: ago && Math.floor(Date.now() / 1000 - Number(ago)), limit: PAGE, words: true };
  }, []);
  const first = useData("/rollouts", wanted);
  const [rows, setRows] = useState(null);
  const [next, setNext] = useState({ cursor: null, error: null });
  useEffect(() => {
    if (first.data === null) return;
    if (rows === null) setNext({ cursor: first.data.next_cursor, error: null });
    setRows((before) => joined(first.data.data, before ?? []));
  }, [first.data]);
  // A search reads requests and answers: it is not done again by itself.
  useFresh(params.text ? [] : ["call", "reward", "rollout", "step"], first.reload);
  const onMore = () => get("/rollouts", { ...wanted, cursor: next.cursor }).then(
    (page) => {
      setRows((before) => joined(before, page.data));
      setNext({ cursor: page.next_cursor, error: null });
    },
    (error) => setNext((before) => ({ ...before, error })),
  );
  const onSort = (sort) => history.replaceState(null, "", link("rollouts", { ...params, sort }));
  return html`<${Loaded} of=${first}>${() => rows && html`<${Found} rows=${rows} order=${params.sort} onOrder=${onSort} path=${address("rollouts", wanted)} filtered=${Object.keys(params).length > 0} more=${next.cursor !== null} onMore=${onMore} />
    <${Failure} error=${next.error} />`}<//>`;
}

// Two lists of rollouts, each once, as the first list that has it says.
function joined(rows, others) {
  const known = new Set(rows.map(({ rollout_id }) => rollout_id));
  return [...rows, ...others.filter(({ rollout_id }) => !known.has(rollout_id))];
}

function Found({ rows, order, onOrder, path, filtered, more, onMore }) {
  const [chosen, setChosen] = useState(new Set());
  const choose = (ids, isChosen) => setChosen((before) => new Set([...[...before].filter((id) => !ids.includes(id)), ...(isChosen ? ids : [])]));
  const box = (label, ids) => html`<input type="checkbox" aria-label=${label} checked=${ids.length > 0 && ids.every((id) => chosen.has(id))} onChange=${(event) => choose(ids, event.currentTarget.checked)} />`;
  const shown = COLUMNS.filter(({ name }) => !["agent", "key"].includes(name) || rows.some((row) => row[name]));
  const [first, ...others] = shown;
  const columns = [{ ...first, cell: (row) => html`${box(`choose ${row.rollout_id}`, [row.rollout_id])} ${first.cell(row)}` }, ...others];
  const { sorted, sort, onSort } = useSort(COLUMNS, rows, order, onOrder);
  if (rows.length === 0 && !more) {
    return filtered
      ? html`<${Empty}>No rollout is like that. <a href="#/rollouts">Show all rollouts</a><//>`
      : html`<${Empty}>No rollouts yet. Start your agent with the proxy's address: <code>OPENAI_BASE_URL=${location.origin}/v1 python agent.py</code><//>`;
  }
  return html`<p class="muted" role="status">${box("choose all", rows.map(({ rollout_id }) => rollout_id))} ${plural(rows.length, "rollout")}${more ? " so far" : ""}${sort && more ? "; sorted are those on this page" : ""}</p>
    ${chosen.size > 0 && html`<${Chosen} rows=${rows.filter(({ rollout_id }) => chosen.has(rollout_id))} onClear=${() => setChosen(new Set())} />`}
    <${Table} label="Rollouts" columns=${columns} rows=${sorted} rowKey=${(row) => row.rollout_id} sort=${sort} onSort=${onSort} />
    <div class="below">${more && html`<button onClick=${onMore}>Show older rollouts</button>`}
      <${CopyAs} path=${path} /> <button onClick=${() => save(sorted, "json", "rollouts")}>this list as JSON</button> <button onClick=${() => save(sorted, "jsonl", "rollouts")}>JSONL</button></div>`;
}
