// One call of a rollout: what was new in its request, the answer, its tools, its tokens, and how it was trained.
import { CopyAs } from "./copies.mjs";
import { usd, usedTokens } from "./costs.mjs";
import { milliseconds, mean, number, plural, pretty, signed, text } from "./format.mjs";
import { html, useMemo, useState } from "./html.mjs";
import { answerMessages, requestMessages, shared } from "./messages.mjs";
import { Badge, Reward, LongText } from "./parts.mjs";
import { TokensOf } from "./tokens.mjs";

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
  not_finite: "left out: a recorded log-probability is no number",
  other_tokens: "left out: another model sampled tokens that this one does not have",
  too_long: "left out: the row is longer than the trainer takes",
};

// The credit of each call of a rollout, and in words and as a box (`out`: it was not trained on) where it went.
export function creditOf(calls, rows) {
  const found = new Map((rows?.calls ?? []).map((credit) => [credit.call_id, credit]));
  const edges = calls.flatMap(({ contexts }) => contexts ?? []);
  const summaries = new Set(edges.filter(({ edge }) => edge === "compacts").map(({ call_id }) => call_id));
  const whyNot = ({ call_id, rejected }) => (rejected ? "another attempt was used in its place" : summaries.has(call_id) ? "a summary" : "its agent is not trained");
  return new Map(calls.map((call) => {
    const credit = found.get(call.call_id) ?? {};
    const [isTaken, isTrained] = [typeof rows?.step === "number", typeof credit.row === "number"];
    const why = typeof credit.step === "number" ? PLACED[credit.placed] ?? credit.placed : isTaken && `left out: ${whyNot(call)}`;
    const box = isTrained ? (credit.advantage > 0 ? "up" : credit.advantage < 0 ? "down" : "") : isTaken || call.rejected ? "out" : "";
    return [call.call_id, { ...credit, why, box }];
  }));
}

export function Call({ id, call, before, credit, cost }) {
  const [tokens, setTokens] = useState(false);
  const [json, setJson] = useState(false);
  const request = useMemo(() => requestMessages(call.request), [call.request]);
  const earlier = useMemo(() => (before ? [...requestMessages(before.request), ...answerMessages(before.response)] : []), [before]);
  return html`<article class="call" id=${`call-${call.seq}`} data-call=${call.call_id}>
    <${Head} call=${call} credit=${credit} cost=${cost} />
    <${Request} messages=${request} known=${shared(request, earlier)} resultsShown=${before?.tool_calls.some(({ result }) => result !== null)} />
    <div class=${tokens ? "answer with-tokens" : "answer"}>
      <div>${answerMessages(call.response).map((message) => html`<${Message} ...${message} answer />`)}
        ${call.error && html`<p class="failure">${text(call.error)}</p>`}</div>
      ${tokens && html`<${TokensOf} id=${id} taken=${credit.box === "out"} of=${{ call_id: call.call_id }} known=${[{ ...call, token_ids: call.response_token_ids }]} />`}
    </div>
    ${call.tool_calls.filter(({ result }) => result !== null).map((tool) => html`<${ToolResult} tool=${tool} />`)}
    <footer>
      ${call.response_token_ids.length > 0 && html`<button aria-expanded=${tokens} onClick=${() => setTokens(!tokens)}>tokens</button>`}
      <button aria-expanded=${json} onClick=${() => setJson(!json)}>JSON</button>
      ${call.endpoint && html`<${CopyAs} path=${`v1/${call.endpoint}`} body=${call.request} />`}
      <small class="id" title="call id">${call.call_id}</small>
    </footer>
    ${json && html`<${LongText}>${text({ request: call.request, response: call.response, sampling: call.sampling })}<//>`}
  </article>`;
}

function Head({ call, credit, cost }) {
  const versions = call.policy_versions.length > 1 ? call.policy_versions.join(" → ") : call.policy_version;
  return html`<header>
    <h3 class="pick" tabindex="-1">call ${call.seq}</h3>
    ${call.status !== "ok" && html`<${Badge} kind="bad">${call.status}${call.http_status >= 400 ? ` ${call.http_status}` : ""}<//>`}
    ${call.agent && html`<${Badge}>${call.agent}<//>`}
    <span>${call.model}${versions !== null && html`<small> version ${versions}</small>`}</span>
    <span class="muted">${milliseconds(call.latency_ms)}${call.ttft_ms !== null && `, first token ${milliseconds(call.ttft_ms)}`}</span>
    <span class="muted">${cost ? usedTokens(cost) : `${number((call.prompt_of?.tokens ?? 0) + call.prompt_token_ids.length)} + ${plural(call.response_token_ids.length, "token")}`}${cost?.usd > 0 && `, ${usd(cost)}`}${call.finish_reason && `, ${call.finish_reason}`}</span>
    ${call.logprobs.length > 0 && html`<span class="muted">mean log-probability ${number(mean(call.logprobs))}</span>`}
    ${call.reward !== null && html`<span>reward <${Reward} value=${call.reward} /></span>`}
    ${call.superseded_by && html`<${Badge} kind="bad">sent again<//>`}
    <${Credit} credit=${credit} />
    ${!call.trainable && html`<p class="why">Not trainable: ${call.untrainable_reason}</p>`}
  </header>`;
}

function Credit({ credit }) {
  if (typeof credit.step !== "number") return credit.why && html`<p class="why">${credit.why}</p>`;
  const kind = credit.advantage > 0 ? "good" : credit.advantage < 0 ? "bad" : "";
  return html`<span>return <b>${number(credit.return)}</b></span>
    <${Badge} kind=${kind}>advantage ${signed(credit.advantage)}<//>
    <p class="why">Step ${credit.step}${credit.row !== null && html`, row ${credit.row}`}: ${credit.why}</p>`;
}

const isResult = ({ blocks }) => blocks.length > 0 && blocks.every(({ kind }) => kind === "result");

// `known`: how many messages earlier calls have shown. `resultsShown`: they have shown the tools' results, too.
function Request({ messages, known, resultsShown }) {
  const [whole, setWhole] = useState(false);
  const shown = whole ? messages : messages.slice(known).filter((message) => !resultsShown || !isResult(message));
  return html`${known > 0 && html`<button class="more" aria-expanded=${whole} onClick=${() => setWhole(!whole)}>
      ${whole ? "hide" : "show"} ${plural(known, "earlier message")}
    </button>`}
    ${shown.map((message) => html`<${Message} ...${message} />`)}`;
}

function Message({ role, blocks, answer }) {
  return html`<div class=${answer ? "message of-model" : "message"}>
    <span class="role">${role}</span>
    <div>${blocks.map(({ kind, title, content }) => html`<div class=${`block ${kind}`}>
      ${title !== undefined && html`<span class="title">${kind === "call" ? "calls" : kind} <code>${title}</code></span>`}
      ${kind === "thought" && html`<span class="title">thought</span>`}
      <${LongText}>${content}<//>
    </div>`)}</div>
  </div>`;
}

function ToolResult({ tool }) {
  return html`<div class=${tool.is_error ? "message failed" : "message"}>
    <span class="role">tool</span>
    <div class=${tool.is_error ? "block error" : "block result"}>
      <span class="title">${tool.is_error ? "failed" : "returned"} <code>${tool.name}</code></span>
      <${LongText}>${pretty(tool.result)}<//>
    </div>
  </div>`;
}
