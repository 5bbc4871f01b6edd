// A person's rewards, named `human`: a queue of rollouts, rated with + and -, numbers and comments by keyboard; undo.
import { post, remove, route, useData } from "./data.mjs";
import { Empty, Failure, Loaded, html, isTyping, useEffect, useRef, useState } from "./parts.mjs";
import { Rollout } from "./rollout.mjs";

const PERSON = "lightning-proxy-person"; // who rates in this browser
const KEYS = { "+": 1, "=": 1, "-": -1 };
const given = []; // what may be taken back, newest last

export const filled = ["/rollouts", { limit: 1 }, ({ data }) => data.length > 0];

export function View({ params }) {
  const [person, setPerson] = useState(localStorage.getItem(PERSON) ?? "");
  const onPerson = ({ target }) => {
    localStorage.setItem(PERSON, target.value.trim());
    setPerson(target.value.trim());
  };
  const one = params.id && { data: { data: [{ rollout_id: params.id }] } };
  const queue = useData(one || !person ? null : "/people/queue", { person });
  return html`<h1 class="hidden">Rate</h1><div class="filters">
      <label>your name<input name="person" value=${person} maxlength="200" onChange=${onPerson} onKeyDown=${({ key, target }) => key === "Enter" && target.blur()} /></label>
    </div>
    ${!person ? html`<${Empty}>Enter your name: each person's rewards are kept apart.<//>`
      : html`<${Loaded} of=${one || queue}>${({ data }) => html`<${Queue} key=${`${params.id} ${person} ${data[0]?.rollout_id}`} rollouts=${data} person=${person} onMore=${queue.reload} />`}<//>`}`;
}

// A rollout without what others gave it, until this person has rated it: these labels check the judge.
const unjudged = (person) => (rollout) => {
  const own = rollout.rewards.filter(({ name, source }) => name === "human" && source === person);
  if (own.some(({ call_id }) => call_id === null)) return null;
  return { ...rollout, reward: null, rewards: own, calls: rollout.calls.map((call) => ({ ...call, reward: null })) };
};

function Queue({ rollouts, person, onMore }) {
  const [at, setAt] = useState(0);
  const [call, setCall] = useState(null); // {id, seq} of the call in focus; null: the rollout is rated
  const [error, setError] = useState(null);
  const [undoable, setUndoable] = useState(given.length);
  const form = useRef(null);
  const busy = useRef(false);
  const id = rollouts[at]?.rollout_id;
  const go = (to) => {
    setAt(to);
    setCall(null);
    scrollTo(0, 0);
  };
  const onRate = (reward) => {
    if (busy.current) return; // a quick second key is meant for the next one
    busy.current = true;
    const body = { rollout_id: id, call_id: call?.id ?? null, reward, name: "human", source: person, comment: form.current.comment.value || null, final: false };
    post("/reward", body).then(({ reward_id }) => {
      setUndoable(given.push({ id, reward_id, at }));
      form.current?.reset();
      setError(null);
      if (call === null) go(at + 1);
    }, setError).finally(() => (busy.current = false));
  };
  const onUndo = () => {
    const last = given.pop();
    if (last === undefined) return;
    remove(route`/rollouts/${last.id}/rewards/${last.reward_id}`).then(() => {
      setError(null);
      if (rollouts[last.at]?.rollout_id === last.id) go(last.at);
    }, (refused) => {
      if (refused.status !== 404) given.push(last); // else it is gone already
      setError(refused);
    }).then(() => setUndoable(given.length));
  };
  const acts = { z: onUndo, c: () => form.current.comment.focus(), n: () => form.current.number.focus(), s: () => go(at + 1) };
  useEffect(() => {
    const onKey = (event) => {
      const { key, target } = event;
      if (event.ctrlKey || event.metaKey || event.altKey || isTyping(target) || (id === undefined && key !== "z")) return;
      if (key in KEYS) onRate(KEYS[key]);
      else if (key in acts) acts[key]();
      else return;
      event.preventDefault();
    };
    const onFocus = ({ target }) => {
      const focused = target.closest(".call[data-call]");
      if (focused) setCall({ id: focused.dataset.call, seq: focused.id.replace("call-", "") });
      else if (!form.current?.contains(target)) setCall(null);
    };
    addEventListener("keydown", onKey);
    addEventListener("focusin", onFocus);
    return () => {
      removeEventListener("keydown", onKey);
      removeEventListener("focusin", onFocus);
    };
  });
  const onSubmit = (event) => {
    event.preventDefault();
    if (form.current.number.value !== "") onRate(Number(form.current.number.value));
  };
  const undo = undoable > 0 && html`<button type="button" onClick=${onUndo}>undo (z)</button>`;
  if (id === undefined) return html`<${Empty}>Nothing is left to rate. ${undo} <button onClick=${onMore}>look again</button> <a href="#/rollouts">all rollouts</a><//><${Failure} error=${error} />`;
  return html`<form class="panel filters rate" ref=${form} onSubmit=${onSubmit} aria-label="Rate">
      <b role="status">${call ? `call ${call.seq}` : "the rollout"}</b>
      ${call && html`<button type="button" onClick=${() => setCall(null)}>the rollout instead</button>`}
      <button type="button" onClick=${() => onRate(1)}>+ good</button>
      <button type="button" onClick=${() => onRate(-1)}>− bad</button>
      <label>number (n)<input name="number" type="number" step="any" size="6" /></label><button>give</button>
      <label>comment (c)<input name="comment" maxlength="10000" /></label>
      <button type="button" onClick=${() => go(at + 1)}>skip (s)</button> ${undo}
      <small>j and k choose a call</small>
    </form>
    <${Failure} error=${error} /><${Rollout} key=${id} id=${id} blind=${unjudged(person)} />`;
}
