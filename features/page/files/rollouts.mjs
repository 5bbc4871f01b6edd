// Rollouts: search and filter; the address has what is asked for.
import { useData } from "./data.mjs";
import { Badge, Empty, Filters, Folded, Loaded, MODES, Older, Reward, RolloutLink, Select, Table, TaskLink, Time, html, link, plural, seconds, useMemo } from "./parts.mjs";

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
  const given = Object.keys(params).filter((name) => name !== "cursor");
  const folded = given.filter((name) => name !== "text").length;
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
      ${given.length > 0 && html`<a class="button" href="#/rollouts">Clear</a>`}
    <//>
    <${List} key=${JSON.stringify(params)} params=${params} isFiltered=${given.length > 0} />`;
}

function List({ params, isFiltered }) {
  const wanted = useMemo(() => {
    const { ago, ...others } = params;
    return { ...others, since: ago && Math.floor(Date.now() / 1000 - Number(ago)), limit: PAGE, words: true };
  }, []);
  // A search reads requests and answers: it is not done again by itself.
  const page = useData("/rollouts", wanted, params.text ? [] : ["call", "reward", "rollout", "step"]);
  return html`<${Loaded} of=${page}>${({ data, next_cursor: cursor }) => (data.length === 0 && !cursor ? html`<${Nothing} isFiltered=${isFiltered} />` : html`
    <p class="muted" role="status">${plural(data.length, "rollout")}${(cursor || params.cursor) && " on this page"}. <kbd>j</kbd>, <kbd>k</kbd> and <kbd>Enter</kbd> choose one, <kbd>/</kbd> searches.</p>
    <${Table} label="Rollouts" columns=${COLUMNS} rows=${data} rowKey=${(row) => row.rollout_id} sortable />
    <div><${Older} view="rollouts" params=${params} cursor=${cursor} /></div>`)}<//>`;
}

function Nothing({ isFiltered }) {
  if (isFiltered) return html`<${Empty}>No rollout is like that. <a href="#/rollouts">Show all rollouts</a><//>`;
  return html`<${Empty}>No rollouts yet. Start your agent with the proxy's address: <code>OPENAI_BASE_URL=${location.origin}/v1 python agent.py</code><//>`;
}
