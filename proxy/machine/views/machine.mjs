// The machine: memory beside its plan, disks, tokens a second, and what waits for what.
import { useData } from "./api.mjs";
import { number, plural, share } from "./format.mjs";
import { html, useEffect, useRef, useState } from "./html.mjs";
import { Badge, Empty, Loaded, Panel, Stat, Table, link } from "./parts.mjs";

export const key = "y";
export const ofAll = true; // not for a key that sees its own rollouts alone

const LOOK_MS = 5000;
const GIB = 2 ** 30;
const gib = (bytes) => `${number(Number((bytes / GIB).toFixed(1)))} GiB`;

export function View() {
  const machine = useData("/machine");
  const steps = useData("/policy/steps", { limit: 1, brief: true });
  const rates = useRates(machine.data);
  useEffect(() => {
    const timer = setInterval(() => document.hidden || machine.reload(), LOOK_MS);
    return () => clearInterval(timer);
  }, [machine.reload]);
  const last = steps.data?.data[0]?.metrics ?? {};
  return html`<h1 class="hidden">Machine</h1>
    <${Loaded} of=${machine}>${(now) => html`<${Waiting} queue=${now.waiting} servers=${now.servers} />
      <div class="grid">
        <${Panel} title="Memory and disks" note="Of the machine that the proxy runs on." wide><${Rooms} rooms=${[...now.memory, ...now.disks]} /><//>
        <${Panel} title="The trainer" note="Its last training step."><${Trainer} last=${last} /><//>
        <${Panel} title="Memory by the plan" note="GiB on a card, as up shared the GPUs out, beside what the trainer took at its peak." wide><${Plan} plan=${now.plan} peak=${last.memory_gib} /><//>
        <${Panel} title="The policy's servers" note="By vLLM's own metrics. Tokens a second: since the look before."><${Servers} servers=${now.servers} rates=${rates} /><//>
      </div>`}<//>`;
}

// By server, the tokens a second between two looks; the counts of a server that began anew fall.
function useRates(now) {
  const before = useRef(null);
  const [rates, setRates] = useState({});
  useEffect(() => {
    const last = before.current;
    before.current = now;
    if (!now || !last || now.at <= last.at) return;
    const rate = (one, name) => {
      const was = last.servers.find(({ server }) => server === one.server)?.[name];
      return typeof was === "number" && one[name] >= was ? (one[name] - was) / (now.at - last.at) : null;
    };
    setRates(Object.fromEntries(now.servers.map((one) => [one.server, { read: rate(one, "read_tokens"), sampled: rate(one, "sampled_tokens") }])));
  }, [now]);
  return rates;
}

function Waiting({ queue, servers }) {
  const said = servers.filter(({ running }) => typeof running === "number");
  const sum = (name) => said.reduce((total, one) => total + (one[name] ?? 0), 0);
  return html`<dl class="stats">
    <${Stat} label="rollouts not ended" value=${html`<a href=${link("rollouts", { status: "running" })}>${number(queue.running)}</a>`} note="agents at work, and what nobody ends" />
    <${Stat} label="calls at vLLM" value=${said.length ? number(sum("running")) : "–"} note=${said.length ? `${number(sum("waiting"))} more wait for a place` : "no vLLM says"} />
    <${Stat} label="wait for a reward" value=${number(queue.for_reward)} note="completed rollouts" />
    <${Stat} label="groups not full" value=${number(queue.groups)} note="some of their rollouts have not ended" />
    <${Stat} label="wait for a step" value=${number(queue.complete)} note=${`rollouts; a step takes ${number(queue.per_step)}`} />
  </dl>`;
}

const FULL = 0.9; // of a disk or a memory
const ROOMS = [
  { name: "of", label: "of", cell: ({ of }) => of },
  { name: "bar", label: "", cell: ({ used, total }) => html`<meter min="0" max=${total} high=${FULL * total} value=${used} aria-label=${`${share(used, total)} used`}></meter>` },
  { name: "used", label: "used", num: true, cell: ({ used, total }) => html`<b>${gib(used)}</b> <small>${share(used, total)}</small>` },
  { name: "free", label: "free", num: true, cell: ({ used, total }) => gib(total - used) },
  { name: "total", label: "total", num: true, cell: ({ total }) => gib(total) },
];

function Rooms({ rooms }) {
  if (rooms.length === 0) return html`<${Empty}>This system does not say. <code>lightning-proxy doctor</code> looks at the machine.<//>`;
  return html`<${Table} label="Memory and disks" columns=${ROOMS} rows=${rooms} rowKey=${({ of }) => of} />`;
}

function Trainer({ last }) {
  if (Object.keys(last).length === 0) return html`<${Empty}>No training step yet. <code>lightning-proxy doctor</code> says what the first one waits for.<//>`;
  return html`<dl class="facts">
    <div><dt>computed</dt><dd><b>${number(last.computed_tokens_per_s)}</b> tokens / s</dd></div>
    <div><dt>trained on</dt><dd><b>${number(last.trained_tokens_per_s)}</b> tokens / s</dd></div>
    <div><dt>memory, peak</dt><dd>${typeof last.memory_gib === "number" ? html`<b>${number(last.memory_gib)}</b> GiB` : "–"}</dd></div>
    <div><dt>passes halved</dt><dd>${number(last.passes_halved)} <small>for want of memory</small></dd></div>
  </dl>`;
}

function Plan({ plan, peak }) {
  if (plan === null) return html`<${Empty}>There is no plan: <code>up</code> makes one on a machine with a GPU. <code>lightning-proxy plan --gpus 1x24</code> shows one for other cards.<//>`;
  const { vllm, trainer } = plan;
  const sum = (side) => Object.values(side).reduce((total, one) => total + one, 0);
  const cell = (value) => (value === undefined ? "" : number(value));
  const rows = [...new Set([...Object.keys(vllm), ...Object.keys(trainer)])].map((name) => ({ name, vllm: cell(vllm[name]), trainer: cell(trainer[name]) }));
  const all = { name: html`<b>together</b>`, vllm: html`<b>${number(sum(vllm))}</b>`, trainer: html`<b>${number(sum(trainer))}</b>` };
  const used = typeof peak === "number" ? [{ name: "taken at its peak", vllm: "", trainer: html`<b class=${peak > sum(trainer) ? "over" : ""}>${number(peak)}</b>` }] : [];
  const columns = [{ name: "name", label: "for", cell: ({ name }) => name }, ...["vllm", "trainer"].map((side) => ({ name: side, label: side === "vllm" ? "vLLM" : "trainer", num: true, cell: (row) => row[side] }))];
  return html`<${Table} label="Memory by the plan" columns=${columns} rows=${[...rows, all, ...used]} rowKey=${({ name }) => name} />`;
}

function Servers({ servers, rates }) {
  if (servers.length === 0) return html`<${Empty}>No vLLM serves the policy here. <code>lightning-proxy up</code> starts one.<//>`;
  return servers.map((one) => html`<section key=${one.server}>
    <h3>${one.server} ${one.problem && html`<${Badge} kind="bad">no numbers<//>`}</h3>
    ${one.problem ? html`<p class="why">${one.problem}</p>` : html`<dl class="facts">
      <div><dt>samples</dt><dd><b>${number(rates[one.server]?.sampled)}</b> tokens / s <small>${number(one.sampled_tokens)} since its start</small></dd></div>
      <div><dt>reads</dt><dd><b>${number(rates[one.server]?.read)}</b> tokens / s <small>${number(one.read_tokens)} since its start</small></dd></div>
      <div><dt>calls</dt><dd>${plural(one.running, "call")} running, ${number(one.waiting)} waiting</dd></div>
      <div><dt>KV cache</dt><dd>${typeof one.cache === "number" ? share(one.cache, 1) : "–"} <small>in use</small></dd></div>
    </dl>`}</section>`);
}
