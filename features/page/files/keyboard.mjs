// What keys do: go to a view, move in a list, search, help. Rows are real links, so Enter follows the one in focus.
import { html, useEffect, useRef } from "./html.mjs";

const LETTERS_MS = 1200; // between `g` and the letter of a view

const HELP = [
  ["j, k or ↓, ↑", "next and previous row"],
  ["Enter", "open the row"],
  ["←, →", "in a chart or an answer's tokens: the values before and after"],
  ["/", "search rollouts"],
  ["u", "up, from a rollout to the list"],
  ["?", "this help"],
  ["Esc", "close, or leave a field"],
];

export const isTyping = (target) => target.closest("input, select, textarea, dialog") !== null;

// `go`: the names of views by their letters.
export function useKeyboard(go, showHelp) {
  useEffect(() => {
    let wentAt = 0;
    const onKey = (event) => {
      if (event.key === "Escape") document.activeElement?.blur();
      if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target)) return;
      const view = Date.now() - wentAt < LETTERS_MS ? go.get(event.key) : undefined;
      wentAt = event.key === "g" ? Date.now() : 0;
      if (view) location.hash = `#/${view}`;
      else if (!acted(event, showHelp)) return;
      event.preventDefault();
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, []);
}

function acted({ key, target }, showHelp) {
  const inList = target.matches?.(".pick");
  if (key === "j" || (key === "ArrowDown" && inList)) return move(1);
  if (key === "k" || (key === "ArrowUp" && inList)) return move(-1);
  if (key === "/") return search();
  if (key === "u") location.hash = location.hash.split("?")[0].split("/").slice(0, 2).join("/");
  if (key === "?") showHelp();
  return key === "u" || key === "?";
}

function move(by) {
  const rows = [...document.querySelectorAll("main .pick")];
  const next = rows[Math.min(rows.length - 1, Math.max(0, rows.indexOf(document.activeElement) + by))];
  next?.focus();
  next?.scrollIntoView({ block: "nearest" });
  return rows.length > 0;
}

function search() {
  const field = () => document.querySelector('main input[type="search"]');
  if (field()) field().focus();
  else {
    location.hash = "#/rollouts";
    setTimeout(() => field()?.focus(), 100);
  }
  return true;
}

// A dialog that is open while it is drawn.
export function Dialog({ label, onClose, children }) {
  const dialog = useRef(null);
  useEffect(() => dialog.current.showModal(), []);
  return html`<dialog ref=${dialog} aria-label=${label} onClose=${onClose}>${children}</dialog>`;
}

// `views`: [name, {key, help}] of each.
export function Help({ views, onClose }) {
  const keys = [...views.map(([name, { key, help = name }]) => [`g ${key}`, help]), ...HELP];
  return html`<${Dialog} label="Keys" onClose=${onClose}>
    <h2>Keys</h2>
    <dl class="keys">${keys.map(([key, what]) => html`<div><dt><kbd>${key}</kbd></dt><dd>${what}</dd></div>`)}</dl>
    <form method="dialog"><button autofocus>Close</button></form>
  <//>`;
}
