// Overview: is it learning, what waits, what is served, and does anything look wrong?
import { Chart, column, hasAny } from "./chart.mjs";
import { listen, readiness, seesAll, useData, useFeedState } from "./data.mjs";
import { Badge, Empty, Loaded, Panel, RolloutLink, Start, Stat, Time, html, number, seconds, useEffect, useState } from "./parts.mjs";
import { RewardByVersions } from "./versions.mjs";

export function Overview() {
  const status = useData("/status", {}, ["call", "reward", "rollout", "step", "version"]);
  const policy = useData("/policy", {}, ["step", "version"]);
  const steps = useData("/policy/steps", { limit: 1000, brief: true }, ["step"]);
  const versions = useData("/policy/versions", {}, ["version", "rollout"]);
  const awaited = [status, steps].find(({ data, error }) => data === null && !error);
  const known = seesAll(status.data) ? steps.data?.data ?? [] : [];
  const rising = [...known].reverse();
  const x = rising.map(({ step }) => step);
  return html`<h1 class="hidden">Overview</h1>
    <${Loaded} of=${status}>${(now) => html`<${Warnings} now=${now} policy=${policy.data} steps=${known} /><${Numbers} now=${now} policy=${policy.data} />`}<//>
    <${Loaded} of=${awaited ?? versions}>${({ data }) => (rising.length > 0 ? html`<${RewardBySteps} x=${x} steps=${rising} versions=${data} />` : html`<${RewardByVersions} versions=${data} />`)}<//>
    <${Panel} title="Happening now"><${Happening} /><//>`;
}

function Warnings({ now, policy, steps }) {
  const [ready, setReady] = useState(null);
  useEffect(() => {
    readiness().then(setReady);
  }, [now]);
  const collapse = now.collapse ?? policy?.collapse;
  const suspicious = steps.filter(({ metrics }) => metrics.warnings).slice(0, 3);
  const problems = [
    collapse && html`Training stopped: ${collapse.what}. <a href="#/versions">Promote version ${collapse.go_back_to}</a> to continue.`,
    now.publishing && `New weights cannot be published: ${now.publishing}`,
    ...[now.standstill, now.uncounted].map((one) => one && `${one.story[0].toUpperCase()}${one.story.slice(1)}.`),
    ...(ready && ready.status !== "ready" ? reasons(ready) : []),
    ...suspicious.map(({ step, metrics }) => `Step ${step}: ${Object.values(metrics.warnings).join("; ")}`),
  ];
  return problems.filter(Boolean).map((one) => html`<p class="failure" role="alert">${one}</p>`);
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
  const { ok, incomplete, ...failed } = now.recent?.by_status ?? {};
  return html`<dl class="stats">
    ${seesAll(now) && html`<${Stat} label="last reward" value=${number(last?.metrics.reward_mean)} note=${last && `± ${number(last.metrics.reward_std)}`} />`}
    <${Stat} label="live version" value=${version(policy?.live_version)} note=${policy?.live_at && html`since <${Time} at=${policy.live_at} />, ${policy.publish}`} />
    ${now.verified?.version > 0 && html`<${Stat} label="verified" value=${now.verified.problem ? "in doubt" : now.verified.verified ? "yes" : "not verified yet"} warn=${Boolean(now.verified.problem)} note=${now.verified.problem ?? now.verified.story} />`}
    ${policy?.best && html`<${Stat} label="best version" value=${version(policy.best.version)} note=${policy.best.story} />`}
    ${policy?.test && html`<${Stat} label="candidate" value=${version(policy.test.version)} note=${`tested with ${number(policy.test.evidence.rollouts ?? 0)} rollouts`} />`}
    <${Stat} label="training steps" value=${number(policy?.steps)} note=${last && html`last <${Time} at=${last.finished_at} />`} />
    <${Stat} label="waiting for the trainer" value=${number(now.waiting)} unit=${now.per_step ? `of ${number(now.per_step)} rollouts` : "rollouts"} note=${now.per_step && "that a step takes"} />
    <${Stat} label="training rollouts" value=${number(train.completed ?? 0)} note=${`${number(train.running ?? 0)} running, ${number(train.failed ?? 0)} failed`} />
    <${Stat} label="evaluation rollouts" value=${number(held.completed ?? 0)} note=${`${number(held.running ?? 0)} running`} />
    <${Reasons} label="calls that failed" counts=${failed} among="newest 500 calls" warn />
    <${Reasons} label="dropped" counts=${now.dropped} among="newest 200 rollouts" />
    <${Reasons} label="not trainable" counts=${now.untrainable} among="newest 200 calls" />
  </dl>`;
}

function Reasons({ label, counts, among, warn }) {
  const all = Object.entries(counts ?? {});
  const total = all.reduce((sum, [, count]) => sum + count, 0);
  return total > 0 && html`<${Stat} label=${label} warn=${warn} value=${number(total)} note=${html`of the ${among}${all.map(([why, count]) => html`<span class="reason">${count} × ${why}</span>`)}`} />`;
}

// One standard deviation from the mean, but no farther than the step's rewards go.
const edge = (sign) => ({ metrics: { reward_mean: mean, reward_std: std, reward_min: least, reward_max: most } }) =>
  typeof mean === "number" && typeof std === "number" ? Math.max(least ?? -Infinity, Math.min(most ?? Infinity, mean + sign * std)) : null;

function RewardBySteps({ x, steps, versions }) {
  const held = new Map(versions.map(({ version, evaluation, rewards }) => [version, evaluation?.reward ?? rewards?.eval?.mean]));
  const series = [
    { label: "mean", values: column(steps, ({ metrics }) => metrics.reward_mean), colour: "accent", band: [-1, 1].map((sign) => column(steps, edge(sign))) },
    { label: "held out", values: column(steps, ({ version }) => held.get(version)), colour: "good", scatter: true },
  ];
  return html`<${Panel} title="Reward by training step" note="Mean of each step's rollouts, one standard deviation, and held-out evaluations at the step that made the version.">
    <${Chart} label="Reward by training step" xLabel="step" height=${300} x=${x} series=${series.filter(hasAny)} /><//>`;
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
