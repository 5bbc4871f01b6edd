// Prompts: their versions, which one is live, and each text next to the one before it.
import { useData } from "./data.mjs";
import { Badge, Empty, Facts, Loaded, LongText, Mean, Panel, Table, Time, html, to } from "./parts.mjs";

const LIVE = html`<${Badge} kind="accent">live<//>`;

export const filled = ["/prompts", {}, ({ data }) => data.length > 0];

export function View({ more: [name, number] }) {
  const prompts = useData("/prompts", {}, ["step", "version"]);
  return html`<h1 class="hidden">Prompts</h1><${Loaded} of=${prompts}>${({ data }) => {
    if (data.length === 0) return html`<${Empty}>No prompts yet. <code>lightning-proxy prompts add NAME FILE</code> adds the agent's own text as version 1.<//>`;
    if (name === undefined) return data.map((prompt) => html`<${Prompt} key=${prompt.name} prompt=${prompt} />`);
    const versions = data.find((one) => one.name === name)?.versions ?? [];
    const version = versions.find((one) => String(one.version) === number);
    return version ? html`<${Version} name=${name} of=${version} versions=${versions} />` : html`<${Empty}>There is no such version. <a href="#/prompts">All prompts</a><//>`;
  }}<//>`;
}

function Prompt({ prompt: { name, match, versions } }) {
  const reward = (mode) => ({ name: mode, label: `${mode} reward`, num: true, title: "mean of the rollouts that kept this version", cell: ({ rewards }) => html`<${Mean} of=${rewards[mode]} />` });
  const columns = [
    { name: "version", cell: ({ version }) => html`<a class="pick" href=${to("prompts", name, version)}>version ${version}</a>` },
    { name: "status", cell: ({ live }) => live && LIVE },
    reward("train"),
    reward("eval"),
    { name: "text", cell: ({ text }) => html`<div class="words"><span>${text.slice(0, 200)}</span></div>` },
    { name: "made", num: true, cell: ({ created_at }) => html`<${Time} at=${created_at} />` },
  ];
  return html`<${Panel} title=${name} note=${`replaces the ${match.role} message of ${match.agent ?? "any agent"}`}>
      <${Table} label=${`Versions of ${name}`} columns=${columns} rows=${[...versions].reverse()} rowKey=${({ version }) => version} />
    <//>`;
}

// One version: its text next to the one that it came from.
function Version({ name, of, versions }) {
  const { version, text, live, created_at, parent, comment, rewards, metrics } = of;
  const before = versions.find((one) => one.version === (parent ?? version - 1));
  const facts = {
    made: html`<${Time} at=${created_at} />`,
    from: parent && `version ${parent}`,
    comment,
    "train reward": rewards.train && html`<${Mean} of=${rewards.train} />`,
    "eval reward": rewards.eval && html`<${Mean} of=${rewards.eval} />`,
    ...metrics,
  };
  return html`<div class="title-line"><h2>${name} version ${version}</h2> ${live && LIVE} <a href="#/prompts">all prompts</a></div>
    <div class="two">
      ${before && html`<${Panel} title=${`Version ${before.version}`}><${Marked} text=${before.text} other=${text} mark="del" /><//>`}
      <${Panel} title=${`Version ${version}`}>${before ? html`<${Marked} text=${text} other=${before.text} mark="ins" />` : html`<${LongText}>${text}<//>`}<//>
    </div>
    <${Panel} title="About this version"><${Facts} of=${facts} /><//>`;
}

// A text: lines that it shares with the other at the beginning and at the end are plain, the rest is marked.
function Marked({ text, other, mark }) {
  const [own, others] = [text.split("\n"), other.split("\n")];
  const differs = own.findIndex((line, i) => line !== others[i]);
  const first = differs === -1 ? own.length : differs;
  const most = Math.min(own.length, others.length) - first;
  let same = 0;
  while (same < most && own.at(-1 - same) === others.at(-1 - same)) same += 1;
  const part = (from, to) => own.slice(from, to).map((line) => `${line}\n`).join("");
  const last = own.length - same;
  return html`<pre class="said" dir="auto" tabindex="0">${part(0, first)}${first < last && html`<${mark}>${part(first, last)}<//>`}${part(last)}</pre>`;
}
