// Numbers, times and texts as people read them. Pure.

export const NONE = "–";

// A number with about three significant digits; a whole number whole.
export function number(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return NONE;
  const size = Math.abs(value);
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  if (size < 0.0005) return value.toExponential(1);
  return String(Number(value.toPrecision(size >= 100 ? 4 : 3)));
}

// The same, and its sign: what a difference or an advantage needs.
export const signed = (value) => (value > 0 ? `+${number(value)}` : number(value).replace("-", "−"));

export function share(part, whole) {
  return whole > 0 ? `${Number(((100 * part) / whole).toPrecision(3))} %` : NONE;
}

export function milliseconds(value) {
  if (typeof value !== "number") return NONE;
  return value < 1000 ? `${Math.round(value)} ms` : seconds(value / 1000);
}

export function seconds(value) {
  if (typeof value !== "number") return NONE;
  if (value < 60) return `${number(Number(value.toFixed(1)))} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
}

// How long ago a Unix time was.
export function ago(at, now = Date.now() / 1000) {
  const passed = Math.max(0, now - at);
  if (passed < 5) return "just now";
  if (passed < 90) return `${Math.round(passed)} s ago`;
  if (passed < 5400) return `${Math.round(passed / 60)} min ago`;
  if (passed < 129600) return `${Math.round(passed / 3600)} h ago`;
  return `${Math.round(passed / 86400)} d ago`;
}

export function absolute(at) {
  return new Date(at * 1000).toLocaleString("sv-SE", { timeZoneName: "short" });
}

export function plural(count, noun) {
  return `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
}

// Any JSON value as text.
export function text(value) {
  if (typeof value === "string") return value;
  return value === null || value === undefined ? "" : JSON.stringify(value, null, 2);
}

// JSON text with indentation; what is no JSON as it is.
export function pretty(value) {
  if (typeof value !== "string") return text(value);
  try {
    return JSON.stringify(JSON.parse(value), null, 2);
  } catch {
    return value;
  }
}

export const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
