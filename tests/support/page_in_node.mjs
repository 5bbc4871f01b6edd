// Runs the page in node over a proxy, with as much of a document as Preact needs.
// node page_in_node.mjs FOLDER URL KEY: reads a JSON list of [address, button…] and prints what each place shows, after
// these buttons were pressed: {text, tags, links, buttons, problems}.
import { text as read } from "node:stream/consumers";

const [folder, url, key] = process.argv.slice(2);
const hub = new EventTarget();
let asked = 0;
let hash = "";
const problems = [];

class Node {
  childNodes = [];
  parentNode = null;
  get ownerDocument() { return document; }

  get firstChild() { return this.childNodes[0] ?? null; }
  get nextSibling() { return this.parentNode?.childNodes[this.parentNode.childNodes.indexOf(this) + 1] ?? null; }
  get textContent() { return this.data ?? this.childNodes.map((one) => one.textContent).join(""); }
  insertBefore(child, before) {
    child.remove();
    this.childNodes.splice(before ? this.childNodes.indexOf(before) : this.childNodes.length, 0, child);
    child.parentNode = this;
  }
  appendChild(child) { this.insertBefore(child, null); }
  removeChild(child) { child.remove(); }
  remove() {
    const all = this.parentNode?.childNodes ?? [];
    if (all.includes(this)) all.splice(all.indexOf(this), 1);
    this.parentNode = null;
  }
  contains(other) { return other !== null && (other === this || this.contains(other.parentNode)); }
}

class Text extends Node {
  nodeType = 3;
  constructor(data) {
    super();
    this.data = String(data);
  }
}

class Element extends Node {
  nodeType = 1;
  attributes = [];
  style = { setProperty() {}, cssText: "" };
  heard = {};

  constructor(name, namespaceURI) {
    super();
    this.localName = this.nodeName = name;
    this.namespaceURI = namespaceURI;
  }
  setAttribute(name, value) { this.attributes = [...this.attributes.filter((one) => one.name !== name), { name, value: String(value) }]; }
  removeAttribute(name) { this.attributes = this.attributes.filter((one) => one.name !== name); }
  getAttribute(name) { return this.attributes.find((one) => one.name === name)?.value; }
  addEventListener(kind, listener) { this.heard[kind] = listener; }
  removeEventListener(kind) { delete this.heard[kind]; }
  all() { return [this, ...this.childNodes.flatMap((one) => (one instanceof Element ? one.all() : []))]; }
  focus() {}
  showModal() {}
}

const storage = () => {
  const kept = new Map();
  return { getItem: (name) => kept.get(name) ?? null, setItem: (name, value) => kept.set(name, value), removeItem: (name) => kept.delete(name) };
};
const createElementNS = (space, name) => new Element(name, space);
const body = createElementNS("http://www.w3.org/1999/xhtml", "body");
const document = { body, createElementNS, createTextNode: (data) => new Text(data), addEventListener() {}, querySelector: () => null, querySelectorAll: () => [] };
const location = { origin: url, href: url, get hash() { return hash; }, set hash(to) { hash = String(to); dispatchEvent(new Event("hashchange")); } };
const history = { replaceState: (_, __, to) => (hash = to) };
const ask = globalThis.fetch;
Object.assign(globalThis, {
  document, location, history, sessionStorage: storage(), localStorage: storage(), scrollTo() {},
  addEventListener: hub.addEventListener.bind(hub), removeEventListener: hub.removeEventListener.bind(hub), dispatchEvent: hub.dispatchEvent.bind(hub),
  async fetch(path, options) {
    asked += 1;
    return ask(new URL(path, `${url}/`), options).finally(() => (asked -= 1));
  },
});
for (const kind of ["uncaughtException", "unhandledRejection"]) process.on(kind, (error) => problems.push(String(error.stack)));

async function settled() {
  for (let quiet = 0; quiet < 4; quiet = asked === 0 ? quiet + 1 : 0) await new Promise((resolve) => setTimeout(resolve, 40));
}

function press(label) {
  const button = body.all().find((one) => one.localName === "button" && one.textContent.trim() === label);
  if (!button) return problems.push(`no button ${label}`);
  const event = { type: "click", target: button, currentTarget: button, preventDefault() {} };
  return button.heard.click?.call(button, event);
}

hash = key ? `#/overview?key=${key}` : "";
await import(`${folder}/app.mjs`);
await settled();
const shown = [];
for (const [address, ...buttons] of JSON.parse(await read(process.stdin))) {
  location.hash = `#/${address}`;
  await settled();
  for (const label of buttons) {
    press(label);
    await settled();
  }
  const main = body.childNodes.find((one) => one.localName === "main");
  const elements = main?.all() ?? [];
  const named = (name, from = elements) => from.filter((one) => one.localName === name);
  shown.push({
    text: main?.textContent ?? "",
    tags: [...new Set(elements.map((one) => one.localName))],
    attributes: [...new Set(elements.flatMap((one) => one.attributes.map(({ name }) => name)))],
    links: named("a").map((one) => one.href ?? one.getAttribute("href")),
    buttons: named("button").map((one) => one.textContent.trim()),
    boxes: elements.map((one) => one.getAttribute("class") ?? "").filter((one) => one.startsWith("box")),
    views: named("a", named("nav", body.all())[0]?.all()).map((one) => one.textContent),
    problems: problems.splice(0),
  });
}
process.stdout.write(JSON.stringify(shown), () => process.exit(0));
