// Overview: is it learning, what waits, what is served, and does anything look wrong?
import { Chart } from "./chart.mjs";
import { listen, readiness, seesAll, useData, useFeedState } from "./data.mjs";
import { Badge, Empty, Loaded, Panel, RolloutLink, Start, Stat, Time, html, number, seconds, useEffect, useMemo, useState } from "./parts.mjs";

// Numbers of steps that tell of trouble before the reward does, and how much a step could learn from.
const SIGNS = {
  entropy: "entropy, nats",
  kl: "KL, sampler to trainer, nats",
  kl_base: "KL from the base model, nats",
  grad_norm: "gradient norm",
  clip_share: "clipped tokens, share",
  staleness_mean: "staleness, versions",
  groups_equal: "groups with equal returns, which teach nothing",
  ratio_mean: "trainer's probability over sampler's, near 1",
  merge_rate: "calls that continue a row, share",
  not_followed_share: "calls left out, share",
};

export function Overview() {
  const status = useData("/status", {}, ["call", "reward", "rollout", "step", "version"]);
  const policy = useData("/policy", {}, ["step", "version"]);
  const steps = useData("/policy/steps", { limit: 1000, brief: true }, ["step"]);
  const versions = useData("/policy/versions", {}, ["version", "rollout"]);
  const all = seesAll(status.data);
  return html`<h1 class="hidden">Overview</h1>
    <${Loaded} of=${status}>${(now) => html`<${Warnings} now=${now} policy=${policy.data} /><${Numbers} now=${now} policy=${policy.data} />`}<//>
    ${all && html`<${Panel} title="Reward by training step" note="Mean of each step's rollouts, one standard deviation, and held-out evaluations at the step that made the version.">
      <${Loaded} of=${steps}>${({ data }) => html`<${RewardBySteps} steps=${data} versions=${versions.data?.data ?? []} />`}<//>
    <//>`}
    <div class="grid">
      <${Panel} title="Reward by policy version" note="Mean over the rollouts that began with the version." wide>
        <${Loaded} of=${versions}>${({ data }) => html`<${RewardByVersions} versions=${data} />`}<//>
      <//>
      <${Panel} title="Happening now"><${Happening} /><//>
    </div>
    ${all && html`<${Panel} title="Signs of a collapse" note="By training step. Entropy that falls to 0, or a KL that runs away, comes before the reward falls.">
      <${Loaded} of=${steps}>${({ data }) => html`<${Signs} steps=${data} />`}<//>
    <//>`}`;
}

function Warnings({ now, policy }) {
  const [ready, setReady] = useState(null);
  useEffect(() => {
    readiness().then(setReady);
  }, [now]);
  const collapse = now.collapse ?? policy?.collapse;
  const problems = [
    collapse && `Training stopped: ${collapse.what}. Promote version ${collapse.go_back_to} to continue.`,
    now.publishing && `New weights cannot be published: ${now.publishing}`,
    ...[now.standstill, now.uncounted].map((one) => one && `${one.story[0].toUpperCase()}${one.story.slice(1)}.`),
    ...(ready && ready.status !== "ready" ? reasons(ready) : []),
  ].filter(Boolean);
  return problems.map((one) => html`<div class="failure" role="alert"><p>${one}</p>${collapse && html`<a href="#/versions">Go to versions</a>`}</div>`);
}

function reasons(ready) {
  if (ready.status === "alone") return ["This is a store alone. Nothing is served, trained or promoted from here."];
  const parts = ["store", "upstream", "policy", "publish", "retention"].filter((part) => ready[part] && ready[part] !== "ok");
  return parts.map((part) => `The proxy is ${ready.status}. ${part}: ${ready[part]}`);
}

function Numbers({ now, policy }) {
  const { train = {}, eval: held = {} } = now.rollouts;
  const last = policy?.last_step;
  const version = (number) => html`<a href="#/versions">${number ?? "…"}</a>`;
  return html`<dl class="stats">
    ${seesAll(now) && html`<${Stat} label="last reward" value=${number(last?.metrics.reward_mean)} note=${last && `± ${number(last.metrics.reward_std)}`} />`}
    <${Stat} label="live version" value=${version(policy?.live_version)} note=${policy?.live_at && html`since <${Time} at=${policy.live_at} />, ${policy.publish}`} />
    ${now.verified?.version > 0 && html`<${Verified} seen=${now.verified} />`}
    ${policy?.best && html`<${Stat} label="best version" value=${version(policy.best.version)} note=${policy.best.story} />`}
    ${policy?.test && html`<${Stat} label="candidate" value=${version(policy.test.version)} note=${`tested with ${number(policy.test.evidence.rollouts ?? 0)} rollouts`} />`}
    <${Stat} label="training steps" value=${number(policy?.steps)} note=${last && html`last <${Time} at=${last.finished_at} />`} />
    <${Stat} label="waiting for the trainer" value=${number(now.waiting)} unit=${now.per_step ? `of ${number(now.per_step)} rollouts` : "rollouts"} note=${now.per_step && "that a step takes"} />
    <${Stat} label="training rollouts" value=${number(train.completed ?? 0)} note=${`${number(train.running ?? 0)} running, ${number(train.failed ?? 0)} failed`} />
    <${Stat} label="evaluation rollouts" value=${number(held.completed ?? 0)} note=${`${number(held.running ?? 0)} running`} />
    <${Reasons} label="calls that failed" counts=${failures(now.recent)} of="newest 500 calls" warn />
    <${Reasons} label="dropped" counts=${now.dropped} of="newest 200 rollouts" />
    <${Reasons} label="not trainable" counts=${now.untrainable} of="newest 200 calls" />
  </dl>`;
}

// How the live version was seen to be served: before agents got it, and since.
function Verified({ seen }) {
  const clear = typeof seen.deviations === "number" && !seen.by && !seen.problem;
  const probed = typeof seen.probed_at === "number" && html`<span class="reason">probed <${Time} at=${seen.probed_at} />: ${seen.problem ?? "it answers as at first"}</span>`;
  return html`<${Stat} label="verified" value=${seen.problem ? "in doubt" : seen.verified ? "yes" : "not verified yet"} unit=${clear && "vLLM serves the new weights"} warn=${Boolean(seen.problem)} note=${html`${seen.story}${probed}`} />`;
}

function failures(recent) {
  const { ok, incomplete, ...others } = recent?.by_status ?? {};
  return others;
}

function Reasons({ label, counts, of, warn }) {
  const all = Object.entries(counts ?? {});
  const total = all.reduce((sum, [, count]) => sum + count, 0);
  return total > 0 && html`<${Stat} label=${label} warn=${warn} value=${number(total)} note=${html`of the ${of}${all.map(([why, count]) => html`<span class="reason">${count} × ${why}</span>`)}`} />`;
}

// One standard deviation from the mean, but no farther than the step's rewards go.
const edge = (sign) => ({ metrics: { reward_mean: mean, reward_std: std, reward_min: least, reward_max: most } }) =>
  typeof mean === "number" && typeof std === "number" ? Math.max(least ?? -Infinity, Math.min(most ?? Infinity, mean + sign * std)) : null;

const column = (steps, name) => steps.map(({ metrics }) => metrics[name] ?? null);
const hasAny = ({ values }) => values.some((value) => value !== null);

function RewardBySteps({ steps, versions }) {
  if (steps.length === 0) return html`<${Empty}>No training step yet. <code>lightning-proxy train</code> or <code>up</code> trains once enough rollouts wait.<//>`;
  const rising = [...steps].reverse();
  const held = new Map(versions.map(({ version, evaluation, rewards }) => [version, evaluation?.reward ?? rewards?.eval?.mean]));
  const series = [
    { label: "mean", values: column(rising, "reward_mean"), colour: "accent", band: [rising.map(edge(-1)), rising.map(edge(1))] },
    { label: "held out", values: rising.map(({ version }) => held.get(version) ?? null), colour: "good", scatter: true },
  ];
  return html`<${Chart} label="Reward by training step" xLabel="step" height=${300} x=${rising.map(({ step }) => step)} series=${series.filter(hasAny)} />`;
}

function RewardByVersions({ versions }) {
  const rewarded = versions.filter(({ rewards }) => rewards?.train || rewards?.eval);
  if (rewarded.length === 0) return html`<${Empty}>No rollout that began with a version of the policy has a reward yet. Post one: <code>curl --json '{"rollout_id": "ID", "reward": 1}' ${location.origin}/reward</code><//>`;
  const means = (mode) => rewarded.map(({ rewards }) => rewards[mode]?.mean ?? null);
  const series = [{ label: "train", values: means("train"), colour: "accent" }, { label: "eval", values: means("eval"), colour: "good", scatter: true }];
  return html`<${Chart} label="Reward by policy version" xLabel="version" x=${rewarded.map(({ version }) => version)} series=${series.filter(hasAny)} />`;
}

function Signs({ steps }) {
  const charts = useMemo(() => {
    const rising = [...steps].reverse();
    const x = rising.map(({ step }) => step);
    return Object.entries(SIGNS).map(([name, label]) => ({ label, x, values: column(rising, name) })).filter(hasAny);
  }, [steps]);
  if (charts.length === 0) return html`<${Empty}>They are shown from the first training step. <code>lightning-proxy doctor</code> says what that waits for.<//>`;
  const warned = steps.filter(({ metrics }) => metrics.warnings).slice(0, 3);
  return html`${warned.map(({ step, metrics }) => html`<p class="warned"><${Badge} kind="bad">step ${step}<//> ${Object.values(metrics.warnings).join("; ")}</p>`)}
    <div class="small-charts">${charts.map(({ label, x, values }) => html`<div key=${label}><h3>${label}</h3><${Chart} label=${label} xLabel="step" height=${110} x=${x} series=${[{ label: "", values, colour: "accent" }]} /></div>`)}</div>`;
}

const KEPT = 40; // events
const FAILED = ["error", "cancelled"];
const WORDS = {
  call: (one) => html`<${Badge} kind=${FAILED.includes(one.status) && "bad"}>call ${one.seq}, ${one.status === "incomplete" ? "under way" : one.status}<//> <${RolloutLink} id=${one.rollout_id} /> <small>${one.model} ${one.latency_ms !== null && seconds(one.latency_ms / 1000)}</small>`,
  reward: (one) => html`<${Badge} kind="good">reward ${number(one.reward)}<//> <${RolloutLink} id=${one.rollout_id} /> <small>${one.source}</small>`,
  rollout: (one) => html`<${Badge}>rollout ${one.status}<//> <${RolloutLink} id=${one.rollout_id} /> <small>${one.task_id}</small>`,
  step: (one) => html`<${Badge} kind="accent">step ${one.step}<//> <small>reward ${number(one.reward)}</small>`,
  version: (one) => html`<${Badge} kind="accent">version ${one.version}<//> <a href="#/versions">${one.live ? "live" : one.status}</a>`,
};

// The newest events of the feed, in words.
function Happening() {
  const state = useFeedState();
  const [events, setEvents] = useState([]);
  useEffect(() => listen((event) => {
    if (WORDS[event.kind]) setEvents((before) => [{ ...event, key: (before[0]?.key ?? 0) + 1 }, ...before].slice(0, KEPT));
  }), []);
  if (state === "off") return html`<${Empty}>This key has no feed. The numbers above are read every few seconds.<//>`;
  if (events.length === 0) return html`<${Empty}>Nothing has happened since you opened this page. <${Start} /><//>`;
  return html`<ol class="happening">${events.map(({ key, kind, data, at }) => html`<li key=${key}><span>${WORDS[kind](data)}</span><${Time} at=${at} /></li>`)}</ol>`;
}
