// Tasks: which are learned, which are never or always solved, and how each one's reward goes over time.
import { Chart, column } from "./chart.mjs";
import { useData } from "./data.mjs";
import { Badge, Empty, Filters, Loaded, MODES, Older, Select, Table, Time, html, link, number, plural } from "./parts.mjs";

const SORTS = [["", "newest first"], ["mean", "highest mean first"], ["spread", "widest spread first"], ["rollouts", "most rollouts first"]];
// The lowest and highest reward of any task tell what a task's rewards are, whatever range they have.
const SOLVED = { never: ["always the lowest", "bad"], sometimes: ["in between", ""], always: ["always the highest", "good"] };

// `range`: the lowest and the highest reward of all tasks that are shown.
const columnsFor = (range) => [
  { name: "task", cell: ({ task_id }) => html`<a class="id pick" href=${link("rollouts", { task_id })} title=${task_id}>${task_id}</a>` },
  { name: "recent", label: "reward over time", title: "the newest rollouts, oldest first; evaluations are green", cell: (row) => html`<${Recent} recent=${row.recent} range=${range} />` },
  { name: "solved", label: "rewards", cell: ({ solved }) => solved && html`<${Badge} kind=${SOLVED[solved][1]}>${SOLVED[solved][0]}<//>` },
  { name: "mean", num: true },
  { name: "std", num: true, title: "standard deviation of its rewards" },
  { name: "range", label: "lowest to highest", num: true, cell: ({ min, max }) => (min === null ? "–" : `${number(min)} to ${number(max)}`) },
  { name: "rollouts", num: true, cell: ({ rollouts, rewarded }) => (rollouts === rewarded ? number(rollouts) : `${number(rewarded)} of ${number(rollouts)}`) },
  { name: "last", num: true, cell: ({ last_at }) => html`<${Time} at=${last_at} />` },
];

export function Tasks({ params }) {
  const { sort, mode, cursor } = params;
  const tasks = useData("/tasks", { sort, mode, cursor, limit: 100 }, ["reward", "rollout"]);
  return html`<h1 class="hidden">Tasks</h1>
    <${Filters} view="tasks">
      <${Select} name="sort" label="order" options=${SORTS} value=${sort} /><${Select} name="mode" label="mode" options=${MODES} value=${mode} />
    <//>
    <${Loaded} of=${tasks}>${({ data, next_cursor, of_newest }) => (data.length === 0
      ? html`<${Empty}>No tasks yet. A header <code>X-Task-Id</code>, or <code>lightning-proxy run --tasks FILE -- COMMAND</code>, names the task of a rollout.<//>`
      : html`<${Counts} tasks=${data} newest=${of_newest} />
        <${Table} label="Tasks" columns=${columnsFor(rangeOf(data))} rows=${data} rowKey=${(row) => row.task_id} />
        <div><${Older} view="tasks" params=${params} cursor=${next_cursor} /></div>`)}<//>`;
}

function Counts({ tasks, newest }) {
  const count = (kind) => tasks.filter(({ solved }) => solved === kind).length;
  const equal = tasks.filter(({ std, rewarded }) => rewarded > 1 && std === 0).length;
  const [low, high] = rangeOf(tasks);
  return html`<p class="muted" role="status">${plural(tasks.length, "task")}${typeof newest === "number" && ` of the newest ${number(newest)} rollouts`}.
    ${high > low && ` ${count("always")} always earned the highest reward, ${number(high)}; ${count("never")} always the lowest, ${number(low)}; ${count("sometimes")} in between.`} ${equal > 0 && `${plural(equal, "task")} always earned the same reward and taught nothing.`}</p>`;
}

function rangeOf(tasks) {
  const rewarded = tasks.filter(({ min }) => min !== null);
  return [Math.min(...rewarded.map(({ min }) => min)), Math.max(...rewarded.map(({ max }) => max))];
}

// A task's newest rewards as dots over time.
function Recent({ recent, range }) {
  const shown = recent.filter(({ reward }) => reward !== null);
  if (shown.length === 0) return null;
  const series = [["train", "accent"], ["eval", "good"]].map(([mode, colour]) => ({ values: column(shown, (one) => (one.mode === mode ? one.reward : null)), colour, scatter: true }));
  return html`<${Chart} bare label=${`${shown.length} rewards, the last ${number(shown.at(-1).reward)}`} x=${shown.map((_, i) => i)} series=${series} range=${range} />`;
}
