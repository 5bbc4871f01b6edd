// One rollout as a timeline: its calls and events in order, its rewards, and how it was trained.
import { useData } from "./api.mjs";
import { Call, creditOf } from "./call.mjs";
import { usd, usedTokens } from "./costs.mjs";
import { useFresh } from "./feed.mjs";
import { milliseconds, number, signed, text } from "./format.mjs";
import { Contexts } from "./graph.mjs";
import { html, useMemo } from "./html.mjs";
import { Badge, Empty, Facts, Loaded, Panel, Reward, RolloutLink, LongText, Table, Time, link, to } from "./parts.mjs";
import { RolloutStatus } from "./rollouts.mjs";
import { wholeRequests } from "./whole.mjs";

const OF_A_ROLLOUT = ["call", "reward", "rollout"];

export function useRollout(id) {
  const found = useData(`/rollouts/${encodeURIComponent(id)}`);
  const rollout = { ...found, data: useMemo(() => found.data && wholeRequests(found.data), [found.data]) };
  const rows = useData(`/rollouts/${encodeURIComponent(id)}/rows`);
  useFresh(OF_A_ROLLOUT, rollout.reload, (data) => data.rollout_id === id);
  useFresh(["step"], rows.reload);
  return { rollout, rows: rows.data };
}

// `blind(rollout)`: it without the judgements that are not shown yet, or null where all of them are.
export function Rollout({ id, blind = () => null }) {
  const { rollout, rows } = useRollout(id);
  return html`<${Loaded} of=${rollout}>${(found) => {
    const hidden = blind(found);
    return html`<${Parts} rollout=${hidden ?? found} rows=${hidden ? null : rows} isBlind=${hidden !== null} />`;
  }}<//>`;
}

function Parts({ rollout, rows, isBlind }) {
  const { rewards, calls, awaits_reward: awaits } = rollout;
  return html`<${RolloutHead} rollout=${rollout} rows=${rows} part="timeline" />
    <div class="grid">
      <${Panel} title="Rewards" note=${isBlind && "Others' rewards are shown once you have rated the rollout."}>${!(isBlind && rewards.length === 0) && html`<${Rewards} rewards=${rewards} calls=${calls} awaits=${awaits} />`}<//>
      <${Panel} title="Rollout"><${About} rollout=${rollout} /><//>
      ${!isBlind && html`<${Panel} title="Siblings" note="The rollouts of its task that it was compared with."><${Group} rows=${rows} id=${rollout.rollout_id} /><//>`}
    </div>
    <${Timeline} rollout=${rollout} rows=${rows} />`;
}

// Name, state and parts of a rollout: what all of its views begin with.
export function RolloutHead({ rollout, rows, part }) {
  const parts = [["timeline", to("rollouts", rollout.rollout_id)], ["training row", to("rollouts", rollout.rollout_id, "rows")], ["side by side", to("rollouts", rollout.rollout_id, "beside")], ["rate", link("rate", { id: rollout.rollout_id })]];
  return html`<div class="title-line">
      <a href="#/rollouts" title="all rollouts (u)">rollouts</a> / <h1 class="id">${rollout.rollout_id}</h1>
      <${RolloutStatus} status=${rollout.status} call=${rollout.calls?.at(-1)?.status} /> <${Badge}>${rollout.mode}<//>
      <span>reward <${Reward} value=${rollout.reward} />${rollout.reward !== null && rollout.own_reward === null && " of its calls"}</span>
    </div>
    <p class="why">${fate(rollout, rows)}</p>
    <nav class="parts" aria-label="Parts of the rollout">${parts.map(([name, href]) => html`<a href=${href} aria-current=${name === part && "page"}>${name}</a>`)}</nav>`;
}

function fate(rollout, rows) {
  const own = rows?.group?.find(({ rollout_id }) => rollout_id === rollout.rollout_id);
  if (rollout.step !== null) {
    const advantage = typeof own?.advantage === "number" ? ` with advantage ${signed(own.advantage)}` : "";
    return html`Trained in <a href=${link("rollouts", { step: rollout.step })}>step ${rollout.step}</a>${advantage}.`;
  }
  if (rollout.dropped) return `Not trained: ${rollout.dropped}${rollout.dropped_by ? ` (before step ${rollout.dropped_by})` : ""}.`;
  if (rollout.mode === "eval") return "An evaluation: it is never trained on.";
  if (rollout.status === "running") return "It has not ended: a reward for the whole rollout ends it. rollouts.end_after_idle_s ends what nobody ends.";
  return rollout.status === "completed" ? "It waits for the trainer." : `It ended as ${rollout.status}${rollout.reason ? `: ${rollout.reason}` : ""}.`;
}

function About({ rollout }) {
  const { task_id } = rollout;
  const facts = {
    task: task_id && html`<a class="id" href=${link("rollouts", { task_id })}>${task_id}</a>`,
    agent: rollout.agent,
    "policy version": rollout.policy_version,
    calls: number(rollout.call_count),
    "sampled tokens": number(rollout.tokens),
    used: rollout.costs && usedTokens(rollout.costs),
    cost: rollout.costs && usd(rollout.costs),
    opened: html`<${Time} at=${rollout.created_at} />`,
    took: rollout.ended_at && milliseconds(1000 * (rollout.ended_at - rollout.created_at)),
    reason: rollout.reason,
  };
  const metadata = Object.keys(rollout.metadata ?? {}).length > 0;
  return html`<${Facts} of=${facts} />${metadata && html`<h3>metadata</h3><${LongText} most=${300}>${text(rollout.metadata)}<//>`}`;
}

// A link inside the page that is shown: the address stays.
function CallLink({ calls, id }) {
  const seq = calls.find(({ call_id }) => call_id === id)?.seq;
  if (seq === undefined) return html`call <span class="id">${id}</span>`;
  return html`<button class="plain" title=${id} onClick=${() => document.getElementById(`call-${seq}`)?.scrollIntoView()}>call ${seq}</button>`;
}

function Rewards({ rewards, calls, awaits }) {
  if (rewards.length === 0) {
    return html`<${Empty}>${awaits ? "The reward function has not been asked about it yet." : html`No reward yet. Post one: <code>curl --json '{"rollout_id": "ID", "reward": 1}' ${location.origin}/reward</code>`}<//>`;
  }
  return html`<ul class="rewards">${rewards.map((reward) => html`<li key=${reward.reward_id}>
    <${Reward} value=${reward.reward} /> <span>${reward.name}</span>
    <small>${reward.call_id ? html`for <${CallLink} calls=${calls} id=${reward.call_id} />` : "for the rollout"}${reward.source && `, by ${reward.source}`}, <${Time} at=${reward.created_at} /></small>
    ${reward.comment && html`<${LongText} most=${300}>${reward.comment}<//>`}
  </li>`)}</ul>`;
}

const GROUP_COLUMNS = [
  { name: "rollout", label: "rollout", cell: (row) => html`<${RolloutLink} id=${row.rollout_id} />` },
  { name: "reward", label: "reward", num: true, cell: (row) => html`<${Reward} value=${row.reward} />` },
  { name: "advantage", label: "advantage", num: true, cell: (row) => signed(row.advantage) },
  { name: "fate", label: "trained", cell: (row) => (typeof row.step === "number" ? html`<a href=${link("rollouts", { step: row.step })}>step ${row.step}</a>` : row.dropped && html`<span class="muted" title=${row.dropped}>dropped</span>`) },
];

function Group({ rows, id }) {
  const group = rows?.group ?? [];
  if (group.length < 2) return html`<${Empty}>No sibling yet. Rollouts with the same <code>X-Task-Id</code> are compared with each other: <code>lightning-proxy run --tasks FILE -- COMMAND</code> makes eight of each task.<//>`;
  const ordered = [...group].sort((a, b) => (b.rollout_id === id) - (a.rollout_id === id) || (b.reward ?? 0) - (a.reward ?? 0));
  return html`<${Table} label="Siblings" columns=${GROUP_COLUMNS} rows=${ordered} rowKey=${(row) => row.rollout_id} />`;
}

export function Timeline({ rollout, rows }) {
  const { calls, events } = rollout;
  const credit = useMemo(() => creditOf(calls, rows), [calls, rows]);
  if (calls.length + events.length === 0) return html`<${Empty}>No call yet. <code>lightning-proxy doctor</code> says whether one would be answered.<//>`;
  const eventsBefore = (seq) => events.filter((event) => event.seq === seq);
  const after = events.filter(({ seq }) => !calls.some((call) => call.seq === seq));
  return html`<${Contexts} calls=${calls} credit=${credit} /><div class="timeline">
    ${calls.map((call, i) => html`
      ${eventsBefore(call.seq).map((event) => html`<${Event} key=${`event-${event.event_id}`} event=${event} />`)}
      <${Call} key=${call.call_id} id=${rollout.rollout_id} call=${call} cost=${rollout.costs?.of_calls[call.call_id]} before=${before(calls, i)} credit=${credit.get(call.call_id)} />`)}
    ${after.map((event) => html`<${Event} key=${`event-${event.event_id}`} event=${event} />`)}
  </div>`;
}

// The call that this one continues, else the one before it by the same agent.
function before(calls, i) {
  const extended = calls.find(({ call_id }) => call_id === calls[i].extends);
  return extended ?? calls.slice(0, i).findLast(({ agent }) => agent === calls[i].agent);
}

function Event({ event }) {
  return html`<article class="call event">
    <header><h3>${event.kind}${event.name && html` <code>${event.name}</code>`}</h3>${event.agent && html`<${Badge}>${event.agent}<//>`}${event.is_error && html`<${Badge} kind="bad">failed<//>`} <${Time} at=${event.created_at} /></header>
    ${["value", "arguments", "result"].map((part) => event[part] !== null && html`<div class="message"><span class="role">${part}</span><${LongText}>${text(event[part])}<//></div>`)}
  </article>`;
}
