// What calls used and cost, what rewarders spent, and the seconds of the machine that training steps took.
import { seesAll, useData } from "./data.mjs";
import { Empty, Filters, Loaded, Panel, RolloutLink, Select, Start, Table, TaskLink, html, plural, seconds, usd } from "./parts.mjs";

const WAYS = ["day", "model", "key", "task", "rollout", "mode"];
const SINCE = [["", "any time"], [86400, "last day"], [604800, "last week"], [2592000, "last 30 days"]];
const PHASES = ["collect_s", "guide_s", "step_s", "checkpoint_s", "publish_s"]; // of the machine; it waits in wait_s

export const key = "m";
export const filled = ["/rollouts", { limit: 1 }, ({ data }) => data.length > 0];

const tokens = (name, label) => ({ name: `${name}_tokens`, label, num: true });
const NUMBERS = [
  { name: "usd", label: "USD", num: true, cell: (row) => html`<b>${usd(row)}</b>` },
  { name: "calls", num: true },
  tokens("input", "input tokens"), tokens("cached", "of a cache"), tokens("output", "output tokens"), tokens("reasoning", "of reasoning"),
];

export function View({ params }) {
  const by = WAYS.includes(params.by) ? params.by : "day";
  const since = params.ago && Math.floor(Date.now() / 60000) * 60 - Number(params.ago);
  const costs = useData("/costs", { by, since });
  const status = useData("/status");
  const steps = useData("/policy/steps", { limit: 40, brief: true });
  const spent = status.data?.spent ?? [];
  return html`<h1 class="hidden">Costs</h1>
    <${Filters} view="costs"><${Select} name="by" label="by" options=${WAYS} value=${by} /><${Select} name="ago" label="calls of" options=${SINCE} value=${params.ago} /><//>
    <${Loaded} of=${costs}>${(found) => html`<${Panel} title=${`Calls by ${by}`} note=${note(found, spent)}><${Parts} ...${found} /><//>`}<//>
    ${seesAll(status.data) && html`<div class="grid">
      <${Panel} title="Rewarders" note="What the models that judge have used."><${Rewarders} spent=${spent} /><//>
      <${Panel} title="Training steps" note="Seconds of the machine, without the wait for rollouts."><${Steps} steps=${steps.data?.data ?? []} /><//>
    </div>`}`;
}

function note({ total, complete }, spent) {
  return [
    `${usd(total)} for calls${spent.length > 0 ? `, ${usd(sum(spent))} for rewarders so far` : ""}`,
    total.unpriced > 0 && `${plural(total.unpriced, "call")} of models without a price (prices)`,
    total.unknown > 0 && `${plural(total.unknown, "answer")} without a usage`,
    !complete && "only the newest calls are looked at",
  ].filter(Boolean).join("; ");
}

function Parts({ by, data, total }) {
  if (total.calls === 0) return html`<${Empty}>No calls yet. <${Start} /><//>`;
  const Name = { task: TaskLink, rollout: RolloutLink }[by];
  const column = { name: by, cell: ({ name }) => (name === null ? "–" : Name ? html`<${Name} id=${name} />` : name) };
  return html`<${Table} label="Costs" columns=${[column, ...NUMBERS]} rows=${data} rowKey=${({ name }) => name} />`;
}

const sum = (spent) => ({ usd: spent.reduce((all, one) => all + one.usd, 0), unpriced: spent.filter((one) => one.usd === 0 && one.tokens > 0).length });
const SPENT = [{ name: "name", label: "rewarder" }, { name: "tokens", num: true }, { name: "usd", label: "USD", num: true, cell: (row) => usd(sum([row])) }];

function Rewarders({ spent }) {
  if (spent.length === 0) return html`<${Empty}>No model has judged. <code>judge.use</code> names those that do.<//>`;
  return html`<${Table} label="Rewarders" columns=${SPENT} rows=${spent} rowKey=${({ name }) => name} />`;
}

const STEPS = [
  { name: "step", num: true },
  { name: "machine", num: true, cell: ({ metrics }) => seconds(PHASES.reduce((all, phase) => all + (metrics[phase] ?? 0), 0)) },
  { name: "step_s", label: "of it the step", num: true, cell: ({ metrics }) => seconds(metrics.step_s) },
  { name: "wait_s", label: "waited", num: true, cell: ({ metrics }) => seconds(metrics.wait_s) },
];

function Steps({ steps }) {
  if (steps.length === 0) return html`<${Empty}>No step yet. <code>lightning-proxy doctor</code> says what the first one waits for.<//>`;
  return html`<${Table} label="Training steps" columns=${STEPS} rows=${steps} rowKey=${({ step }) => step} />`;
}
