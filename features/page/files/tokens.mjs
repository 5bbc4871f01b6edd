// An answer's tokens as the policy's tokenizer writes them, coloured by how unlikely each was when it was sampled.
import { route, useData } from "./data.mjs";
import { html, number, plural, signed, useMemo, useState } from "./parts.mjs";

const SHOWN = 1000;
const MOVES = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 };

// `isOut`: a step left the answer out. Ids are shown until the texts are there, and without them.
export function Tokens({ id, call, isOut }) {
  const [whole, setWhole] = useState(false);
  const [at, setAt] = useState(null);
  const { data } = useData(route`/rollouts/${id}/tokens`, { call_id: call.call_id });
  const run = data?.data[0] ?? { token_ids: call.response_token_ids, logprobs: call.logprobs };
  const all = useMemo(() => run.token_ids.map((token, i) => ({ id: token, text: run.texts?.[i], logprob: run.logprobs[i] })), [data]);
  const isTrained = typeof run.step === "number";
  const kind = isTrained ? { 1: "up", [-1]: "down" }[Math.sign(run.advantage)] ?? "" : isOut ? "left_out" : "";
  const shown = whole ? all : all.slice(0, SHOWN);
  const onKeyDown = (event) => {
    const by = MOVES[event.key];
    if (by === undefined) return;
    event.preventDefault();
    setAt((now) => (now === null ? 0 : Math.min(shown.length - 1, Math.max(0, now + by))));
  };
  const onOver = ({ target }) => target.dataset.index !== undefined && setAt(Number(target.dataset.index));
  const draw = ({ id: token, text, logprob }, i) => html`<span data-index=${i} class=${`token ${kind} ${text === null ? "rest" : ""} ${i === at ? "at" : ""}`} style=${{ "--surprise": typeof logprob === "number" ? 1 - Math.exp(logprob) : 0 }}>${text === undefined ? token : visible(text)}</span>${text?.endsWith("\n") && html`<i class="line"></i>`}`;
  return html`<div class="tokens-of">
    <p class="muted" role="status">${at === null ? "Point at a token, or use the arrow keys: the stronger the colour, the less likely it was." : `Token ${at + 1} of ${all.length}: ${inWords(all[at])}`}
      ${isTrained && ` Trained in step ${run.step} with advantage ${signed(run.advantage)}.`}</p>
    <div class="tokens" tabindex="0" role="group" aria-label=${plural(all.length, "token")} onKeyDown=${onKeyDown} onMouseOver=${onOver} onFocus=${() => setAt((now) => now ?? 0)}>${shown.map(draw)}</div>
    ${all.length > SHOWN && html`<button class="more" onClick=${() => setWhole(!whole)}>${whole ? "show less" : `show all ${number(all.length)} tokens`}</button>`}
  </div>`;
}

// A text of which each character can be seen. Null: its character goes on in the next token.
function visible(text) {
  if (text === null) return "⋮";
  if (text === "") return "∅";
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, (one) => `\\u${one.codePointAt(0).toString(16).padStart(4, "0")}`);
}

function inWords({ id, text, logprob }) {
  const quoted = text === undefined ? "" : text === null ? "a part of a character, " : `“${visible(text)}”, `;
  const how = typeof logprob === "number" ? `log-probability ${number(logprob)}, probability ${number(Math.exp(logprob))}` : "no log-probability";
  return `${quoted}id ${id}, ${how}.`;
}
