// A chart of numbers over steps or versions, by uPlot.
import { number } from "./format.mjs";
import { html, useEffect, useRef } from "./html.mjs";

const { uPlot } = globalThis;

// A colour of the page's in this theme: a canvas knows no variables.
function colour(name) {
  const probe = document.body.appendChild(document.createElement("i"));
  probe.style.color = `var(--${name})`;
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

// `x`: numbers that rise. `series`: {label, values, colour, points, band: [low, high], scatter}; null is a gap.
export function Chart({ label, x, xLabel, series, height = 200, sync }) {
  const place = useRef(null);
  const drawn = useRef(null);
  const shape = JSON.stringify([series.map(({ label, band }) => [label, Boolean(band)]), height, document.documentElement.dataset.theme]);
  useEffect(() => {
    const options = optionsFor({ x, xLabel, series, height, width: place.current.clientWidth, sync });
    drawn.current = new uPlot(options, columnsOf(x, series), place.current);
    const resize = new ResizeObserver(([entry]) => {
      drawn.current.setSize({ width: Math.floor(entry.contentRect.width), height });
    });
    resize.observe(place.current);
    return () => {
      resize.disconnect();
      drawn.current.destroy();
    };
  }, [shape]);
  useEffect(() => drawn.current.setData(columnsOf(x, series)), [x, series]);
  const onKeyDown = (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    const { cursor, data: [all] } = drawn.current;
    const at = Math.min(all.length - 1, Math.max(0, (cursor.idx ?? all.length) + by));
    drawn.current.setCursor({ left: drawn.current.valToPos(all[at], "x"), top: 0 });
  };
  return html`<figure class="chart" tabindex="0" onKeyDown=${onKeyDown} aria-label=${summary(label, x, xLabel, series)}>
    <div ref=${place}></div>
  </figure>`;
}

function summary(label, x, xLabel, series) {
  const last = series.map(({ label: name, values }) => `${name} ${number(values.findLast((value) => value !== null))}`);
  return `${label}, ${x.length} ${xLabel}s. Last: ${last.join(", ")}.`;
}

function columnsOf(x, series) {
  return [x, ...series.flatMap(({ values, band }) => (band ? [values, ...band] : [values]))];
}

function optionsFor({ x, xLabel, series, height, width, sync }) {
  const shown = [{ label: xLabel, value: legendValue }];
  const bands = [];
  for (const { label, values, band, colour: name, scatter } of series) {
    const stroke = colour(name);
    const few = values.filter((value) => value !== null).length < 40;
    shown.push({
      label,
      stroke,
      width: 1.5,
      spanGaps: true,
      paths: scatter ? () => null : undefined,
      points: { show: scatter || few, size: scatter ? 7 : 4, fill: stroke },
      value: legendValue,
    });
    if (band) {
      const edge = { class: "edge", stroke: "transparent", points: { show: false }, value: legendValue };
      bands.push({ series: [shown.length + 1, shown.length], fill: colour(`${name}-soft`) });
      shown.push({ ...edge, label: "low" }, { ...edge, label: "high" });
    }
  }
  return {
    width,
    height,
    series: shown,
    bands,
    scales: { x: { time: false, range: rangeOfX }, y: { range: rangeOfY } },
    axes: [axis({ size: 32, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000] }), axis({ size: 52 })],
    cursor: { y: false, ...(sync && { sync: { key: sync } }) },
    legend: { live: true },
  };
}

const rangeOfX = ({ data: [[first, ...others]] }, low, high) => (others.length === 0 ? [first - 0.5, first + 0.5] : [low, high]);

// From 0: noise does not look like a rise.
function rangeOfY(_, low, high) {
  if (typeof low !== "number" || (low === 0 && high === 0)) return [0, 1];
  return uPlot.rangeNum(Math.min(low, 0), Math.max(high, 0), 0.1, true);
}

// A value of the legend: the one under the cursor, else the last.
function legendValue(chart, value, series, index) {
  return number(index === null ? chart.data[series].findLast((one) => one !== null) : value);
}

function axis(own) {
  const line = { stroke: colour("line"), width: 1 };
  return { stroke: colour("muted"), grid: line, ticks: { ...line, size: 4 }, font: "11px system-ui", values: (_, all) => all.map(number), ...own };
}
