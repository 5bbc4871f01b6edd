// Environments: what rollouts earned in each, by seat and measure, with the interval, and how many failed.
import { useData } from "./data.mjs";
import { Empty, Filters, Loaded, MODES, Panel, Select, Table, Time, html, link, number, plural } from "./parts.mjs";

export const filled = ["/environments", {}, ({ data }) => data.length > 0];

const COLUMNS = [
  { name: "name", label: "reward of", title: "the rollout; a seat, by its agent's name; or what else was measured", cell: ({ name }) => (name === "reward" ? html`<b>the rollout</b>` : name) },
  { name: "mean", num: true, title: "over tasks", cell: ({ mean }) => html`<b>${number(mean)}</b>` },
  { name: "interval", label: "95 % interval", num: true, cell: ({ low, high }) => (low === null ? "one task" : `${number(low)} to ${number(high)}`) },
  { name: "rollouts", num: true },
];

export function View({ params }) {
  const found = useData("/environments", { mode: params.mode }, ["step"]);
  return html`<h1 class="hidden">Environments</h1>
    <${Filters} view="environments"><${Select} name="mode" label="mode" options=${MODES} value=${params.mode} /><//>
    <${Loaded} of=${found}>${({ data }) => (data.length > 0
      ? html`<div class="grid">${data.map((one) => html`<${Environment} key=${one.environment} of=${one} />`)}</div>`
      : html`<${Empty}>No rollout says which environment it played. <code>lightning-proxy run --environment reasoning_gym:gcd</code> plays one.<//>`)}<//>`;
}

function Environment({ of }) {
  const note = html`${plural(of.rollouts, "rollout")} of ${plural(of.tasks, "task")}, ${number(of.running)} running, ${of.failed > 0 ? html`<a href=${link("rollouts", { status: "failed" })}>${number(of.failed)} failed</a>` : "none failed"}, last <${Time} at=${of.last_at} />`;
  return html`<${Panel} title=${of.environment} note=${note}>
    ${of.rewards.length > 0 ? html`<${Table} label=${`Rewards of ${of.environment}`} columns=${COLUMNS} rows=${of.rewards} rowKey=${({ name }) => name} />` : html`<${Empty}>Nothing has a reward yet.<//>`}<//>`;
}
