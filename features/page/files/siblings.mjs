// Two rollouts of a task side by side: what the one did that the other did not.
import { useData } from "./api.mjs";
import { html } from "./html.mjs";
import { Empty, Loaded, Reward, RolloutLink, to } from "./parts.mjs";
import { RolloutHead, Timeline, useRollout } from "./rollout.mjs";

export function SideBySide({ id, params }) {
  const { rollout, rows } = useRollout(id);
  const task = rollout.data?.task_id ?? null;
  const same = useData(task === null ? null : "/rollouts", { task_id: task, limit: 100 });
  const others = siblingsOf(id, rows, same.data?.data);
  const other = params.with ?? bestOf(others, rollout.data?.reward)?.rollout_id;
  return html`<${Loaded} of=${rollout}>${(found) => html`
    <${RolloutHead} rollout=${found} rows=${rows} part="side by side" />
    ${others.length === 0 && html`<${Empty}>No other rollout of this task yet. <code>lightning-proxy run --tasks FILE -- COMMAND</code> makes eight of each task.<//>`}
    ${other && html`<div class="beside">
      <section><h2><${RolloutLink} id=${id} /> reward <${Reward} value=${found.reward} /></h2><${Timeline} rollout=${found} rows=${rows} /></section>
      <${Other} key=${other} id=${id} other=${other} others=${others} />
    </div>`}`}<//>`;
}

function Other({ id, other, others }) {
  const { rollout, rows } = useRollout(other);
  const onChange = (event) => {
    location.hash = `${to("rollouts", id, "beside")}?${new URLSearchParams({ with: event.currentTarget.value })}`;
  };
  return html`<section>
    <h2><label><span class="hidden">sibling</span><select onChange=${onChange}>
      ${others.map((one) => html`<option value=${one.rollout_id} selected=${one.rollout_id === other}>${one.rollout_id} (${one.reward ?? "no reward"})</option>`)}
    </select></label> <a href=${to("rollouts", other)}>open</a></h2>
    <${Loaded} of=${rollout}>${(found) => html`<${Timeline} rollout=${found} rows=${rows} />`}<//>
  </section>`;
}

// Those it was compared with, and else the newest of its task.
function siblingsOf(id, rows, same = []) {
  const group = rows?.group?.length > 1 ? rows.group : same;
  return group.filter(({ rollout_id }) => rollout_id !== id);
}

// The sibling whose reward is farthest away.
function bestOf(others, reward) {
  const distance = (one) => Math.abs((one.reward ?? 0) - (reward ?? 0));
  return [...others].sort((a, b) => distance(b) - distance(a))[0];
}
