// Evaluations: what each version earned on held-out tasks, how sure that is, and which version is the best.
import { Chart } from "./chart.mjs";
import { useData } from "./data.mjs";
import { Badge, Empty, Loaded, Panel, Reward, Stat, Table, Time, html, link, number, signed, useMemo, useState } from "./parts.mjs";

const SHOWN = 100;
const ELSEWHERE = html`The intervals of <code>lightning-proxy eval</code> are in its report; those of <code>evaluation</code> are here.`;

export const key = "e";
export const filled = ["/policy/versions", {}, ({ data }) => data.some(({ evaluation, rewards }) => evaluation || rewards?.eval)];

export function View() {
  const policy = useData("/policy", {}, ["version", "step"]);
  const versions = useData("/policy/versions", {}, ["version", "step"]);
  return html`<h1 class="hidden">Evaluations</h1>
    <${Loaded} of=${versions}>${({ data }) => html`<${Found} versions=${data} best=${policy.data?.best} />`}<//>
    <${Panel} title="Experiments"><p class="muted">Each run of <code>lightning-proxy experiment FILE</code> has a store of its own. The same command prints the table of finished runs again, with intervals. <code>lightning-proxy dashboard --store lightning-experiments/NAME</code> shows their curves, and what held-out tasks earned before and after.</p><//>`;
}

function Found({ versions, best }) {
  const [all, setAll] = useState(false);
  const evaluated = useMemo(() => versions.filter(({ evaluation, rewards }) => evaluation || rewards?.eval), [versions]);
  const done = evaluated.map(({ evaluation }) => evaluation).filter((one) => typeof one?.reward === "number");
  const first = done.find(({ difference }) => difference === null);
  const newest = [...evaluated].reverse();
  if (evaluated.length === 0) return html`<${Empty}>${ELSEWHERE} Without <code>evaluation</code> there are none.<//>`;
  const columns = columnsFor(first);
  return html`<dl class="stats">
      <${Stat} label="best version" value=${best?.version ?? "–"} note=${best ? `by ${best.judged === "evaluation" ? "held-out tasks" : "its training reward"}` : "none that can be served is known yet"} />
      ${best && html`<${Stat} label="its reward" value=${number(best.reward)} note=${best.low !== null && interval(best.low, best.high)} />`}
      ${done.length > 0 && html`<${Stat} label="last evaluation" value=${number(done.at(-1).reward)} note=${`version ${done.at(-1).version}, ${interval(done.at(-1).low, done.at(-1).high)}`} />`}
    </dl>
    ${done.length === 0 && html`<p class="muted">${ELSEWHERE}</p>`}
    ${done.length > 1 && html`<${Panel} title="Held-out reward by version" note="The band is the 95 % interval over tasks."><${Curve} done=${done} /><//>`}
    <${Table} label="Evaluations" columns=${columns} rows=${all ? newest : newest.slice(0, SHOWN)} rowKey=${({ version }) => version} />
    ${newest.length > SHOWN && html`<button onClick=${() => setAll(!all)}>${all ? "Show the newest only" : `Show all ${number(newest.length)}`}</button>`}`;
}

const interval = (low, high) => `95 %: ${number(low)} to ${number(high)}`;

function Curve({ done }) {
  const column = (name) => done.map((one) => one[name]);
  const series = [{ label: "reward", values: column("reward"), colour: "good", band: [column("low"), column("high")] }];
  return html`<${Chart} label="Held-out reward by version" xLabel="version" height=${180} x=${column("version")} series=${series} />`;
}

// `first`: the evaluation that the others are compared with.
const columnsFor = (first) => [
  { name: "version", label: "version", cell: (row) => html`<a class="pick" href=${link("rollouts", { mode: "eval", version: row.version })} title="its rollouts">version ${row.version}</a>${row.live && html` <${Badge} kind="accent">live<//>`}${row.best && html` <${Badge} kind="good">best<//>`}` },
  { name: "reward", label: "reward", num: true, title: "mean over tasks; a rollout without a reward counts as 0", cell: ({ evaluation, rewards }) => html`<${Result} of=${evaluation} mean=${rewards?.eval?.mean} />` },
  { name: "interval", label: "95 %", num: true, cell: ({ evaluation: of }) => typeof of?.reward === "number" && `${number(of.low)} to ${number(of.high)}` },
  { name: "difference", label: first ? `above version ${first.version}` : "above the first", num: true, title: "on the same tasks, with its 95 % interval", cell: ({ evaluation: of }) => typeof of?.difference === "number" && html`${signed(of.difference)} <small>${signed(of.difference_low)} to ${signed(of.difference_high)}</small>` },
  { name: "tasks", label: "tasks", num: true, cell: ({ evaluation }) => evaluation?.tasks },
  { name: "failed", label: "failed", num: true, title: "agent programs that failed", cell: ({ evaluation: of }) => (of?.failed > 0 ? `${number(of.failed)} of ${number(of.rollouts)}` : null) },
  { name: "rollouts", label: "eval rollouts", num: true, title: "also of `eval` and of agents that send X-Rollout-Mode: eval", cell: ({ rewards }) => rewards?.eval && number(rewards.eval.rollouts) },
  { name: "when", label: "when", num: true, cell: ({ evaluation }) => evaluation && html`<${Time} at=${evaluation.ended_at ?? evaluation.began_at} />` },
];

function Result({ of, mean }) {
  if (typeof mean === "number" && of?.ended_at !== null) return html`<${Reward} value=${mean} />`;
  if (!of) return html`<${Reward} />`;
  if (of.error) return html`<small class="reason" title=${of.error}>${of.error}</small>`;
  return typeof of.reward === "number" ? html`<${Reward} value=${of.reward} />` : html`<${Badge}>under way<//>`;
}
