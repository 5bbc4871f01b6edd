// The one chart: lines, dots and bands over steps, versions or time, as SVG. Places are percent of the chart.
import { html, number, useState } from "./parts.mjs";

const FEW = 40; // values of a line that are dots, too
const percent = (part) => `${part.toFixed(2)}%`;

// What `pick` finds in each row, as a series' values have it: null is a gap.
export const column = (rows, pick) => rows.map((row) => pick(row) ?? null);
export const hasAny = ({ values }) => values.some((value) => value !== null);

// The round numbers between two, about `count` of them.
function ticks(low, high, count) {
  const rough = (high - low) / count;
  const size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * size).find((one) => one >= rough * 0.999);
  const first = Math.ceil(low / step - 0.001);
  return Array.from({ length: Math.floor(high / step + 0.001) - first + 1 }, (_, i) => (first + i) * step);
}

// From 0: noise does not look like a rise.
function rangeOf(series) {
  const all = series.flatMap(({ values, band = [] }) => [values, ...band].flat()).filter((value) => value !== null);
  const low = all.reduce((least, one) => Math.min(least, one), 0);
  const high = all.reduce((most, one) => Math.max(most, one), 0);
  return low === high ? [0, 1] : [low * 1.05, high * 1.05];
}

// `x`: numbers that rise. `series`: {label, values, colour, band: [low, high], scatter}. `range`: the lowest and the
// highest value, where they are not to follow from the values. `bare`: without axes, legend and keys.
export function Chart({ label, x, xLabel, series, range, bare, height = 200 }) {
  const [at, setAt] = useState(null);
  const [low, high] = range ?? rangeOf(series);
  const last = x.length - 1;
  const rungs = bare ? [] : ticks(low, high, height / 35);
  const left = (value) => (last > 0 ? (100 * (value - x[0])) / (x[last] - x[0]) : 50);
  const top = (value) => (100 * (high - value)) / (high - low || 1);
  const points = (values) => values.map((value, i) => (value === null ? null : `${left(x[i]).toFixed(2)},${top(value).toFixed(2)}`)).filter(Boolean);
  const shapes = series.map(({ values, colour, band, scatter }) => {
    const [own, edges] = [points(values), (band ?? []).map(points)];
    return html`${band && html`<polygon class=${`area ${colour}`} points=${[...edges[0], ...edges[1].reverse()].join(" ")} />`}
      ${!scatter && html`<polyline class=${`line ${colour}`} points=${own.join(" ")} />`}
      ${(scatter || own.length < FEW) && html`<path class=${`dots ${colour} ${scatter && "large"}`} d=${own.map((one) => `M${one}h0`).join("")} />`}`;
  });
  const drawn = html`<svg viewBox="0 0 100 100" preserveAspectRatio="none" aria-hidden="true">
    ${rungs.map((value) => html`<path class="grid-line" d=${`M0,${top(value)}H100`} />`)}
    ${shapes}${at !== null && html`<path class="cursor" d=${`M${left(x[at])},0V100`} />`}
  </svg>`;
  if (bare) return html`<div class="chart bare" role="img" aria-label=${label}>${drawn}</div>`;
  const shown = ({ values, band = [] }) => {
    const index = at ?? values.findLastIndex((value) => value !== null);
    const [least, most] = band.map((edge) => number(edge[index]));
    return `${number(values[index])}${most ? ` (${least} to ${most})` : ""}`;
  };
  const onKeyDown = (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    setAt((now) => Math.min(last, Math.max(0, (now ?? last + 1) + by)));
  };
  const onPointerMove = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const wanted = (100 * (event.clientX - box.left)) / box.width;
    const distance = (i) => Math.abs(left(x[i]) - wanted);
    setAt(x.reduce((nearest, _, i) => (distance(i) < distance(nearest) ? i : nearest), 0));
  };
  const summary = `${label}, ${x.length} ${xLabel}s. Last: ${series.map((one) => `${one.label} ${number(one.values.findLast((value) => value !== null))}`).join(", ")}.`;
  return html`<figure class="chart" tabindex="0" aria-label=${summary} onKeyDown=${onKeyDown} onBlur=${() => setAt(null)}>
    <div class="plot" style=${{ height: `${height}px` }} onPointerMove=${onPointerMove} onPointerLeave=${() => setAt(null)}>
      ${drawn}
      ${rungs.map((value) => html`<span class="y tick" style=${{ top: percent(top(value)) }}>${number(value)}</span>`)}
      ${(last > 0 ? ticks(x[0], x[last], 6).filter(Number.isInteger) : x).map((value) => html`<span class="x tick" style=${{ left: percent(left(value)) }}>${value}</span>`)}
    </div>
    <figcaption>${xLabel} ${x[at ?? last]}${series.map((one) => html`<span class="legend"><i class=${one.colour}></i>${one.label} ${shown(one)}</span>`)}</figcaption>
  </figure>`;
}
