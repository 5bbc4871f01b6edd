// Compare: two versions on the tasks that both were given, with the interval of the difference.
import { useData } from "./api.mjs";
import { number, plural, signed } from "./format.mjs";
import { html, useMemo } from "./html.mjs";
import { Badge, Empty, Loaded, Panel, Stat, Table, link, useSort } from "./parts.mjs";

const difference = ({ a, b }) => b.mean - a.mean;

export function Compare({ params }) {
  const versions = useData("/policy/versions");
  return html`<h1 class="hidden">Compare</h1><${Loaded} of=${versions}>${({ data }) => html`<${Chosen} versions=${data} params=${params} />`}<//>`;
}

function Chosen({ versions, params }) {
  const chosen = { ...defaults(versions), ...params };
  const comparison = useData(chosen.b === undefined ? null : "/policy/compare", chosen);
  const onChange = (event) => {
    const given = [...new FormData(event.currentTarget.form)].filter(([, value]) => value !== "");
    location.hash = link("compare", given);
  };
  const options = (name) => [...versions].reverse().map(({ version, live }) => html`<option value=${version} selected=${String(version) === String(chosen[name])}>version ${version}${version === 0 ? ", the base model" : ""}${live ? ", live" : ""}</option>`);
  return html`<form class="filters" onSubmit=${(event) => event.preventDefault()}>
      <label>from<select name="a" onChange=${onChange}>${options("a")}</select></label>
      <label>to<select name="b" onChange=${onChange}>${options("b")}</select></label>
      <label>mode<select name="mode" onChange=${onChange}>${["", "eval", "train"].map((mode) => html`<option value=${mode} selected=${mode === (chosen.mode ?? "")}>${mode || "eval if both have it"}</option>`)}</select></label>
    </form>
    ${chosen.b === undefined ? html`<${Empty}>Only the base model is there. <code>lightning-proxy train</code> publishes version 1 after its first step.<//>` : html`<${Loaded} of=${comparison}>${(found) => html`<${Found} found=${found} versions=${versions} />`}<//>`}`;
}

// The oldest and the newest version that were evaluated, or else that earned any reward.
function defaults(versions) {
  const evaluated = versions.filter(({ rewards }) => rewards?.eval);
  const rewarded = evaluated.length > 1 ? evaluated : versions.filter(({ rewards }) => rewards?.train);
  const [first = versions[0]] = rewarded;
  const last = rewarded.length > 1 ? rewarded.at(-1) : versions.at(-1);
  return last === first ? { a: first.version } : { a: first.version, b: last.version };
}

function Found({ found, versions }) {
  if (found.tasks === 0) {
    return html`<${Empty}>No task has rewarded rollouts of both versions. <code>lightning-proxy eval --tasks FILE --models ${found.a},${found.b} -- COMMAND</code> gives both the same tasks.<//>`;
  }
  const sure = found.interval && (found.interval[0] > 0 || found.interval[1] < 0);
  const verdict = !sure ? "The interval includes 0: these tasks do not tell them apart." : `Version ${found.difference > 0 ? found.b : found.a} earns more.`;
  const reward = (which) => versions.find(({ version }) => version === which)?.rewards[found.mode]?.mean;
  return html`<dl class="stats">
      <${Stat} label=${`version ${found.a}`} value=${number(reward(found.a))} note=${`${number(found.mean_a)} on the paired tasks`} />
      <${Stat} label=${`version ${found.b}`} value=${number(reward(found.b))} note=${`${number(found.mean_b)} on the paired tasks`} />
      <${Stat} label="difference" value=${signed(found.difference)} note=${found.interval ? `95 % interval ${signed(found.interval[0])} to ${signed(found.interval[1])}` : "too few tasks for an interval"} />
      <${Stat} label="paired tasks" value=${number(found.tasks)} note=${`${found.mode} rollouts`} />
    </dl>
    ${found.interval && html`<${Interval} found=${found} />`}
    <p>${verdict}</p>
    <${Panel} title="Task by task"><${Pairs} found=${found} /><//>`;
}

function Interval({ found }) {
  const [low, high] = found.interval;
  const reach = 1.15 * Math.max(Math.abs(low), Math.abs(high), 1e-9);
  const at = (value) => `${50 + (50 * value) / reach}%`;
  return html`<div class="interval" role="img" aria-label=${`difference ${signed(found.difference)}, from ${signed(low)} to ${signed(high)}`}>
    <i class="zero" style=${{ left: "50%" }}></i>
    <i class="range" style=${{ left: at(low), width: `${(50 * (high - low)) / reach}%` }}></i>
    <i class="middle" style=${{ left: at(found.difference) }}></i>
    <span style=${{ left: "50%" }}>0</span>
  </div>`;
}

function Pairs({ found }) {
  const greatest = useMemo(() => Math.max(...found.data.map((pair) => Math.abs(difference(pair))), 1e-9), [found]);
  const side = (name) => ({ name, label: `version ${found[name]}`, num: true, value: (pair) => pair[name].mean, cell: (pair) => html`${number(pair[name].mean)} <small>of ${pair[name].rollouts}</small>` });
  const columns = [
    { name: "task", label: "task", value: ({ task_id }) => task_id, cell: ({ task_id }) => html`<a class="id pick" href=${link("rollouts", { task_id, mode: found.mode })} title=${task_id}>${task_id}</a>` },
    side("a"),
    side("b"),
    { name: "difference", label: "difference", num: true, value: difference, cell: (pair) => signed(difference(pair)) },
    { name: "bar", label: "", cell: (pair) => html`<${Bar} value=${difference(pair) / greatest} />` },
  ];
  const { sorted, sort, onSort } = useSort(columns, found.data);
  const better = found.data.filter((pair) => difference(pair) > 0).length;
  const worse = found.data.filter((pair) => difference(pair) < 0).length;
  return html`<p class="muted"><${Badge} kind="good">${plural(better, "task")} better<//> <${Badge} kind="bad">${plural(worse, "task")} worse<//> ${plural(found.data.length - better - worse, "task")} equal</p>
    <${Table} label="Tasks of both versions" columns=${columns} rows=${sorted} rowKey=${({ task_id }) => task_id} sort=${sort} onSort=${onSort} />`;
}

const Bar = ({ value }) => html`<div class="bar"><i class=${value < 0 ? "worse" : "better"} style=${{ width: `${50 * Math.abs(value)}%`, left: `${50 + Math.min(0, 50 * value)}%` }}></i></div>`;
