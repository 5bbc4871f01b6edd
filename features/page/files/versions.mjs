// Versions: where each came from, whether it was seen to be served, what it earns; promote, roll back, compare two.
import { Chart, column, hasAny } from "./chart.mjs";
import { post, seesAll, useData } from "./data.mjs";
import { Badge, Empty, Failure, Filters, Loaded, Mean, Panel, Reward, Select, Stat, Table, Time, html, link, number, plural, signed, useState } from "./parts.mjs";

const SHOWN = 100;
const UNDER_WAY = ["publishing", "live"]; // agents' answers verify a live version that is not
const STATUS_KIND = { live: "accent", candidate: "accent", failed: "bad", rejected: "bad" };
const VERDICT_KIND = { safe: "good", worse: "bad" };

export function Versions({ params }) {
  const versions = useData("/policy/versions", {}, ["version", "step"]);
  const mayChange = seesAll(useData("/status").data);
  return html`<h1 class="hidden">Versions</h1><${Loaded} of=${versions}>${({ data }) => {
    if (data.length === 1) return html`<${Empty}>Only the base model is there. <code>lightning-proxy train</code> publishes version 1 after its first step.<//>`;
    return params.b === undefined
      ? html`<${History} versions=${data} mayChange=${mayChange} reload=${versions.reload} />`
      : html`<${Comparison} versions=${data} params=${params} />`;
  }}<//>`;
}

function History({ versions, mayChange, reload }) {
  const [all, setAll] = useState(false);
  const [error, setError] = useState(null);
  const newest = [...versions].reverse();
  const live = versions.find((one) => one.live);
  const test = versions.find(({ promotion }) => promotion?.status === "testing")?.promotion;
  const canGoBack = mayChange && versions.some((one) => one.promotable && one.version < live?.version);
  const change = (path, body, question) => {
    if (confirm(question)) post(path, body).then(() => setError(null), setError).then(reload);
  };
  const promote = (version) => change("/policy/promote", { version }, `Make version ${version} live? The trainer continues from it.`);
  const rollback = () => change("/policy/rollback", undefined, "Roll back to the version that was live before this one?");
  const columns = [
    { name: "version", cell: ({ version, parent }) => html`<a class="pick" href=${link("versions", { a: parent ?? 0, b: version })} title="compare with the version it came from">${version}</a>` },
    { name: "status", cell: (one) => html`<${Status} of=${one} />` },
    { name: "verified", cell: (one) => html`<${Verified} of=${one} />` },
    { name: "parent", label: "from", num: true },
    { name: "step", num: true },
    { name: "train", label: "train reward", num: true, cell: ({ rewards }) => html`<${Mean} of=${rewards?.train} />` },
    { name: "eval", label: "eval reward", num: true, cell: (one) => html`<${HeldOut} of=${one} />` },
    { name: "made", num: true, cell: ({ created_at }) => created_at > 0 && html`<${Time} at=${created_at} />` },
    { name: "action", cell: (one) => !one.live && (one.promotable ? mayChange && html`<button onClick=${() => promote(one.version)}>Promote…</button>` : html`<small class="why">${one.obstacle}</small>`) },
  ];
  return html`<div class="title-line"><p>Version <b>${live?.version}</b> is live${live?.live_at > 0 && html` since <${Time} at=${live.live_at} />`}.</p>
      ${canGoBack && html`<button onClick=${rollback}>Roll back…</button>`} <a href=${link("versions", { a: 0, b: versions.at(-1).version })}>Compare two versions</a></div>
    <${Failure} error=${error} />
    ${test && html`<${Test} test=${test} />`}
    <${RewardByVersions} versions=${versions} />
    <${Table} label="Versions" columns=${columns} rows=${all ? newest : newest.slice(0, SHOWN)} rowKey=${({ version }) => version} />
    ${newest.length > SHOWN && html`<button onClick=${() => setAll(!all)}>${all ? "Show the newest only" : `Show all ${number(newest.length)} versions`}</button>`}`;
}

export function RewardByVersions({ versions }) {
  const rewarded = versions.filter(({ rewards, evaluation }) => rewards?.train || rewards?.eval || evaluation?.reward);
  const series = [
    { label: "train", values: column(rewarded, ({ rewards }) => rewards?.train?.mean), colour: "accent" },
    { label: "eval", values: column(rewarded, ({ rewards, evaluation }) => evaluation?.reward ?? rewards?.eval?.mean), colour: "good", scatter: true },
  ];
  return html`<${Panel} title="Reward by policy version" note="Mean over the rollouts that began with the version.">${rewarded.length === 0
    ? html`<${Empty}>No rollout that began with a version of the policy has a reward yet. Post one: <code>curl --json '{"rollout_id": "ID", "reward": 1}' ${location.origin}/reward</code>. <code>lightning-proxy train</code> or <code>up</code> trains once enough rollouts wait.<//>`
    : html`<${Chart} label="Reward by policy version" xLabel="version" x=${rewarded.map(({ version }) => version)} series=${series.filter(hasAny)} />`}<//>`;
}

function Status({ of: { status, publish, best, error, promotion } }) {
  const outcome = promotion?.reason && `${promotion.status} after its test against version ${promotion.against}: ${promotion.reason}`;
  return html`<span title=${outcome}><${Badge} kind=${STATUS_KIND[status]}>${status}<//> <small>${publish}</small>${best && html` <${Badge} kind="good">best<//>`}${error && html` · <small class="dropped" title=${error}>${error}</small>`}</span>`;
}

// What a version earned on held-out tasks, with the 95 % interval where it was evaluated during training.
function HeldOut({ of: { rewards, evaluation } }) {
  if (!evaluation) return html`<${Mean} of=${rewards?.eval} />`;
  const { reward, low, high, difference, error } = evaluation;
  if (typeof reward !== "number") return html`<small class="dropped" title=${error}>${error ?? "is evaluated now"}</small>`;
  const above = typeof difference === "number" && `, ${signed(difference)} above the first`;
  return html`<${Reward} value=${reward} /> <small title="95 % interval over tasks">${number(low)} to ${number(high)}${above}</small>`;
}

// Whether vLLM was seen to serve it.
function Verified({ of: { version, status, verified } }) {
  if (version === 0) return html`<small class="muted">the base model</small>`;
  if (verified) return html`<${Badge} kind="good">verified<//>`;
  return UNDER_WAY.includes(status) ? html`<${Badge} kind="accent">not verified yet<//>` : html`<${Badge}>not verified<//>`;
}

// The test of a version that is under way: each metric's numbers, as they grow.
function Test({ test: { version, against, evidence } }) {
  const metrics = Object.entries(evidence.metrics ?? {}).map(([name, one]) => ({ name, ...one }));
  const columns = [
    { name: "metric", cell: ({ name, margin }) => html`${name} <small>margin ${number(margin)}</small>` },
    { name: "pairs", num: true },
    { name: "live", num: true },
    { name: "candidate", num: true },
    { name: "difference", num: true, cell: ({ difference }) => signed(difference) },
    { name: "interval", label: "may be", num: true, cell: (one) => one.interval && `${signed(one.interval[0])} to ${signed(one.interval[1])}` },
    { name: "verdict", label: "so far", cell: ({ verdict }) => html`<${Badge} kind=${VERDICT_KIND[verdict]}>${verdict}<//>` },
  ];
  return html`<${Panel} title=${`Version ${version} is tested against ${against}`}>
    ${!evidence.metrics ? html`<p>Not weighed yet.</p>` : html`
      <p>${number(evidence.rollouts)} of at most ${number(evidence.max_rollouts)} rollouts, ${number(evidence.groups)} groups compared; ${number(evidence.candidate.failed)} of the candidate's and ${number(evidence.live.failed)} of the live version's failed.${evidence.waits && ` It may go live, but ${evidence.waits}.`}</p>
      <${Table} label="Evidence" columns=${columns} rows=${metrics} rowKey=${({ name }) => name} />`}<//>`;
}

// Two versions on the tasks that both were given, with the interval of the difference.
function Comparison({ versions, params: { a, b, mode } }) {
  const comparison = useData("/policy/compare", { a, b, mode });
  const options = [...versions].reverse().map(({ version, live }) => [version, `version ${version}${version === 0 ? ", the base model" : ""}${live ? ", live" : ""}`]);
  return html`<${Filters} view="versions">
      <${Select} name="a" label="from" options=${options} value=${a} />
      <${Select} name="b" label="to" options=${options} value=${b} />
      <${Select} name="mode" label="mode" options=${[["", "eval if both have it"], "eval", "train"]} value=${mode} />
      <a href="#/versions">all versions</a>
    <//>
    <${Loaded} of=${comparison}>${(found) => html`<${Difference} of=${found} />`}<//>`;
}

function Difference({ of: { a, b, mode, tasks, interval: sure, mean_a, mean_b, difference, data } }) {
  if (tasks === 0) {
    return html`<${Empty}>No task has rewarded rollouts of both versions. <code>lightning-proxy eval --tasks FILE --models ${a},${b} -- COMMAND</code> gives both the same tasks.<//>`;
  }
  const apart = sure && (sure[0] > 0 || sure[1] < 0);
  const gain = (pair) => pair.b.mean - pair.a.mean;
  const count = (sign) => data.filter((pair) => Math.sign(gain(pair)) === sign).length;
  const side = (name, version) => ({ name, label: `version ${version}`, num: true, value: (pair) => pair[name].mean, cell: (pair) => html`<${Mean} of=${pair[name]} />` });
  const columns = [
    { name: "task", value: ({ task_id }) => task_id, cell: ({ task_id }) => html`<a class="id pick" href=${link("rollouts", { task_id, mode })} title=${task_id}>${task_id}</a>` },
    side("a", a),
    side("b", b),
    { name: "difference", num: true, value: gain, cell: (pair) => signed(gain(pair)) },
  ];
  return html`<dl class="stats">
      <${Stat} label=${`version ${a}`} value=${number(mean_a)} note="on the paired tasks" />
      <${Stat} label=${`version ${b}`} value=${number(mean_b)} note="on the paired tasks" />
      <${Stat} label="difference" value=${signed(difference)} note=${sure ? `95 % interval ${signed(sure[0])} to ${signed(sure[1])}` : "too few tasks for an interval"} />
      <${Stat} label="paired tasks" value=${number(tasks)} note=${`${mode} rollouts`} />
    </dl>
    <p>${apart ? `Version ${difference > 0 ? b : a} earns more.` : "The interval includes 0: these tasks do not tell them apart."}
      <${Badge} kind="good">${plural(count(1), "task")} better<//> <${Badge} kind="bad">${plural(count(-1), "task")} worse<//> ${plural(count(0), "task")} equal</p>
    <${Table} label="Tasks of both versions" columns=${columns} rows=${data} rowKey=${({ task_id }) => task_id} sortable />`;
}
