// Rewarders: what gives rewards by itself, how it agrees with people, what it has spent, and what waits for it.
import { useData } from "./data.mjs";
import { Badge, Empty, Facts, Loaded, Panel, Stat, Table, Time, html, number, plural, usd } from "./parts.mjs";

export const key = "w";
export const filled = ["/rewarders", {}, ({ data }) => data.length > 0];

export function View() {
  const found = useData("/rewarders", {}, ["reward", "rollout"]);
  return html`<h1 class="hidden">Rewarders</h1><${Loaded} of=${found}>${(all) => html`<${Found} ...${all} />`}<//>`;
}

function Found({ data, weights, budget, labels }) {
  return html`${budget && html`<dl class="stats">
      <${Stat} label="tokens spent" value=${number(budget.spent_tokens)} note=${ofBudget(budget.tokens, number)} warn=${isSpent(budget.tokens, budget.spent_tokens)} />
      <${Stat} label="USD spent" value=${dollars(budget.spent_usd)} note=${ofBudget(budget.usd, dollars)} warn=${isSpent(budget.usd, budget.spent_usd)} />
      <${Stat} label="labels of people" value=${number(labels.rollouts)} note=${labels.rollouts > 0 ? html`by ${labels.people === 1 ? "1 person" : `${number(labels.people)} people`}, among the newest 5,000 rollouts` : "none among the newest 5,000 rollouts"} />
    </dl>`}
    ${data.map((one) => one.warning && html`<p class="warned"><${Badge} kind="bad">warning<//> ${one.warning.split("`").map((part, i) => (i % 2 ? html`<code>${part}</code>` : part))}</p>`)}
    <${Panel} title="Rewarders" note="No step takes a rollout before all of them have spoken." wide>${data.length === 0
      ? html`<${Empty}>None gives rewards by itself. <code>judge.use</code> names those that do; <code>lightning-proxy rescore --rewarder rank --dry-run ID ID</code> shows what one would give.<//>`
      : html`<${Table} label="Rewarders" columns=${COLUMNS} rows=${data} rowKey=${({ name }) => name} />`}<//>
    <div class="grid">
      <${Panel} title="Weights" note="What a reward counts for in training, by its name."><${Facts} of=${weights} /><//>
      <${Panel} title="People"><p>Your own rewards show whether a judge can be believed. <a class="pick" href="#/rate">Rate rollouts</a>, then run <code>lightning-proxy rewards check ${data.find(({ check }) => !check)?.called ?? data[0]?.called ?? "KIND"}</code>.</p><//>
    </div>`;
}

const dollars = (value) => usd({ usd: value });
const isSpent = (most, spent) => most !== null && spent >= most;
const ofBudget = (most, as) => (most === null ? "no budget" : `of a budget of ${as(most)}`);

const COLUMNS = [
  { name: "name", label: "reward", cell: ({ name }) => html`<span class="id" title=${name}>${name}</span>` },
  { name: "kind", label: "kind", cell: ({ kind }) => kind },
  { name: "model", label: "model", cell: ({ model }) => model && html`<span class="id" title=${model}>${model}</span>` },
  { name: "weight", label: "weight", num: true, title: "in trainer.reward_weights", cell: ({ weight }) => (weight === 0 ? html`<span class="muted">0, does not train</span>` : number(weight)) },
  { name: "agreement", label: "agrees with people", title: "the share of pairs that both order alike; half is chance", cell: (one) => html`<${Agreement} of=${one} />` },
  { name: "checked", label: "checked", num: true, cell: ({ check }) => check && html`<${Time} at=${check.at} />` },
  { name: "waiting", label: "waiting", num: true, title: "rollouts that it has not spoken about", cell: ({ waiting }) => waiting !== null && number(waiting) },
  { name: "tokens", label: "tokens", num: true, cell: ({ tokens, model }) => model && tokens !== null && number(tokens) },
  { name: "usd", label: "USD", num: true, cell: (one) => one.model && one.usd !== null && usd({ usd: one.usd, unpriced: one.usd === 0 && one.tokens > 0 ? 1 : 0 }) },
];

// The last check of it as it is now; nothing for what does not judge.
function Agreement({ of: { away, check, kind } }) {
  if (away) return html`<small class="reason" title=${away}>${away}</small>`;
  if (["function", "judge"].includes(kind)) return null;
  if (!check) return html`<span class="muted">not checked</span>`;
  const { alike, low, high, labels } = check;
  return html`<${Badge} kind=${low > 0.5 ? "good" : "bad"}>${number(alike)}<//> <small>${number(low)} to ${number(high)}, ${plural(labels, "label")}</small>`;
}
