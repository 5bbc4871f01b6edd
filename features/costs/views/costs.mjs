// Costs: what calls used and cost, by day, model, key, task, rollout or mode.
import { useData } from "./data.mjs";
import { Empty, Filters, Loaded, RolloutLink, Select, Start, Table, TaskLink, html, plural, usd } from "./parts.mjs";

const WAYS = ["day", "model", "key", "task", "rollout", "mode"];
const SINCE = [["", "any time"], [86400, "last day"], [604800, "last week"], [2592000, "last 30 days"]];
const LINKS = { task: TaskLink, rollout: RolloutLink };

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
  const draw = ({ name }) => (name === null ? "–" : LINKS[by] ? html`<${LINKS[by]} id=${name} />` : name);
  return html`<h1 class="hidden">Costs</h1>
    <${Filters} view="costs"><${Select} name="by" label="by" options=${WAYS} value=${by} /><${Select} name="ago" label="calls of" options=${SINCE} value=${params.ago} /><//>
    <${Loaded} of=${costs}>${({ data, total }) => (total.calls === 0 ? html`<${Empty}>No calls yet. <${Start} /><//>` : html`
      <p class="muted">${usd(total)} for ${plural(total.calls, "call")}${total.unpriced > 0 && `; ${plural(total.unpriced, "call")} of models without a price (prices)`}${total.unknown > 0 && `; ${plural(total.unknown, "answer")} without a usage`}</p>
      <${Table} label=${`Calls by ${by}`} columns=${[{ name: by, cell: draw }, ...NUMBERS]} rows=${data} rowKey=${({ name }) => name} sortable />`)}<//>`;
}
