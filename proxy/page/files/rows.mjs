// The training rows of a rollout's group as the prefix tree that was computed: what siblings share is computed once.
import { useData } from "./api.mjs";
import { creditOf } from "./call.mjs";
import { number, plural, share, signed } from "./format.mjs";
import { html, useMemo, useState } from "./html.mjs";
import { Empty, Loaded, Panel, RolloutLink, Table, to } from "./parts.mjs";
import { RolloutHead } from "./rollout.mjs";
import { TokensOf } from "./tokens.mjs";

const LANE = 22; // pixels of a row's height

export function Rows({ id }) {
  const rollout = useData(`/rollouts/${encodeURIComponent(id)}`);
  const rows = useData(`/rollouts/${encodeURIComponent(id)}/rows`);
  return html`<${Loaded} of=${rollout}>${(found) => html`
    <${RolloutHead} rollout=${found} rows=${rows.data} part="training row" />
    <${Loaded} of=${rows}>${(data) => html`
      <${Panel} title="The group's prefix tree" note="Left to right: tokens. Each lane is a training row. A run that several rows share is computed once." wide><${Tree} tree=${data.tree} id=${id} /><//>
      <div class="grid">
        <${Panel} title="Rows of this rollout"><${RowTable} rows=${data.rows} calls=${data.calls} /><//>
        <${Panel} title="Calls and their credit" wide><${CreditTable} calls=${data.calls} credit=${creditOf(found.calls, data)} id=${id} /><//>
      </div>
      ${data.rows.length > 0 && html`<${RowTokens} id=${id} rows=${data.rows} />`}`}<//>`}<//>`;
}

// Each row's lane, and for each run the lanes of the rows that pass through it. `tree` is in preorder.
function lanesOf(tree) {
  const name = ([rollout, row]) => `${rollout} ${row}`;
  const children = tree.map(() => []);
  tree.forEach(({ parent }, i) => parent !== null && children[parent].push(i));
  const lanes = new Map();
  tree.forEach((run, i) => {
    const goingOn = new Set(children[i].flatMap((child) => tree[child].rows.map(name)));
    for (const row of run.rows.map(name)) {
      if (!goingOn.has(row) && !lanes.has(row)) lanes.set(row, lanes.size);
    }
  });
  return { lanes, spans: tree.map(({ rows }) => rows.map((row) => lanes.get(name(row)))) };
}

function Tree({ tree, id }) {
  const [at, setAt] = useState(null);
  const { lanes, spans } = useMemo(() => lanesOf(tree), [tree]);
  if (tree.length === 0) return html`<${Empty}>No training row: none of its calls can be trained on, or it was not taken yet. <code>lightning-proxy rollouts show ID</code> says which.<//>`;
  const longest = Math.max(...tree.map(({ depth, tokens }) => depth + tokens));
  const unique = tree.reduce((sum, { tokens }) => sum + tokens, 0);
  const all = tree.reduce((sum, { tokens, rows }) => sum + tokens * rows.length, 0);
  const run = tree[at];
  return html`<p>${plural(lanes.size, "row")} of ${number(all)} tokens; ${number(unique)} are computed (${share(unique, all)}).
      <span class="legend"><i class="answer"></i> answer <i class="context"></i> context <i class="left_out"></i> left out <i class="mine"></i> this rollout</span></p>
    <div class="tree" style=${{ height: `${lanes.size * LANE + 4}px` }}>
      ${tree.map((one, i) => html`<${Run} key=${i} run=${one} lanes=${spans[i]} longest=${longest} mine=${one.rows.some(([rollout]) => rollout === id)} chosen=${i === at} onChoose=${() => setAt(i)} />`)}
    </div>
    <div class="axis"><span>token 0</span><span>${number(longest)}</span></div>
    <div role="status">${run ? html`<${ChosenRun} run=${run} />` : html`<p class="muted">Choose a run to see whose it is.</p>`}</div>`;
}

function Run({ run, lanes, longest, mine, chosen, onChoose }) {
  const [first, last] = [Math.min(...lanes), Math.max(...lanes)];
  const style = {
    left: `${(100 * run.depth) / longest}%`,
    width: `${(100 * run.tokens) / longest}%`,
    top: `${first * LANE}px`,
    height: `${(last - first + 1) * LANE - 2}px`,
  };
  const label = `${plural(run.tokens, "token")} from ${run.depth}, ${run.trained} trained, ${plural(run.rows.length, "row")}`;
  return html`<button class=${`run ${mine ? "mine" : ""} ${chosen ? "chosen" : ""}`} style=${style} title=${label} aria-label=${label} onClick=${onChoose} onFocus=${onChoose}>
    ${run.parts.map(([kind, tokens]) => html`<i class=${kind} style=${{ flex: tokens }}></i>`)}</button>`;
}

function ChosenRun({ run }) {
  const rollouts = [...new Set(run.rows.map(([rollout]) => rollout))];
  return html`<p>${plural(run.tokens, "token")} from token ${number(run.depth)}, ${number(run.trained)} trained,
    in ${plural(run.rows.length, "row")} of ${rollouts.map((rollout) => html`<${RolloutLink} id=${rollout} /> `)}</p>`;
}

function RowTable({ rows, calls }) {
  if (rows.length === 0) return html`<${Empty}>It has no training row.<//>`;
  const seqs = new Map(calls.map(({ call_id, seq }) => [call_id, seq]));
  const columns = [
    { name: "row", label: "row", num: true, cell: ({ row }) => row },
    { name: "calls", label: "calls", cell: ({ call_ids }) => call_ids.map((call) => seqs.get(call) ?? call).join(", ") },
    { name: "tokens", label: "tokens", num: true, cell: ({ tokens }) => number(tokens) },
    { name: "trained", label: "trained tokens", num: true, cell: (row) => number(row.trained_tokens) },
  ];
  return html`<${Table} label="Training rows" columns=${columns} rows=${rows} rowKey=${({ row }) => row} />`;
}

// The tokens of a row: grey is context; what was sampled has its log-probability and advantage, or was left out.
function RowTokens({ id, rows }) {
  const [row, setRow] = useState(rows[0].row);
  const options = rows.map((one) => html`<option value=${one.row} selected=${one.row === row}>row ${one.row}: ${plural(one.tokens, "token")}</option>`);
  return html`<${Panel} title="Tokens" note="Underlined tokens were trained: green more likely, red less likely. Struck-out ones were left out." wide>
    ${rows.length > 1 && html`<label>row <select onChange=${(event) => setRow(Number(event.currentTarget.value))}>${options}</select></label>`}
    <${TokensOf} key=${row} id=${id} taken of=${{ row }} /><//>`;
}

function CreditTable({ calls, credit, id }) {
  if (!calls.some(({ step }) => typeof step === "number")) return html`<${Empty}>It has no credit yet: no step took it. <code>lightning-proxy doctor</code> says what the next step waits for.<//>`;
  const columns = [
    { name: "call", label: "call", cell: ({ call_id, seq }) => html`<span class=${`box ${credit.get(call_id)?.box}`}></span> <a class="pick" href=${to("rollouts", id)}>${seq}</a>` },
    { name: "agent", label: "agent", cell: ({ agent }) => agent },
    { name: "return", label: "return", num: true, cell: (call) => number(call.return) },
    { name: "advantage", label: "advantage", num: true, cell: ({ advantage }) => signed(advantage) },
    { name: "step", label: "step", num: true, cell: ({ step }) => step },
    { name: "row", label: "row", num: true, cell: ({ row }) => row },
    { name: "placed", label: "why there", cell: ({ call_id }) => credit.get(call_id)?.why },
  ];
  return html`<${Table} label="Calls and their credit" columns=${columns} rows=${calls} rowKey=${({ call_id }) => call_id} />`;
}
