// The training rows of a rollout, their tokens, and the credit of its calls.
import { useData } from "./api.mjs";
import { creditOf } from "./call.mjs";
import { number, plural, signed } from "./format.mjs";
import { html, useState } from "./html.mjs";
import { Empty, Loaded, Panel, Table, to } from "./parts.mjs";
import { RolloutHead } from "./rollout.mjs";
import { TokensOf } from "./tokens.mjs";

export function Rows({ id }) {
  const rollout = useData(`/rollouts/${encodeURIComponent(id)}`);
  const rows = useData(`/rollouts/${encodeURIComponent(id)}/rows`);
  return html`<${Loaded} of=${rollout}>${(found) => html`
    <${RolloutHead} rollout=${found} rows=${rows.data} part="training row" />
    <${Loaded} of=${rows}>${(data) => html`
      <div class="grid">
        <${Panel} title="Rows of this rollout"><${RowTable} rows=${data.rows} calls=${data.calls} /><//>
        <${Panel} title="Calls and their credit" wide><${CreditTable} calls=${data.calls} credit=${creditOf(found.calls, data)} id=${id} /><//>
      </div>
      ${data.rows.length > 0 && html`<${RowTokens} id=${id} rows=${data.rows} />`}`}<//>`}<//>`;
}

function RowTable({ rows, calls }) {
  if (rows.length === 0) return html`<${Empty}>No training row: none of its calls can be trained on, or it was not taken yet. <code>lightning-proxy rollouts show ID</code> says which.<//>`;
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
