// Tokens as the policy's tokenizer writes them, coloured by how unlikely each was when it was sampled; and training rows.
import { route, useData } from "./data.mjs";
import { Failure, Panel, Select, Table, html, number, plural, signed, useMemo, useState } from "./parts.mjs";

const SHOWN = 1000;
const MOVES = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 };

// The training rows of a rollout, and the tokens of one: grey is context, what was sampled has its credit.
export function Rows({ id, of: { rows, calls } }) {
  const [row, setRow] = useState(null);
  const seqs = new Map(calls.map(({ call_id, seq }) => [call_id, seq]));
  const columns = [
    { name: "row", num: true },
    { name: "calls", cell: ({ call_ids }) => call_ids.map((call) => seqs.get(call) ?? call).join(", ") },
    { name: "tokens", num: true },
    { name: "trained_tokens", label: "trained tokens", num: true },
  ];
  const options = [["", "none"], ...rows.map((one) => [one.row, `row ${one.row}: ${plural(one.tokens, "token")}`])];
  return html`<${Panel} title="Training rows" note="Underlined tokens were trained: green more likely, red less likely. Struck-out ones were left out.">
    <${Table} label="Training rows" columns=${columns} rows=${rows} rowKey=${(one) => one.row} />
    <div class="filters"><${Select} label="tokens of" options=${options} onChange=${({ target }) => setRow(target.value)} /></div>
    ${row && html`<${TokensOf} key=${row} id=${id} taken of=${{ row }} />`}<//>`;
}

// `of`: {call_id} or {row} of a rollout. `known`: what is shown until the texts are there, and without them.
// `taken`: by a step, so that an answer that is not trained was left out.
export function TokensOf({ id, of, taken, known = [] }) {
  const { data, error, reload } = useData(route`/rollouts/${id}/tokens`, of);
  const runs = data?.data ?? known;
  return runs.length > 0 ? html`<${Tokens} runs=${runs} taken=${taken} />` : html`<${Failure} error=${error} again=${reload} />`;
}

// `runs`: as GET /rollouts/{id}/tokens has them.
function Tokens({ runs, taken }) {
  const [whole, setWhole] = useState(false);
  const [at, setAt] = useState(null);
  const all = useMemo(() => runs.flatMap((run) => run.token_ids.map((id, i) => ({ id, run, text: run.texts?.[i], logprob: run.logprobs[i] }))), [runs]);
  const shown = whole ? all : all.slice(0, SHOWN);
  const onKeyDown = (event) => {
    const by = MOVES[event.key];
    if (by === undefined) return;
    event.preventDefault();
    setAt((now) => (now === null ? 0 : Math.min(shown.length - 1, Math.max(0, now + by))));
  };
  const onOver = ({ target }) => target.dataset.index !== undefined && setAt(Number(target.dataset.index));
  const token = ({ id, run, text, logprob }, i) => {
    const kind = run.call_id === null ? "context" : isTrained(run) ? { 1: "up", [-1]: "down" }[Math.sign(run.advantage)] ?? "" : taken ? "left_out" : "";
    const surprise = typeof logprob === "number" ? 1 - Math.exp(logprob) : 0;
    return html`<span data-index=${i} class=${`token ${kind} ${text === null ? "rest" : ""} ${i === at ? "at" : ""}`} style=${{ "--surprise": surprise }}>${text === undefined ? id : visible(text)}</span>${text?.endsWith("\n") && html`<i class="line"></i>`}`;
  };
  return html`<div class="tokens-of">
    <p class="muted" role="status">${at === null ? "Point at a token, or use the arrow keys: the stronger the colour, the less likely it was." : `Token ${at + 1} of ${all.length}: ${inWords(all[at])}`}</p>
    <div class="tokens" tabindex="0" role="group" aria-label=${`${all.length} tokens`} onKeyDown=${onKeyDown} onMouseOver=${onOver} onFocus=${() => setAt((now) => now ?? 0)}>${shown.map(token)}</div>
    ${all.length > SHOWN && html`<button class="more" onClick=${() => setWhole(!whole)}>${whole ? "show less" : `show all ${number(all.length)} tokens`}</button>`}
  </div>`;
}

const isTrained = (run) => typeof run.step === "number";

// A text of which each character can be seen. Null: what the token before it shows ends here.
function visible(text) {
  if (text === null) return "⋮";
  if (text === "") return "∅";
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, (one) => `\\u${one.codePointAt(0).toString(16).padStart(4, "0")}`);
}

function inWords({ id, text, logprob, run }) {
  const quoted = text === undefined ? "" : text === null ? "the rest of a character, " : `“${visible(text)}”, `;
  const how = typeof logprob === "number" ? `log-probability ${number(logprob)}, probability ${number(Math.exp(logprob))}` : run.call_id === null ? "context" : "no log-probability";
  return `${quoted}id ${id}, ${how}${isTrained(run) ? `; trained in step ${run.step} with advantage ${signed(run.advantage)}` : ""}`;
}
