// The test of a version before it goes live: each metric's numbers, as they grow or as they were decided by.
import { number } from "./format.mjs";
import { html } from "./html.mjs";
import { Badge, Panel } from "./parts.mjs";

const VERDICT_KIND = { safe: "good", worse: "bad" };

const signed = (value) => (typeof value === "number" ? `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(2)}` : "–");

// The test that is under way, of all versions.
export const underWay = (versions) => versions.find(({ promotion }) => promotion?.status === "testing")?.promotion;

export function Test({ test }) {
  const { evidence } = test;
  const unweighed = !evidence.metrics;
  return html`<${Panel} title=${`Version ${test.version} ${test.status === "testing" ? "is" : "was"} tested against ${test.against}`} wide>
    <p>${unweighed ? "Not weighed yet." : html`${number(evidence.rollouts)} of at most ${number(evidence.max_rollouts)} rollouts, ${number(evidence.groups)} groups compared; ${number(evidence.candidate.failed)} of the candidate's and ${number(evidence.live.failed)} of the live version's failed.`}</p>
    ${evidence.waits && html`<p>It may go live, but ${evidence.waits}.</p>`}
    ${!unweighed && html`<${Metrics} evidence=${evidence} />`}<//>`;
}

function Metrics({ evidence }) {
  const rows = Object.entries(evidence.metrics);
  const needed = 1 / evidence.level;
  return html`<div class="table" tabindex="0" role="region" aria-label="Evidence"><table>
    <thead><tr><th scope="col">metric</th><th scope="col" class="num">pairs</th><th scope="col" class="num">live</th><th scope="col" class="num">candidate</th><th scope="col" class="num">difference</th><th scope="col" class="num">may be</th><th scope="col" class="num">drop shown</th><th scope="col" class="num">drop excluded</th><th scope="col">so far</th></tr></thead>
    <tbody>${rows.map(([name, one]) => html`<tr key=${name}>
      <td class="head">${name} <small>margin ${number(one.margin)}</small></td><td class="num" data-label="pairs">${number(one.pairs)}</td>
      <td class="num" data-label="live">${number(one.live)}</td><td class="num" data-label="candidate">${number(one.candidate)}</td><td class="num" data-label="difference">${signed(one.difference)}</td>
      <td class="num" data-label="may be">${one.interval && `${signed(one.interval[0])} to ${signed(one.interval[1])}`}</td>
      <td class="num" data-label="drop shown">${number(one.e_drop)} <small>of ${number(needed * rows.length)}</small></td><td class="num" data-label="drop excluded">${number(one.e_safe)} <small>of ${number(needed)}</small></td>
      <td><${Badge} kind=${VERDICT_KIND[one.verdict]}>${one.verdict}<//></td></tr>`)}</tbody></table></div>`;
}

// How a test ended, in words; nothing while it is under way.
export const outcome = (test) => (test?.reason ? `${test.status} after its test against version ${test.against}: ${test.reason}` : undefined);
