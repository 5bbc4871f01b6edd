// What is on board: packages that plug in, what training uses, upstreams with their state, the rooms of the proxy.
import { useData } from "./api.mjs";
import { html } from "./html.mjs";
import { Badge, Empty, Facts, Loaded, Panel, Table } from "./parts.mjs";

export const key = "b";
export const ofAll = true; // not for a key that sees its own rollouts alone

const STATE_KIND = { up: "good", down: "bad" };
const NAMED = [
  { name: "name", label: "name", cell: ({ name }) => html`<b>${name}</b>` },
  { name: "package", label: "from", cell: ({ package: from }) => from },
  { name: "version", label: "version", num: true, cell: ({ version }) => version ?? "a file of yours" },
];
const TRAINING = [{ name: "what", label: "what", cell: ({ what }) => what.replace("_", " ") }, ...NAMED];
const UPSTREAMS = [
  { name: "upstream", label: "upstream", cell: ({ upstream }) => html`<b>${upstream}</b>` },
  { name: "kind", label: "kind", cell: ({ kind }) => kind },
  { name: "server", label: "server", cell: ({ server }) => server },
  { name: "state", label: "state", cell: ({ state, problem }) => html`<${Badge} kind=${STATE_KIND[state]}>${state === "unknown" ? "not watched" : state}<//> ${problem && html`<small class="reason">${problem}</small>`}` },
];

export function View() {
  const found = useData("/plugins");
  return html`<h1 class="hidden">Plug-ins</h1><${Loaded} of=${found}>${(board) => html`<div class="grid">
    <${Panel} title="Upstreams" wide><${Upstreams} upstreams=${board.upstreams} /><//>
    <${Panel} title="Plug-ins of others"><${Others} plugins=${board.plugins} /><//>
    ${board.training.length > 0 && html`<${Panel} title="Training uses" note="As the proxy's configuration says."><${Table} label="Training uses" columns=${TRAINING} rows=${board.training} rowKey=${({ what, name }) => `${what} ${name}`} /><//>`}
    <${Panel} title="Rooms of the proxy" note=${`On board of lightning-proxy ${board.version}.`} wide><${Facts} of=${Object.fromEntries(board.rooms.map(({ name, about }) => [name, about]))} /><//>
  </div>`}<//>`;
}

function Others({ plugins }) {
  if (plugins.length === 0) return html`<${Empty}>None. Install a package that plugs in, and name it: <code>plugins: [NAME]</code> in config.yaml.<//>`;
  return html`<${Table} label="Plug-ins of others" columns=${NAMED} rows=${plugins} rowKey=${({ name }) => name} />`;
}

function Upstreams({ upstreams }) {
  if (upstreams.length === 0) return html`<${Empty}>None. <code>lightning-proxy init</code> writes a configuration with one.<//>`;
  return html`<${Table} label="Upstreams" columns=${UPSTREAMS} rows=${upstreams} rowKey=${({ upstream, server }) => `${upstream} ${server}`} />`;
}
