// Overview: is it learning, what waits, what is served, and does anything look wrong?
import { readiness, seesAll, useData } from "./api.mjs";
import { Chart } from "./chart.mjs";
import { useFresh } from "./feed.mjs";
import { milliseconds, number, share } from "./format.mjs";
import { html, useEffect, useMemo, useState } from "./html.mjs";
import { Happening } from "./happening.mjs";
import { Badge, Empty, Loaded, Panel, Stat, Time } from "./parts.mjs";

const SIGNS = [
  ["entropy", "entropy", "nats"],
  ["kl", "KL, sampler to trainer", "nats"],
  ["kl_base", "KL from the base model", "nats"],
  ["grad_norm", "gradient norm", ""],
  ["clip_share", "clipped tokens", "share"],
  ["staleness_mean", "staleness", "versions"],
];

const LEARNT = [
  ["groups_equal", "groups with equal returns", "teach nothing"],
  ["ratio_mean", "trainer's probability over sampler's", "near 1"],
  ["merge_rate", "calls that continue a row", "share"],
  ["not_followed_share", "calls left out", "share"],
];

export function Overview() {
  const status = useData("/status");
  const policy = useData("/policy");
  const steps = useData("/policy/steps", { limit: 1000, brief: true });
  const versions = useData("/policy/versions");
  const all = seesAll(status.data);
  useFresh(["call", "reward", "rollout", "step", "version"], status.reload);
  useFresh(["step", "version"], policy.reload);
  useFresh(["step"], steps.reload);
  useFresh(["version", "rollout"], versions.reload);
  return html`<h1 class="hidden">Overview</h1>
    <${Loaded} of=${status}>${(now) => html`<${Warnings} now=${now} policy=${policy.data} /><${Numbers} now=${now} policy=${policy.data} />`}<//>
    <div class="grid">
      ${all && html`<${Panel} title="Reward by training step" note="Mean of each step's rollouts, one standard deviation, and held-out evaluations at the step that made the version." wide>
        <${Loaded} of=${steps}>${({ data }) => html`<${RewardBySteps} steps=${data} versions=${versions.data?.data} />`}<//>
      <//>`}
      <${Panel} title="Reward by policy version" note="Mean over the rollouts that began with the version.">
        <${Loaded} of=${versions}>${({ data }) => html`<${RewardByVersions} versions=${data} />`}<//>
      <//>
      <${Panel} title="Happening now"><${Happening} /><//>
      ${all && html`<${Panel} title="Signs of a collapse" note="By training step. Entropy that falls to 0, or a KL that runs away, comes before the reward falls." wide>
        <${Loaded} of=${steps}>${({ data }) => html`<${Signs} steps=${data} of=${SIGNS} warns />`}<//>
      <//>`}
      ${all && steps.data?.data.some(({ metrics }) => LEARNT.some(([name]) => name in metrics)) && html`<${Panel} title="What steps learn from" note="By training step." wide="all">
        <${Signs} steps=${steps.data.data} of=${LEARNT} />
      <//>`}
    </div>`;
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
    now.standstill && sentence(now.standstill.story),
    now.uncounted && sentence(now.uncounted.story),
    ...(ready && ready.status !== "ready" ? reasons(ready) : []),
  ].filter(Boolean);
  return problems.map((one) => html`<div class="failure" role="alert"><p>${one}</p>${collapse && html`<a href="#/versions">Go to versions</a>`}</div>`);
}

const sentence = (story) => `${story[0].toUpperCase()}${story.slice(1)}.`;

function reasons(ready) {
  if (ready.status === "alone") return ["This is a store alone. Nothing is served, trained or promoted from here."];
  const parts = ["store", "upstream", "policy", "publish", "retention"].filter((part) => ready[part] && ready[part] !== "ok");
  return parts.map((part) => `The proxy is ${ready.status}. ${part}: ${ready[part]}`);
}

function Numbers({ now, policy }) {
  const train = now.rollouts.train ?? {};
  const held = now.rollouts.eval ?? {};
  const live = policy?.live_version;
  return html`<dl class="stats">
    ${seesAll(now) && html`<${Stat} label="last reward" value=${number(policy?.last_step?.metrics?.reward_mean)} note=${policy?.last_step && `± ${number(policy.last_step.metrics.reward_std)}`} />`}
    <${Stat} label="live version" value=${html`<a href="#/versions">${live ?? "…"}</a>`} note=${policy?.live_at && html`since <${Time} at=${policy.live_at} />, ${policy.publish}`} />
    ${now.verified?.version > 0 && html`<${Verified} seen=${now.verified} />`}
    ${policy?.best && html`<${Stat} label="best version" value=${html`<a href="#/versions">${policy.best.version}</a>`} note=${policy.best.story} />`}
    ${policy?.test && html`<${Stat} label="candidate" value=${html`<a href="#/versions">${policy.test.version}</a>`} note=${`tested with ${number(policy.test.evidence.rollouts ?? 0)} rollouts`} />`}
    <${Stat} label="training steps" value=${number(policy?.steps)} note=${policy?.last_step && html`last <${Time} at=${policy.last_step.finished_at} />`} />
    <${Stat} label="waiting for the trainer" value=${number(now.waiting)} unit=${now.per_step ? `of ${number(now.per_step)} rollouts` : "rollouts"} note=${now.per_step && "that a step takes"} />
    <${Stat} label="training rollouts" value=${number(train.completed ?? 0)} note=${`${number(train.running ?? 0)} running, ${number(train.failed ?? 0)} failed`} />
    <${Stat} label="evaluation rollouts" value=${number(held.completed ?? 0)} note=${`${number(held.running ?? 0)} running`} />
    ${now.recent && html`<${Recent} recent=${now.recent} />`}
    <${Reasons} label="dropped" counts=${now.dropped} of="newest 200 rollouts" />
    <${Reasons} label="not trainable" counts=${now.untrainable} of="newest 200 calls" />
  </dl>`;
}

// How the live version was seen to be served: before agents got it, and since.
function Verified({ seen }) {
  const clear = typeof seen.deviations === "number" && !seen.by;
  const probed = typeof seen.probed_at === "number" && html`<span class="reason">probed <${Time} at=${seen.probed_at} />: ${seen.problem ?? "it answers as at first"}</span>`;
  return html`<${Stat} label="verified" value=${seen.problem ? "in doubt" : seen.verified ? "yes" : "not verified yet"} unit=${clear && !seen.problem && "vLLM serves the new weights"} warn=${Boolean(seen.problem)} note=${html`${seen.story}${probed}`} />`;
}

function Recent({ recent }) {
  const passed = recent.since ? Math.max(1, Date.now() / 1000 - recent.since) : null;
  const { ok = 0, incomplete: running = 0, ...others } = recent.by_status;
  const failed = recent.calls - ok - running;
  const kinds = Object.entries(others).map(([status, count]) => `${count} ${status}`);
  return html`<${Stat} label="calls" value=${passed ? number((60 * recent.calls) / passed) : "0"} unit="/ min" note=${recent.since && html`newest ${number(recent.calls)}, since <${Time} at=${recent.since} />`} />
    <${Stat} label="tokens answered" value=${passed ? number((recent.response_tokens ?? 0) / passed) : "0"} unit="/ s" note=${`${number(recent.response_tokens ?? 0)} in these calls`} />
    <${Stat} label="latency, median" value=${milliseconds(recent.latency_ms)} note=${`first token ${milliseconds(recent.ttft_ms)}`} />
    <${Stat} label="calls that failed" value=${share(failed, recent.calls - running)} warn=${failed > 0} note=${html`${kinds.join(", ") || "none"}${running > 0 && html`<span class="reason">${running} under way</span>`}`} />`;
}

function Reasons({ label, counts, of }) {
  const all = Object.entries(counts ?? {});
  if (all.length === 0) return null;
  const total = all.reduce((sum, [, count]) => sum + count, 0);
  return html`<${Stat} label=${label} value=${number(total)} note=${html`of the ${of}${all.map(([why, count]) => html`<span class="reason">${count} × ${why}</span>`)}`} />`;
}

const column = (steps, name) => steps.map(({ metrics }) => metrics[name] ?? null);

// One standard deviation from the mean, but no farther than the step's rewards go.
const edge = (sign) => ({ metrics: { reward_mean: mean, reward_std: std, reward_min: least, reward_max: most } }) =>
  typeof mean === "number" && typeof std === "number" ? Math.max(least ?? -Infinity, Math.min(most ?? Infinity, mean + sign * std)) : null;

function RewardBySteps({ steps, versions = [] }) {
  const shown = useMemo(() => {
    const rising = [...steps].reverse();
    const [middle, low, high] = [column(rising, "reward_mean"), rising.map(edge(-1)), rising.map(edge(1))];
    const heldOut = ({ evaluation, rewards }) => evaluation?.reward ?? rewards?.eval?.mean ?? null;
    const held = new Map(versions.map((v) => [v.version, heldOut(v)]).filter(([, mean]) => mean !== null));
    const series = [
      { label: "mean", values: middle, colour: "accent", band: [low, high] },
      { label: "held out", values: rising.map(({ version }) => held.get(version) ?? null), colour: "good", scatter: true },
    ];
    return { x: rising.map(({ step }) => step), series: held.size ? series : series.slice(0, 1) };
  }, [steps, versions]);
  if (steps.length === 0) {
    return html`<${Empty}>No training step yet. <code>lightning-proxy train</code> or <code>up</code> trains once enough rollouts wait.<//>`;
  }
  return html`<${Chart} label="Reward by training step" xLabel="step" height=${240} sync="steps" ...${shown} />`;
}

function RewardByVersions({ versions }) {
  const shown = useMemo(() => {
    const rewarded = versions.filter(({ rewards }) => rewards?.train || rewards?.eval);
    const of = (mode) => rewarded.map(({ rewards }) => rewards[mode]?.mean ?? null);
    const series = [
      { label: "train", values: of("train"), colour: "accent" },
      { label: "eval", values: of("eval"), colour: "good", scatter: true },
    ].filter(({ values }) => values.some((value) => value !== null));
    return { x: rewarded.map(({ version }) => version), series };
  }, [versions]);
  if (shown.x.length === 0) return html`<${Empty}>No rollout that began with a version of the policy has a reward yet. Post one: <code>curl --json '{"rollout_id": "ID", "reward": 1}' ${location.origin}/reward</code><//>`;
  return html`<${Chart} label="Reward by policy version" xLabel="version" height=${240} ...${shown} />`;
}

function Signs({ steps, of, warns }) {
  const charts = useMemo(() => {
    const rising = [...steps].reverse();
    const x = rising.map(({ step }) => step);
    return of.map(([name, label, unit]) => ({ name, label, unit, x, values: column(rising, name) })).filter(({ values }) => values.some((value) => value !== null));
  }, [steps]);
  if (charts.length === 0) return html`<${Empty}>They are shown from the first training step. <code>lightning-proxy doctor</code> says what that waits for.<//>`;
  const warned = warns ? steps.filter(({ metrics }) => metrics.warnings).slice(0, 3) : [];
  return html`${warned.map(({ step, metrics }) => html`<p class="warned"><${Badge} kind="bad">step ${step}<//> ${Object.values(metrics.warnings).join("; ")}</p>`)}
    <div class="small-charts">${charts.map(({ name, label, unit, x, values }) => html`<${Sign} key=${name} label=${label} unit=${unit} x=${x} values=${values} />`)}</div>`;
}

function Sign({ label, unit, x, values }) {
  const series = useMemo(() => [{ label: "value", values, colour: "accent" }], [values]);
  return html`<div><h3>${label} <small>${unit}</small></h3><${Chart} label=${label} xLabel="step" x=${x} series=${series} height=${130} sync="steps" /></div>`;
}
