// One rollout as a timeline: its calls and events in order, its rewards, and how it was trained.
import { route, useData } from "./data.mjs";
import { answerMessages, pretty, requestMessages, withoutKnown } from "./messages.mjs";
import { Badge, Empty, Facts, LongText, Loaded, Panel, Reward, RolloutLink, Table, TaskLink, Time, html, link, number, plural, seconds, signed, text, usd, useMemo, useState } from "./parts.mjs";
import { Fate, RolloutStatus } from "./rollouts.mjs";
import { Tokens } from "./tokens.mjs";

// Where a call's tokens went, in words. docs/page.md says more.
const PLACED = {
  first: "begins the rollout's first row",
  merged: "continues the row of the call before it",
  drift: "begins a row: the last answer came back tokenised differently",
  edited: "begins a row: the history was changed, or continued from earlier",
  repeated: "begins a row: the same prompt, or less of it, was sent again",
  adjoining: "begins a row: nothing came after the last answer",
  new: "begins a row: another agent or a new conversation",
  untrainable: "left out: no token ids, log-probabilities or answer, or temperature 0",
  not_followed: "left out: sampled in a way that the trainer cannot compute again",
  ambiguous: "left out: several answers, so the reward belongs to none",
  not_finite: "left out: a recorded log-probability is not a number",
  other_tokens: "left out: another model sampled tokens that this one does not have",
  too_long: "left out: the row is longer than the trainer takes",
};
const DIRECTION = { 1: "up", [-1]: "down" }; // by the sign of an advantage

// The credit of each call of a rollout, and in words and as a box (`out`: it was not trained on) where it went.
function creditOf(calls, rows) {
  const credits = new Map((rows?.calls ?? []).map((credit) => [credit.call_id, credit]));
  const edges = calls.flatMap(({ contexts }) => contexts ?? []);
  const summaries = edges.filter(({ edge }) => edge === "compacts").map(({ call_id }) => call_id);
  const isTaken = typeof rows?.step === "number";
  const whyNot = ({ call_id, rejected }) => (rejected ? "another attempt was used in its place" : summaries.includes(call_id) ? "a summary" : "its agent is not trained");
  return new Map(calls.map((call) => {
    const credit = credits.get(call.call_id) ?? {};
    const why = typeof credit.step === "number" ? PLACED[credit.placed] ?? credit.placed : isTaken && `left out: ${whyNot(call)}`;
    const isOut = typeof credit.row !== "number" && (isTaken || call.rejected);
    return [call.call_id, { ...credit, why, box: isOut ? "out" : DIRECTION[Math.sign(credit.advantage)] ?? "" }];
  }));
}

// `blind(rollout)`: it without the judgements that are not shown yet, or null where all of them are.
export function Rollout({ id, blind = () => null }) {
  const [whole, setWhole] = useState(false);
  const rollout = useData(route`/rollouts/${id}`, { requests: whole ? "whole" : null }, ["call", "reward", "rollout"], (event) => event.rollout_id === id);
  const rows = useData(route`/rollouts/${id}/rows`, {}, ["step"]);
  return html`<${Loaded} of=${rollout}>${(all) => {
    const hidden = blind(all);
    return html`<${Parts} rollout=${hidden ?? all} rows=${hidden ? null : rows.data} isBlind=${hidden !== null} onWhole=${whole ? null : () => setWhole(true)} />`;
  }}<//>`;
}

function Parts({ rollout, rows, isBlind, onWhole }) {
  const { rollout_id: id, rewards, calls, events } = rollout;
  const credit = useMemo(() => creditOf(calls, rows), [calls, rows]);
  const draw = (some) => some.map((event) => html`<${Event} key=${`event-${event.event_id}`} event=${event} />`);
  return html`<div class="title-line">
      <a href="#/rollouts" title="all rollouts (u)">rollouts</a> / <h1 class="id">${id}</h1>
      <${RolloutStatus} status=${rollout.status} call=${calls.at(-1)?.status} /> <${Badge}>${rollout.mode}<//>
      <span>reward <${Reward} value=${rollout.reward} />${rollout.reward !== null && rollout.own_reward === null && " of its calls"}</span>
      <a href=${link("rate", { id })}>rate</a>
    </div>
    <p class="why">${fate(rollout, rows)}</p>
    <div class="grid">
      <${Panel} title="Rewards" note=${isBlind && "Others' rewards are shown once you have rated the rollout."}>${(!isBlind || rewards.length > 0) && html`<${Rewards} rollout=${rollout} />`}<//>
      <${Panel} title="Rollout"><${About} rollout=${rollout} /><//>
      ${!isBlind && html`<${Panel} title="Siblings" note="The rollouts of its task that it was compared with."><${Group} group=${rows?.group ?? []} id=${id} /><//>`}
    </div>
    ${calls.length + events.length === 0 && html`<${Empty}>No call yet. <code>lightning-proxy doctor</code> says whether one would be answered.<//>`}
    <${Contexts} calls=${calls} credit=${credit} />
    ${onWhole && calls.some((call) => call.request_of) && html`<button class="more" onClick=${onWhole}>show each request whole</button>`}
    <div class="timeline">
      ${calls.map((call, i) => html`${draw(events.filter(({ seq }) => seq === call.seq))}
        <${Call} key=${call.call_id} id=${id} call=${call} cost=${rollout.costs?.of_calls[call.call_id]} before=${before(calls, i)} credit=${credit.get(call.call_id)} />`)}
      ${draw(events.filter((event) => !calls.some(({ seq }) => seq === event.seq)))}
    </div>`;
}

function fate(rollout, rows) {
  if (rollout.step !== null) {
    const own = rows?.group?.find(({ rollout_id }) => rollout_id === rollout.rollout_id);
    return html`Trained in <${Fate} row=${rollout} />${typeof own?.advantage === "number" && ` with advantage ${signed(own.advantage)}`}.`;
  }
  if (rollout.dropped) return `Not trained: ${rollout.dropped}${rollout.dropped_by ? ` (before step ${rollout.dropped_by})` : ""}.`;
  if (rollout.mode === "eval") return "An evaluation: it is never trained on.";
  if (rollout.status === "running") return "It has not ended: a reward for the whole rollout ends it. rollouts.end_after_idle_s ends what nobody ends.";
  return rollout.status === "completed" ? "It waits for the trainer." : `It ended as ${rollout.status}${rollout.reason ? `: ${rollout.reason}` : ""}.`;
}

function About({ rollout: { task_id, agent, policy_version, call_count, tokens, costs, created_at, ended_at, reason, metadata } }) {
  const facts = {
    task: task_id && html`<${TaskLink} id=${task_id} />`,
    agent,
    "policy version": policy_version,
    calls: number(call_count),
    "sampled tokens": number(tokens),
    used: costs && usedTokens(costs),
    cost: costs && usd(costs),
    opened: html`<${Time} at=${created_at} />`,
    took: ended_at && seconds(ended_at - created_at),
    reason,
    metadata: Object.keys(metadata ?? {}).length > 0 && html`<${LongText} most=${300}>${text(metadata)}<//>`,
  };
  return html`<${Facts} of=${facts} />`;
}

// Input and output, those from a cache and of reasoning apart.
const usedTokens = (of) => `${number(of.input_tokens)}${of.cached_tokens > 0 ? ` (${number(of.cached_tokens)} cached)` : ""} + ${plural(of.output_tokens, "token")}${of.reasoning_tokens > 0 ? ` (${number(of.reasoning_tokens)} reasoning)` : ""}`;

// A place inside the page that is shown: the address stays.
const CallLink = ({ id, children }) => html`<button class="plain" onClick=${() => document.querySelector(`[data-call="${CSS.escape(id)}"]`)?.scrollIntoView()}>${children}</button>`;

function Rewards({ rollout: { rewards, calls, awaits_reward } }) {
  if (rewards.length === 0) {
    return html`<${Empty}>${awaits_reward ? "The reward function has not been asked about it yet." : html`No reward yet. Post one: <code>curl --json '{"rollout_id": "ID", "reward": 1}' ${location.origin}/reward</code>`}<//>`;
  }
  const seqs = new Map(calls.map(({ call_id, seq }) => [call_id, seq]));
  return html`<ul class="rewards">${rewards.map((one) => html`<li key=${one.reward_id}>
    <${Reward} value=${one.reward} /> <span>${one.name}</span>
    <small>for ${one.call_id ? html`<${CallLink} id=${one.call_id}>call ${seqs.get(one.call_id)}<//>` : "the rollout"}${one.source && `, by ${one.source}`}, <${Time} at=${one.created_at} /></small>
    ${one.comment && html`<${LongText} most=${300}>${one.comment}<//>`}
  </li>`)}</ul>`;
}

const SIBLINGS = [
  { name: "rollout", cell: (row) => html`<${RolloutLink} id=${row.rollout_id} />` },
  { name: "reward", num: true, cell: (row) => html`<${Reward} value=${row.reward} />` },
  { name: "advantage", num: true, cell: (row) => signed(row.advantage) },
  { name: "trained", cell: (row) => html`<${Fate} row=${row} />` },
];

function Group({ group, id }) {
  if (group.length < 2) return html`<${Empty}>No sibling yet. Rollouts with the same <code>X-Task-Id</code> are compared with each other: <code>lightning-proxy run --tasks FILE -- COMMAND</code> makes eight of each task.<//>`;
  const ordered = [...group].sort((a, b) => (b.rollout_id === id) - (a.rollout_id === id) || (b.reward ?? 0) - (a.reward ?? 0));
  return html`<${Table} label="Siblings" columns=${SIBLINGS} rows=${ordered} rowKey=${(row) => row.rollout_id} />`;
}

// A rollout's contexts: its calls as boxes with their credit's colour, a sub-agent's are indented.
function Contexts({ calls, credit }) {
  const isPlain = ({ contexts }, i) => !contexts || i === 0 || (contexts.length === 1 && contexts[0].edge === "continues");
  if (calls.every(isPlain)) return null;
  const seqs = new Map(calls.map(({ call_id, seq }) => [call_id, seq]));
  const depths = new Map();
  const row = (call) => {
    const { advantage, box } = credit.get(call.call_id);
    const from = call.contexts.find(({ edge }) => edge !== "returns");
    const depth = (depths.get(from?.call_id) ?? 0) + (from?.edge === "delegates" ? 1 : 0);
    depths.set(call.call_id, depth);
    const edges = call.contexts.map(({ edge, call_id }) => `${edge} ${seqs.get(call_id) ?? "?"}`).join(", ") || "new";
    return html`<li key=${call.call_id} style=${{ marginLeft: `${18 * depth}px` }}><${CallLink} id=${call.call_id}>
      <span class=${`box ${box}`}></span> ${call.seq} ${call.agent} <small>${edges}${call.rejected && ", rejected"}${typeof advantage === "number" && `, advantage ${signed(advantage)}`}</small>
    <//></li>`;
  };
  return html`<${Panel} title="Contexts" note="A box is a call: green was pulled up in training, red pushed down, grey left out or rejected. Sub-agents are indented."><ol class="lanes">${calls.map(row)}</ol><//>`;
}

// The call that this one continues, else the one before it by the same agent.
function before(calls, i) {
  const { contexts, extends: extended, request_of, agent } = calls[i];
  const id = contexts?.find(({ edge }) => edge === "continues")?.call_id ?? extended ?? request_of?.call_id;
  return calls.find(({ call_id }) => call_id === id) ?? calls.slice(0, i).findLast((call) => call.agent === agent);
}

function Event({ event }) {
  return html`<article class="call event">
    <header><h3>${event.kind}${event.name && html` <code>${event.name}</code>`}</h3>${event.agent && html`<${Badge}>${event.agent}<//>`}${event.is_error && html`<${Badge} kind="bad">failed<//>`} <${Time} at=${event.created_at} /></header>
    ${["value", "arguments", "result"].map((part) => event[part] !== null && html`<div class="message"><span class="role">${part}</span><${LongText}>${text(event[part])}<//></div>`)}
  </article>`;
}

// What was new in a call's request, its answer, its tools, its tokens, and how it was trained.
function Call({ id, call, before, credit, cost }) {
  const [tokens, setTokens] = useState(false);
  const [json, setJson] = useState(false);
  const [earlier, setEarlier] = useState(false);
  const request = useMemo(() => requestMessages(call.request), [call.request]);
  const fresh = useMemo(() => withoutKnown(request, call, before), [request, before]);
  const known = request.length - fresh.length;
  return html`<article class="call" id=${`call-${call.seq}`} data-call=${call.call_id}>
    <${Head} call=${call} credit=${credit} cost=${cost} />
    ${known > 0 && html`<button class="more" aria-expanded=${earlier} onClick=${() => setEarlier(!earlier)}>${earlier ? "hide" : "show"} ${plural(known, "earlier message")}</button>`}
    ${(earlier ? request : fresh).map((message) => html`<${Message} ...${message} />`)}
    <div class=${tokens ? "answer with-tokens" : "answer"}>
      <div>${answerMessages(call.response).map((message) => html`<${Message} ...${message} kind="of-model" />`)}
        ${call.error && html`<p class="failure">${text(call.error)}</p>`}</div>
      ${tokens && html`<${Tokens} id=${id} call=${call} isOut=${credit.box === "out"} />`}
    </div>
    ${call.tool_calls.filter(({ result }) => result !== null).map((tool) => html`<${Message} role="tool" blocks=${[{ kind: tool.is_error ? "error" : "result", title: tool.name, content: pretty(tool.result) }]} />`)}
    <footer>
      ${call.response_token_ids.length > 0 && html`<button aria-expanded=${tokens} onClick=${() => setTokens(!tokens)}>tokens</button>`}
      <button aria-expanded=${json} onClick=${() => setJson(!json)}>JSON</button>
      <small class="id" title="call id">${call.call_id}</small>
    </footer>
    ${json && html`<${LongText}>${text({ request_of: call.request_of, request: call.request, response: call.response, sampling: call.sampling })}<//>`}
  </article>`;
}

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
const milliseconds = (value) => seconds(typeof value === "number" ? value / 1000 : null);

function Head({ call, credit, cost }) {
  const versions = call.policy_versions.length > 1 ? call.policy_versions.join(" → ") : call.policy_version;
  const prompt = (call.prompt_of?.tokens ?? 0) + call.prompt_token_ids.length;
  const facts = [
    `${milliseconds(call.latency_ms)}${call.ttft_ms === null ? "" : `, first token ${milliseconds(call.ttft_ms)}`}`,
    cost ? usedTokens(cost) : `${number(prompt)} + ${plural(call.response_token_ids.length, "token")}`,
    cost?.usd > 0 && usd(cost),
    call.finish_reason,
    call.logprobs.length > 0 && `mean log-probability ${number(mean(call.logprobs))}`,
  ];
  return html`<header>
    <h3 class="pick" tabindex="-1">call ${call.seq}</h3>
    ${call.status !== "ok" && html`<${Badge} kind="bad">${call.status}${call.http_status >= 400 && ` ${call.http_status}`}<//>`}
    ${call.agent && html`<${Badge}>${call.agent}<//>`}
    <span>${call.model}${versions !== null && html`<small> version ${versions}</small>`}</span>
    ${facts.filter(Boolean).map((fact) => html`<span class="muted">${fact}</span>`)}
    ${call.reward !== null && html`<span>reward <${Reward} value=${call.reward} /></span>`}
    ${call.superseded_by && html`<${Badge} kind="bad">sent again<//>`}
    ${typeof credit.step === "number" && html`<span>return <b>${number(credit.return)}</b></span>
      <${Badge} kind=${{ up: "good", down: "bad" }[credit.box]}>advantage ${signed(credit.advantage)}<//>`}
    ${credit.why && html`<p class="why">${typeof credit.step === "number" && `Step ${credit.step}${credit.row === null ? "" : `, row ${credit.row}`}: `}${credit.why}</p>`}
    ${!call.trainable && html`<p class="why">Not trainable: ${call.untrainable_reason}</p>`}
  </header>`;
}

// What stands before a block, by its kind.
const TITLES = { call: "calls", result: "returned", error: "failed", thought: "thought" };

function Message({ role, blocks, kind = "" }) {
  return html`<div class=${`message ${kind}`}>
    <span class="role">${role}</span>
    <div>${blocks.map((block) => html`<div class=${`block ${block.kind}`}>
      ${TITLES[block.kind] && html`<span class="title">${TITLES[block.kind]} ${block.title && html`<code>${block.title}</code>`}</span>`}
      <${LongText}>${block.content}<//>
    </div>`)}</div>
  </div>`;
}
