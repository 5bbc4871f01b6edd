// The tokens of an answer: ids, coloured by how unlikely each was when it was sampled.
import { number } from "./format.mjs";
import { html, useState } from "./html.mjs";

const SHOWN = 1000;
const MOVES = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 };

export function Tokens({ ids, logprobs }) {
  const [whole, setWhole] = useState(false);
  const [at, setAt] = useState(null);
  const shown = whole ? ids : ids.slice(0, SHOWN);
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
  return html`<div class="tokens-of">
    <p class="muted" role="status">${at === null ? "Point at a token, or use the arrow keys: the stronger the colour, the less likely it was." : tokenLine(ids, logprobs, at)}</p>
    <div class="tokens" tabindex="0" role="group" aria-label=${`${ids.length} tokens`} onKeyDown=${onKeyDown} onMouseOver=${onOver} onFocus=${() => setAt((now) => now ?? 0)}>
      ${shown.map((id, i) => html`<span data-index=${i} class=${i === at ? "token at" : "token"} style=${{ "--surprise": surprise(logprobs[i]) }}>${id}</span>`)}
    </div>
    ${ids.length > SHOWN && html`<button class="more" onClick=${() => setWhole(!whole)}>${whole ? "show less" : `show all ${number(ids.length)} tokens`}</button>`}
  </div>`;
}

const surprise = (logprob) => (typeof logprob === "number" ? 1 - Math.exp(logprob) : 0);

function tokenLine(ids, logprobs, at) {
  const logprob = logprobs[at];
  const how = typeof logprob === "number" ? `log-probability ${number(logprob)}, probability ${number(Math.exp(logprob))}` : "no log-probability";
  return `Token ${at + 1} of ${ids.length}: id ${ids[at]}, ${how}`;
}
