// What can be done with the rollouts that were chosen in a list: reward, note, discard, train again, download.
import { post } from "./api.mjs";
import { save, wholeRollouts } from "./copies.mjs";
import { plural } from "./format.mjs";
import { html, useState } from "./html.mjs";
import { Failure } from "./parts.mjs";

const to = (row, part) => `/rollouts/${encodeURIComponent(row.rollout_id)}/${part}`;
const NUMBER = /^\s*[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*$/i;

// One after the other; the first that is refused stops the rest, and is told.
async function each(rows, work) {
  for (const row of rows) await work(row);
}

export function Chosen({ rows, onClear }) {
  const [state, setState] = useState({ busy: false, error: null, done: "" });
  const [value, setValue] = useState("");
  const run = (work, done) => async () => {
    setState({ busy: true, error: null, done: "" });
    await work().then(() => setState({ busy: false, error: null, done }), (error) => setState({ busy: false, error, done: "" }));
  };
  const running = rows.filter(({ status }) => status === "running");
  const rewarded = rows.filter(({ own_reward, mode }) => own_reward !== null && mode === "train");
  const reward = () => post("/reward", rows.map(({ rollout_id }) => ({ rollout_id, reward: Number(value), source: "page" })));
  const note = () => each(rows, (row) => post(to(row, "events"), { kind: "note", value }));
  const discard = () => each(running, (row) => post(to(row, "end"), { status: "discarded", reason: value || "discarded on the page" }));
  const again = () => post("/reward", rewarded.map(({ rollout_id, own_reward }) => ({ rollout_id, reward: own_reward, retrain: true, source: "page" })));
  const download = (kind) => async () => save(await wholeRollouts(rows.map(({ rollout_id }) => rollout_id)), kind, "rollouts");
  const button = (label, isPossible, work, done) => html`<button disabled=${state.busy || !isPossible} onClick=${run(work, done)}>${label}</button>`;
  return html`<div class="chosen-rows" role="group" aria-label="Chosen rollouts">
    <b>${plural(rows.length, "rollout")} chosen</b>
    <label>number or note<input value=${value} onInput=${(event) => setValue(event.currentTarget.value)} maxlength="2000" /></label>
    ${button("reward", NUMBER.test(value), reward, "rewarded")}
    ${button("note", value !== "", note, "noted")}
    ${button(`discard ${running.length || ""}`, running.length > 0, discard, "discarded")}
    ${button(`train again ${rewarded.length || ""}`, rewarded.length > 0, again, "offered to the trainer again")}
    ${button("JSON", true, download("json"), "saved")} ${button("JSONL", true, download("jsonl"), "saved")}
    <button onClick=${onClear}>choose none</button>
    <span role="status">${state.busy ? "working…" : state.done}</span><${Failure} error=${state.error} />
  </div>`;
}
