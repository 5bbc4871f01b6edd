// A rollout's contexts as lanes, its calls as boxes with their credit's colour; on a phone a list.
import { signed } from "./format.mjs";
import { html, useMemo } from "./html.mjs";
import { Panel } from "./parts.mjs";

const SAME = ["continues", "edits", "retries"]; // edges that stay in a lane
const LANES = 12; // at most; contexts beyond are drawn in the last one

export function Contexts({ calls, credit }) {
  const rows = useMemo(() => lanes(calls), [calls]);
  const seqs = new Map(calls.map(({ call_id, seq }) => [call_id, seq]));
  const isPlain = ({ contexts }, i) => !contexts || i === 0 || (contexts.length === 1 && contexts[0].edge === "continues");
  if (calls.every(isPlain)) return calls.length > 0 && html`<p class="why">One context: each call continues the one before. Sub-agents, retries and summaries would be lanes here.</p>`;
  return html`<${Panel} wide title="Contexts" note="A lane is a context, a box is a call: green was pulled up in training, red pushed down, grey left out or rejected.">
    <ol class="lanes">${rows.map(({ call, lane, open }) => {
      const { advantage, box } = credit.get(call.call_id);
      const edges = call.contexts.map(({ edge, call_id }) => `${edge} ${seqs.get(call_id) ?? "?"}`).join(", ") || "new";
      return html`<li key=${call.call_id}>
        ${Array.from({ length: lane }, (_, i) => html`<span class=${open[i] ? "lane open" : "lane"}></span>`)}
        <button class="plain" onClick=${() => document.querySelector(`[data-call="${CSS.escape(call.call_id)}"]`)?.scrollIntoView()}>
          <span class=${`box ${box}`}></span> ${call.seq} ${call.agent} <small>${edges}${call.rejected && ", rejected"}${typeof advantage === "number" && `, advantage ${signed(advantage)}`}</small>
        </button></li>`;
    })}</ol><//>`;
}

// Each call with its lane, and which lanes before it have a context that goes on later.
function lanes(calls) {
  const last = new Map(calls.map(({ call_id }, i) => [call_id, i]));
  for (const [i, call] of [...calls.entries()].reverse()) {
    for (const { edge, call_id } of call.contexts ?? []) {
      if (edge !== "compacts" && last.has(call_id)) last.set(call_id, Math.max(last.get(call_id), i));
    }
  }
  const of = new Map(), newest = [];
  const isOpen = (lane, i) => newest[lane] !== undefined && last.get(newest[lane]) >= i;
  return calls.map((call, i) => {
    const kept = (call.contexts ?? []).filter(({ edge, call_id }) => SAME.includes(edge) && newest[of.get(call_id)] === call_id);
    const free = Array.from({ length: LANES - 1 }, (_, lane) => lane).find((lane) => !isOpen(lane, i)) ?? LANES - 1;
    const lane = kept.length > 0 ? of.get(kept[0].call_id) : free;
    of.set(call.call_id, lane);
    newest[lane] = call.call_id;
    return { call, lane, open: Array.from({ length: lane }, (_, before) => isOpen(before, i)) };
  });
}
