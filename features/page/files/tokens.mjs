// Tokens as the policy's tokenizer writes them, coloured by how unlikely each was when it was sampled.
import { useData } from "./api.mjs";
import { number, signed } from "./format.mjs";
import { html, useMemo, useState } from "./html.mjs";
import { Failure } from "./parts.mjs";

const SHOWN = 1000;
const MOVES = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 };

// `of`: {call_id} or {row} of a rollout. `known`: what is shown until the texts are there, and without them.
// `taken`: by a step, so that an answer that is not trained was left out.
export function TokensOf({ id, of, taken, known = [] }) {
  const found = useData(`/rollouts/${encodeURIComponent(id)}/tokens`, of);
  const runs = found.data?.data ?? known;
  return html`${runs.length > 0 ? html`<${Tokens} runs=${runs} taken=${taken} />` : html`<${Failure} error=${found.error} again=${found.reload} />`}`;
}

// `runs`: as GET /rollouts/{id}/tokens has them.
function Tokens({ runs, taken }) {
  const [whole, setWhole] = useState(false);
  const [at, setAt] = useState(null);
  const all = useMemo(() => runs.flatMap((run) => run.token_ids.map((id, i) => ({ id, run, text: run.texts ? run.texts[i] : undefined, logprob: run.logprobs[i] }))), [runs]);
  const shown = whole ? all : all.slice(0, SHOWN);
  const onKeyDown = (event) => {
    const by = MOVES[event.key];
    if (by === undefined) return;
    event.preventDefault();
    setAt((now) => (now === null ? 0 : Math.min(shown.length - 1, Math.max(0, now + by))));
  };
  const onOver = (event) => {
    const index = event.target.dataset?.index;
    if (index !== undefined) setAt(Number(index));
  };
  const kind = ({ run, text }) => `token ${run.call_id === null ? "context" : ""} ${trained(run) ? (run.advantage > 0 ? "up" : run.advantage < 0 ? "down" : "") : taken && run.call_id !== null ? "left_out" : ""} ${text === null ? "rest" : ""}`;
  return html`<div class="tokens-of">
    <p class="muted" role="status">${at === null ? "Point at a token, or use the arrow keys: the stronger the colour, the less likely it was." : tokenLine(all, at)}</p>
    <div class="tokens" tabindex="0" role="group" aria-label=${`${all.length} tokens`} onKeyDown=${onKeyDown} onMouseOver=${onOver} onFocus=${() => setAt((now) => now ?? 0)}>
      ${shown.map((token, i) => html`<span data-index=${i} class=${`${kind(token)} ${i === at ? "at" : ""}`} style=${{ "--surprise": surprise(token.logprob) }}>${token.text === undefined ? token.id : visible(token.text)}</span>${token.text?.endsWith("\n") && html`<i class="line"></i>`}`)}
    </div>
    ${all.length > SHOWN && html`<button class="more" onClick=${() => setWhole(!whole)}>${whole ? "show less" : `show all ${number(all.length)} tokens`}</button>`}
  </div>`;
}

const trained = (run) => typeof run.step === "number";

const surprise = (logprob) => (typeof logprob === "number" ? 1 - Math.exp(logprob) : 0);

// A text of which each character can be seen. Null: what the token before it shows ends here.
function visible(text) {
  if (text === null) return "⋮";
  if (text === "") return "∅";
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, (one) => `\\u${one.codePointAt(0).toString(16).padStart(4, "0")}`);
}

function tokenLine(all, at) {
  const { id, text, logprob, run } = all[at];
  const quoted = text === undefined ? "" : text === null ? "the rest of a character, " : `“${visible(text)}”, `;
  const how = typeof logprob === "number" ? `log-probability ${number(logprob)}, probability ${number(Math.exp(logprob))}` : run.call_id === null ? "context" : "no log-probability";
  const fate = trained(run) ? `; trained in step ${run.step} with advantage ${signed(run.advantage)}` : "";
  return `Token ${at + 1} of ${all.length}: ${quoted}id ${id}, ${how}${fate}`;
}
