// What calls used and cost, what rewarders spent, and the seconds of the machine that training steps took.
import { seesAll, useData } from "./api.mjs";
import { number, plural, seconds } from "./format.mjs";
import { html } from "./html.mjs";
import { Empty, Loaded, Panel, Start, Table, link } from "./parts.mjs";

const WAYS = ["day", "model", "key", "task", "rollout", "mode"];
const SINCE = { "": "any time", 86400: "last day", 604800: "last week", 2592000: "last 30 days" };
const PHASES = ["collect_s", "guide_s", "step_s", "checkpoint_s", "publish_s"]; // of the machine; it waits in wait_s

// USD; a question mark where some calls' cost is not known.
export function usd({ usd: value, unpriced = 0, unknown = 0 }) {
  const some = unpriced + unknown > 0;
  if (value === 0 && some) return "?";
  return `$${value === 0 ? "0" : value < 0.01 ? number(value) : value.toFixed(2)}${some ? " + ?" : ""}`;
}

// Input and output, those from a cache and of reasoning apart.
export function usedTokens({ input_tokens, cached_tokens, output_tokens, reasoning_tokens }) {
  const cached = cached_tokens > 0 ? ` (${number(cached_tokens)} cached)` : "";
  return `${number(input_tokens)}${cached} + ${plural(output_tokens, "token")}${reasoning_tokens > 0 ? ` (${number(reasoning_tokens)} reasoning)` : ""}`;
}

const tokens = (name, label) => ({ name, label, num: true, cell: (row) => number(row[`${name}_tokens`]) });
const NUMBERS = [
  { name: "usd", label: "USD", num: true, cell: (row) => html`<b>${usd(row)}</b>` },
  { name: "calls", label: "calls", num: true, cell: ({ calls }) => number(calls) },
  tokens("input", "input tokens"), tokens("cached", "of a cache"), tokens("output", "output tokens"), tokens("reasoning", "of reasoning"),
];

export function Costs({ params }) {
  const by = WAYS.includes(params.by) ? params.by : "day";
  const since = params.ago && Math.floor(Date.now() / 60000) * 60 - Number(params.ago);
  const costs = useData("/costs", { by, since });
  const status = useData("/status");
  const steps = useData("/policy/steps", { limit: 40, brief: true });
  const choose = (name, options, chosen) => html`<select name=${name} onChange=${(event) => (location.hash = link("costs", { ...params, [name]: event.currentTarget.value }))}>
    ${options.map(([value, label]) => html`<option value=${value} selected=${value === chosen}>${label}</option>`)}</select>`;
  return html`<h1 class="hidden">Costs</h1>
    <form class="filters"><label>by${choose("by", WAYS.map((one) => [one, one]), by)}</label><label>calls of${choose("ago", Object.entries(SINCE), params.ago ?? "")}</label></form>
    <${Loaded} of=${costs}>${(found) => html`<${Panel} title=${`Calls by ${by}`} note=${note(found, status.data?.spent ?? [])} wide><${Parts} found=${found} /><//>`}<//>
    ${seesAll(status.data) && html`<div class="grid">
      <${Panel} title="Rewarders" note="What the models that judge have used."><${Rewarders} spent=${status.data?.spent ?? []} /><//>
      <${Panel} title="Training steps" note="Seconds of the machine, without the wait for rollouts."><${Steps} steps=${steps.data?.data ?? []} /><//>
    </div>`}`;
}

function note({ total, complete }, spent) {
  const said = [`${usd(total)} for calls${spent.length > 0 ? `, ${usd(sum(spent))} for rewarders so far` : ""}`];
  if (total.unpriced > 0) said.push(`${plural(total.unpriced, "call")} of models without a price (prices)`);
  if (total.unknown > 0) said.push(`${plural(total.unknown, "answer")} without a usage`);
  if (!complete) said.push("only the newest calls are looked at");
  return said.join("; ");
}

function Parts({ found }) {
  const { by, data, total } = found;
  if (total.calls === 0) return html`<${Empty}>No calls yet. <${Start} /><//>`;
  const name = ({ name: one }) => {
    if (one === null) return "–";
    if (by === "task") return html`<a class="id" href=${link("rollouts", { task_id: one })}>${one}</a>`;
    return by === "rollout" ? html`<a class="id pick" href=${`#/rollouts/${encodeURIComponent(one)}`}>${one}</a>` : one;
  };
  return html`<${Table} label="Costs" columns=${[{ name: by, label: by, cell: name }, ...NUMBERS]} rows=${data} rowKey=${({ name: one }) => one} />`;
}

const isUnpriced = ({ usd: value, tokens: n }) => value === 0 && n > 0;
const sum = (spent) => ({ usd: spent.reduce((all, one) => all + one.usd, 0), unpriced: spent.filter(isUnpriced).length });

const SPENT = [
  { name: "name", label: "rewarder", cell: ({ name }) => name },
  { name: "tokens", label: "tokens", num: true, cell: ({ tokens: n }) => number(n) },
  { name: "usd", label: "USD", num: true, cell: (row) => usd(sum([row])) },
];

function Rewarders({ spent }) {
  if (spent.length === 0) return html`<${Empty}>No model has judged. <code>judge.use</code> names those that do.<//>`;
  return html`<${Table} label="Rewarders" columns=${SPENT} rows=${spent} rowKey=${({ name }) => name} />`;
}

const ofMachine = ({ metrics }) => PHASES.reduce((sum, phase) => sum + (metrics[phase] ?? 0), 0);
const STEPS = [
  { name: "step", label: "step", num: true, cell: ({ step }) => step },
  { name: "machine", label: "machine", num: true, cell: (step) => seconds(ofMachine(step)) },
  { name: "step_s", label: "of it the step", num: true, cell: ({ metrics }) => seconds(metrics.step_s) },
  { name: "wait_s", label: "waited", num: true, cell: ({ metrics }) => seconds(metrics.wait_s) },
];

function Steps({ steps }) {
  if (steps.length === 0) return html`<${Empty}>No step yet. <code>lightning-proxy doctor</code> says what the first one waits for.<//>`;
  return html`<${Table} label="Training steps" columns=${STEPS} rows=${steps} rowKey=${({ step }) => step} />`;
}
