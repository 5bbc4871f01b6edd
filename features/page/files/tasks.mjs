// Tasks: which are learned, which are never or always solved, and how each one's reward goes over time.
import { get, useData } from "./api.mjs";
import { useFresh } from "./feed.mjs";
import { number, plural } from "./format.mjs";
import { html, useEffect, useState } from "./html.mjs";
import { Badge, Empty, Failure, Folded, Loaded, Table, Time, link } from "./parts.mjs";

const PAGE = 100;
const SORTS = { recent: "newest first", mean: "highest mean first", spread: "widest spread first", rollouts: "most rollouts first" };
// The lowest and highest reward of any task tell what a task's rewards are, whatever range they have.
const SOLVED = { never: ["always the lowest", "bad"], sometimes: ["in between", ""], always: ["always the highest", "good"] };
const WIDTH = 160;
const HEIGHT = 28;

// `scale`: the lowest and the highest reward of all tasks that are shown.
const columnsFor = (scale) => [
  { name: "task", label: "task", cell: ({ task_id }) => html`<a class="id pick" href=${link("rollouts", { task_id })} title=${task_id}>${task_id}</a>` },
  { name: "recent", label: "reward over time", title: "the newest rollouts, oldest first; evaluations are hollow", cell: (row) => html`<${Recent} task=${row} scale=${scale} />` },
  { name: "solved", label: "rewards", cell: ({ solved }) => solved && html`<${Badge} kind=${SOLVED[solved][1]}>${SOLVED[solved][0]}<//>` },
  { name: "mean", label: "mean", num: true, cell: ({ mean }) => number(mean) },
  { name: "std", label: "std", num: true, title: "standard deviation of its rewards", cell: ({ std }) => number(std) },
  { name: "range", label: "lowest to highest", num: true, cell: ({ min, max }) => (min === null ? "–" : `${number(min)} to ${number(max)}`) },
  { name: "rollouts", label: "rollouts", num: true, cell: ({ rollouts, rewarded }) => (rollouts === rewarded ? number(rollouts) : `${number(rewarded)} of ${number(rollouts)}`) },
  { name: "last", label: "last", num: true, cell: ({ last_at }) => html`<${Time} at=${last_at} />` },
];

export function Tasks({ params }) {
  return html`<h1 class="hidden">Tasks</h1><${Choice} params=${params} /><${List} key=${JSON.stringify(params)} params=${params} />`;
}

function Choice({ params }) {
  const onChange = (event) => {
    const given = [...new FormData(event.currentTarget.form)].filter(([, value]) => value !== "");
    location.hash = link("tasks", given);
  };
  const option = (chosen = "") => ([value, label]) => html`<option value=${value} selected=${value === chosen}>${label}</option>`;
  return html`<form class="filters" onSubmit=${(event) => event.preventDefault()}>
    <${Folded} label="filters">
    <label>order<select name="sort" onChange=${onChange}>${Object.entries(SORTS).map(option(params.sort))}</select></label>
    <label>mode<select name="mode" onChange=${onChange}>${[["", "any"], ["train", "train"], ["eval", "eval"]].map(option(params.mode))}</select></label>
    <label>rewards<select name="solved" onChange=${onChange}>${[["", "any"], ...Object.entries(SOLVED).map(([one, [words]]) => [one, words])].map(option(params.solved))}</select></label>
    <//>
  </form>`;
}

function List({ params }) {
  const { solved, ...filters } = params;
  const wanted = { ...filters, limit: PAGE };
  const first = useData("/tasks", wanted);
  const [more, setMore] = useState({ rows: [], cursor: null, error: null });
  useEffect(() => setMore({ rows: [], cursor: first.data?.next_cursor ?? null, error: null }), [first.data]);
  useFresh(["reward", "rollout"], first.reload, () => more.rows.length === 0);
  const onMore = () => get("/tasks", { ...wanted, cursor: more.cursor }).then(
    (page) => setMore((before) => ({ rows: [...before.rows, ...page.data], cursor: page.next_cursor, error: null })),
    (error) => setMore((before) => ({ ...before, error })),
  );
  return html`<${Loaded} of=${first}>${(page) => {
    const all = [...page.data, ...more.rows];
    const shown = solved ? all.filter((task) => task.solved === solved) : all;
    if (all.length === 0) return html`<${Empty}>No tasks yet. A header <code>X-Task-Id</code>, or <code>lightning-proxy run --tasks FILE -- COMMAND</code>, names the task of a rollout.<//>`;
    return html`<${Counts} tasks=${all} more=${more.cursor !== null} newest=${page.of_newest} />
      <${Table} label="Tasks" columns=${columnsFor(scaleOf(all))} rows=${shown} rowKey=${({ task_id }) => task_id} />
      ${shown.length === 0 && html`<${Empty}>No task's rewards are ${SOLVED[solved]?.[0]}. <a href="#/tasks">Show all tasks</a><//>`}
      ${more.cursor !== null && html`<button onClick=${onMore}>Show more tasks</button>`}<${Failure} error=${more.error} />`;
  }}<//>`;
}

function Counts({ tasks, more, newest }) {
  const count = (kind) => tasks.filter(({ solved }) => solved === kind).length;
  const equal = tasks.filter(({ std, rewarded }) => rewarded > 1 && std === 0).length;
  const [low, high] = scaleOf(tasks);
  return html`<p class="muted" role="status">${plural(tasks.length, "task")}${more ? " so far" : ""}${typeof newest === "number" ? ` of the newest ${number(newest)} rollouts` : ""}.
    ${high > low && ` ${count("always")} always earned the highest reward seen, ${number(high)}; ${count("never")} always the lowest, ${number(low)}; ${count("sometimes")} in between.`} ${equal > 0 && `${plural(equal, "task")} always earned the same reward and taught nothing.`}</p>`;
}

function scaleOf(tasks) {
  const rewarded = tasks.filter(({ min }) => min !== null);
  return [Math.min(...rewarded.map(({ min }) => min)), Math.max(...rewarded.map(({ max }) => max))];
}

// A task's newest rewards as dots over time.
function Recent({ task, scale: [low, high] }) {
  const shown = task.recent.filter(({ reward }) => reward !== null);
  if (shown.length === 0) return null;
  const x = (i) => 4 + (i * (WIDTH - 8)) / Math.max(1, shown.length - 1);
  const y = (reward) => HEIGHT - 4 - ((reward - low) * (HEIGHT - 8)) / (high - low || 1);
  const label = `${shown.length} rewards, the last ${number(shown.at(-1).reward)}`;
  return html`<svg class="spark" width=${WIDTH} height=${HEIGHT} role="img" aria-label=${label}>
    <polyline points=${shown.map(({ reward }, i) => `${x(i)},${y(reward)}`).join(" ")} />
    ${shown.map((one, i) => html`<circle class=${one.mode} cx=${x(i)} cy=${y(one.reward)} r="2.5"><title>${number(one.reward)}, version ${one.policy_version}, ${one.rollout_id}</title></circle>`)}
  </svg>`;
}
