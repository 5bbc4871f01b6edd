// Versions: where each came from, whether it was seen to be served, what it earns; promote and roll back.
import { post, seesAll, useData } from "./api.mjs";
import { useFresh } from "./feed.mjs";
import { number } from "./format.mjs";
import { html, useMemo, useState } from "./html.mjs";
import { Dialog } from "./keyboard.mjs";
import { Badge, Empty, Failure, Loaded, Time, link } from "./parts.mjs";
import { Test, outcome, underWay } from "./promotion.mjs";

const SHOWN = 100;
const UNDER_WAY = ["publishing", "live"]; // agents' answers verify a live version that is not
const STATUS_KIND = { live: "accent", candidate: "accent", failed: "bad", rejected: "bad" };
const LANE = 14;
const ROW = 38;

export function Versions() {
  const versions = useData("/policy/versions");
  const steps = useData("/policy/steps", { limit: 1000, brief: true });
  const near = useMemo(() => new Map((steps.data?.data ?? []).map(({ metrics }) => [metrics.version, metrics])), [steps.data]);
  const mayChange = seesAll(useData("/status").data);
  useFresh(["version", "step"], versions.reload);
  useFresh(["step"], steps.reload);
  return html`<h1 class="hidden">Versions</h1><${Loaded} of=${versions}>${({ data }) => html`<${History} versions=${data} near=${near} mayChange=${mayChange} reload=${versions.reload} />`}<//>`;
}

// `near`: by version, the numbers of its step, which say how near what was served was to the trainer's weights.
function History({ versions, near, mayChange, reload }) {
  const [all, setAll] = useState(false);
  const [asking, setAsking] = useState(null);
  const newest = useMemo(() => [...versions].reverse(), [versions]);
  const shown = all ? newest : newest.slice(0, SHOWN);
  const live = versions.find((version) => version.live);
  const test = underWay(versions);
  const canGoBack = mayChange && versions.some((version) => version.promotable && version.version < live?.version);
  const onDone = () => {
    setAsking(null);
    reload();
  };
  return html`<div class="title-line"><p>Version <b>${live?.version}</b> is live${live?.live_at > 0 && html` since <${Time} at=${live.live_at} />`}.</p>
      ${canGoBack && html`<button onClick=${() => setAsking({ path: "/policy/rollback", what: "Roll back to the version that was live before this one?", verb: "Roll back" })}>Roll back…</button>`}</div>
    ${test && html`<${Test} test=${test} />`}
    ${versions.length === 1 && html`<${Empty}>Only the base model is there. <code>lightning-proxy train</code> publishes version 1 after its first step.<//>`}
    <div class="table versions" tabindex="0" role="region" aria-label="Versions"><table>
      <thead><tr><th scope="col">lineage</th><th scope="col" class="num">version</th><th scope="col">status</th><th scope="col">verified</th><th scope="col" class="num">from</th><th scope="col" class="num">step</th><th scope="col" class="num">train reward</th><th scope="col" class="num">eval reward</th><th scope="col" class="num">made</th><th scope="col">action</th></tr></thead>
      <tbody>${shown.map((version, i) => html`<${Version} key=${version.version} version=${version} near=${near.get(version.version)} graph=${i === 0 && html`<${Lineage} versions=${shown} />`} count=${shown.length}
        onPromote=${mayChange && (() => setAsking({ path: "/policy/promote", body: { version: version.version }, what: `Make version ${version.version} live? The trainer continues from it.`, verb: "Promote" }))} />`)}</tbody>
    </table></div>
    ${newest.length > SHOWN && html`<button onClick=${() => setAll(!all)}>${all ? "Show the newest only" : `Show all ${number(newest.length)} versions`}</button>`}
    ${asking && html`<${Confirm} ...${asking} onDone=${onDone} onClose=${() => setAsking(null)} />`}`;
}

function Version({ version, near, graph, count, onPromote }) {
  const { rewards = {} } = version;
  const reward = (one) => (one ? html`<b>${number(one.mean)}</b> <small>of ${number(one.rollouts)}</small>` : html`<span class="muted">–</span>`);
  return html`<tr class=${version.live && "live"} style=${{ height: `${ROW}px` }}>
    ${graph && html`<td class="lineage" rowspan=${count}>${graph}</td>`}
    <td class="num head" data-label="version"><a class="pick" href=${link("compare", { a: version.parent ?? 0, b: version.version })} title="compare with the version it came from">${version.version}</a></td>
    <td title=${outcome(version.promotion)}><${Badge} kind=${STATUS_KIND[version.status]}>${version.status}<//> <small>${version.publish}</small>${version.best && html` <${Badge} kind="good">best<//>`}${version.error && html` · <small class="reason" title=${version.error}>${version.error}</small>`}</td>
    <td><${Verified} version=${version} near=${near} /></td>
    <td class="num" data-label="from">${version.parent ?? ""}</td>
    <td class="num" data-label="step">${version.step ?? ""}</td>
    <td class="num" data-label="train">${reward(rewards.train)}</td>
    <td class="num" data-label="eval" title=${interval(version.evaluation)}>${reward(rewards.eval)}</td>
    <td class="num" data-label="made">${version.created_at > 0 && html`<${Time} at=${version.created_at} />`}</td>
    <td>${!version.live && (version.promotable ? onPromote && html`<button onClick=${onPromote}>Promote…</button>` : html`<small class="why">${version.obstacle}</small>`)}</td>
  </tr>`;
}

// How sure an evaluation beside training was (`evaluation`), or why it has no result.
const interval = (found) => found && (found.reward === null ? (found.error ?? "is evaluated now") : `evaluated: ${number(found.reward)}, 95 %: ${number(found.low)} to ${number(found.high)}`);

// Whether vLLM was seen to serve it, and how near.
function Verified({ version, near }) {
  if (version.version === 0) return html`<small class="muted">the base model</small>`;
  if (!version.verified) return UNDER_WAY.includes(version.status) ? html`<${Badge} kind="accent">not verified yet<//>` : html`<${Badge}>not verified<//>`;
  const { verify_difference: nats, verify_deviations: deviations, verified_by: by } = near ?? {};
  return html`<${Badge} kind="good">verified<//> ${typeof nats === "number" && html`<small title="mean difference of the served log-probabilities from the trainer's">within ${number(nats)} nats</small>`}
    ${by ? html` <small>by ${by}</small>` : typeof deviations === "number" && html`<small> · ${number(deviations)} standard deviations from the old</small>`}`;
}

// The tree of versions, newest on top: each stands below those that were trained from it.
function lineageOf(versions) {
  const lanes = []; // by lane, the version that its line leads down to
  return versions.map(({ version, parent }) => {
    const taken = lanes.indexOf(version);
    const lane = taken === -1 ? freeLane(lanes) : taken;
    lanes.forEach((to, i) => to === version && (lanes[i] = undefined));
    if (typeof parent === "number") {
      lanes[lane] = parent;
    }
    return { version, parent, lane };
  });
}

function freeLane(lanes) {
  const free = lanes.indexOf(undefined);
  return free === -1 ? lanes.length : free;
}

function Lineage({ versions }) {
  const nodes = lineageOf(versions);
  const at = new Map(nodes.map((node, i) => [node.version, { x: LANE * (node.lane + 0.5), y: ROW * (i + 0.5) }]));
  const width = LANE * (Math.max(...nodes.map(({ lane }) => lane)) + 1);
  const lines = nodes.map(({ version, parent, lane }) => {
    const [from, end] = [at.get(version), at.get(parent)];
    if (!end) return typeof parent === "number" && html`<path d=${`M${from.x},${from.y}V${ROW * versions.length}`} />`;
    return html`<path d=${`M${from.x},${from.y}V${end.y - ROW / 2}L${end.x},${end.y}`} />`;
  });
  return html`<svg width=${width} height=${ROW * versions.length} role="img" aria-label="which version came from which">${lines}
    ${versions.map((version) => html`<circle class=${version.live ? "live" : version.status} cx=${at.get(version.version).x} cy=${at.get(version.version).y} r="4"><title>version ${version.version}</title></circle>`)}</svg>`;
}

function Confirm({ path, body, what, verb, onDone, onClose }) {
  const [state, setState] = useState({ busy: false, error: null });
  const onClick = () => {
    setState({ busy: true, error: null });
    post(path, body).then(onDone, (error) => setState({ busy: false, error }));
  };
  return html`<${Dialog} label=${verb} onClose=${onClose}>
    <h2>${verb}</h2><p>${what}</p><${Failure} error=${state.error} />
    <form method="dialog"><button>Cancel</button><button type="button" class="primary" disabled=${state.busy} onClick=${onClick}>${state.busy ? "Working…" : verb}</button></form>
  <//>`;
}
