// Prompts: their versions, which one is live, and each text beside the one before it.
import { route, useData } from "./data.mjs";
import { Badge, Empty, Facts, Loaded, LongText, Mean, Panel, Reward, RolloutLink, Select, Start, Table, TaskLink, Time, html, to, useEffect, useMemo } from "./parts.mjs";
import { RolloutStatus } from "./rollouts.mjs";

const EVERY_MS = 15_000; // their rewards are summed up over all rollouts
const MOST_LINES = 600; // that are compared one by one
const MOST_CHARACTERS = 30_000;

export const key = "p";
export const filled = ["/prompts", {}, ({ data }) => data.length > 0];

export function View({ more, params }) {
  const prompts = useData("/prompts", {}, ["step", "version"]);
  useEffect(() => {
    const timer = setInterval(prompts.reload, EVERY_MS);
    return () => clearInterval(timer);
  }, [prompts.reload]);
  const [name, version] = more;
  return html`<${Loaded} of=${prompts}>${({ data }) => {
    if (name === undefined) return html`<${List} prompts=${data} />`;
    const prompt = data.find((one) => one.name === name);
    const chosen = prompt?.versions.find((one) => String(one.version) === version);
    if (!chosen) return html`<${Empty}>There is no such version. <a href="#/prompts">All prompts</a><//>`;
    return html`<${One} prompt=${prompt} version=${chosen} beside=${params.beside} />`;
  }}<//>`;
}

function List({ prompts }) {
  return html`<h1 class="hidden">Prompts</h1>
    ${prompts.length === 0 && html`<${Empty}>No prompts yet. <code>lightning-proxy prompts add NAME FILE</code> adds the agent's own text as version 1.<//>`}
    ${prompts.map((prompt) => html`<${Prompt} key=${prompt.name} prompt=${prompt} />`)}`;
}

function Prompt({ prompt }) {
  const { name, match, versions } = prompt;
  const columns = [
    { name: "version", label: "version", cell: ({ version }) => html`<a class="pick" href=${to("prompts", name, version)}>version ${version}</a>` },
    { name: "status", label: "status", cell: ({ live }) => live && LIVE },
    ...["train", "eval"].map((mode) => ({ name: mode, label: `${mode} reward`, num: true, title: "mean of the rollouts that kept this version", cell: ({ rewards }) => html`<${Mean} of=${rewards[mode]} />` })),
    { name: "text", label: "text", cell: ({ text }) => html`<div class="words"><span>${text.slice(0, 200)}</span></div>` },
    { name: "made", label: "made", num: true, cell: ({ created_at }) => html`<${Time} at=${created_at} />` },
  ];
  return html`<${Panel} title=${name} note=${`takes the place of the ${match.role} message of ${match.agent ?? "any agent"}`} wide>
      <${Table} label=${`Versions of ${name}`} columns=${columns} rows=${[...versions].reverse()} rowKey=${({ version }) => version} />
    <//>`;
}

const LIVE = html`<${Badge} kind="accent">live<//>`;

// One version: its text beside another's, and the rollouts that kept it.
function One({ prompt, version, beside }) {
  const { name, versions } = prompt;
  const { rewards } = version;
  const other = versions.find((one) => String(one.version) === beside) ?? versions.find((one) => one.version === (version.parent ?? version.version - 1));
  const others = versions.filter((one) => one !== version);
  const onChange = ({ target }) => (location.hash = `${to("prompts", name, version.version)}?${new URLSearchParams({ beside: target.value })}`);
  return html`<div class="title-line"><h1>${name} version ${version.version}</h1> ${version.live && LIVE} <a href="#/prompts">all prompts</a></div>
    ${others.length > 0 && html`<div class="filters"><${Select} label="beside" options=${others.map((one) => [one.version, `version ${one.version}${one.live ? ", live" : ""}`])} value=${other?.version} onChange=${onChange} /></div>`}
    <${Texts} before=${other} after=${version} />
    <div class="grid">
      <${Panel} title="About this version"><${Facts} of=${{ made: html`<${Time} at=${version.created_at} />`, from: version.parent && `version ${version.parent}`, comment: version.comment, "train reward": rewards.train && html`<${Mean} of=${rewards.train} />`, "eval reward": rewards.eval && html`<${Mean} of=${rewards.eval} />`, ...version.metrics }} /><//>
      <${Kept} name=${name} version=${version.version} />
    </div>`;
}

const KEPT = [
  { name: "rollout", label: "rollout", cell: ({ rollout_id }) => html`<${RolloutLink} id=${rollout_id} />` },
  { name: "reward", label: "reward", num: true, cell: ({ reward }) => html`<${Reward} value=${reward} />` },
  { name: "status", label: "status", cell: ({ status }) => html`<${RolloutStatus} status=${status} />` },
  { name: "task", label: "task", cell: ({ task_id }) => html`<${TaskLink} id=${task_id} />` },
  { name: "mode", label: "mode", cell: ({ mode }) => mode },
  { name: "opened", label: "opened", num: true, cell: ({ created_at }) => html`<${Time} at=${created_at} />` },
];

function Kept({ name, version }) {
  const kept = useData(route`/prompts/${name}/versions/${version}/rollouts`);
  return html`<${Panel} title="Rollouts that kept it" note="The newest 100." wide><${Loaded} of=${kept}>${({ data }) => (data.length === 0
    ? html`<${Empty}>None yet. <${Start} /><//>`
    : html`<${Table} label="Rollouts" columns=${KEPT} rows=${data} rowKey=${({ rollout_id }) => rollout_id} />`)}<//><//>`;
}

function Texts({ before, after }) {
  const marked = useMemo(() => before && compared(before.text, after.text), [before?.text, after.text]);
  const text = (one, side, title) => html`<${Panel} title=${title}>${marked
    ? html`<pre class="said" dir="auto" tabindex="0" aria-label=${title}>${marked.filter(([mark]) => mark !== side).map(([mark, line]) => (mark ? html`<${mark}>${`${line}\n`}<//>` : `${line}\n`))}</pre>`
    : html`<${LongText}>${one.text}<//>`}<//>`;
  if (!before) return text(after, "del", `Version ${after.version}`);
  return html`<div class="beside">${text(before, "ins", `Version ${before.version}`)}${text(after, "del", `Version ${after.version}`)}</div>`;
}

// Lines of both texts, [mark, line] in order: `del` for one of the first alone, `ins` for one of the second. Null: too long.
function compared(first, second) {
  const [a, b] = [first.split("\n"), second.split("\n")];
  if (Math.max(a.length, b.length) > MOST_LINES || first.length + second.length > MOST_CHARACTERS) return null;
  const common = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1)); // lines that what is left shares
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) common[i][j] = a[i] === b[j] ? common[i + 1][j + 1] + 1 : Math.max(common[i + 1][j], common[i][j + 1]);
  }
  const lines = [];
  for (let [i, j] = [0, 0]; i < a.length || j < b.length; ) {
    if (i < a.length && j < b.length && a[i] === b[j]) {
      lines.push([null, a[i++]]);
      j++;
    } else if (j === b.length || (i < a.length && common[i + 1][j] >= common[i][j + 1])) lines.push(["del", a[i++]]);
    else lines.push(["ins", b[j++]]);
  }
  return lines;
}
