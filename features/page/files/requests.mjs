// Requests to the proxy as commands: for a shell, and for Python. Pure but for the page's own address.

const JSON_TYPE = "Content-Type: application/json";
const LONGEST = 30_000; // characters of an argument: Linux takes 128 KiB
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`; // for a shell
const literal = (value) => JSON.stringify(JSON.stringify(value)); // a JSON text is a string of Python, too

const urlOf = (path) => new URL(path, location.href.split("#")[0]).href;

const ANTHROPIC = { "anthropic-version": "2023-06-01" };
const headersOf = (path) => (path.endsWith("/messages") ? ANTHROPIC : {}); // what Anthropic's API demands

export function asCurl(path, body) {
  const more = Object.entries(headersOf(path)).map(([name, value]) => ` \\\n  -H ${quoted(`${name}: ${value}`)}`);
  const head = `curl ${quoted(urlOf(path))} \\\n  -H "Authorization: Bearer $OPENAI_API_KEY"${more.join("")}`;
  if (body === undefined) return head;
  const said = JSON.stringify(body);
  const data = said.length > LONGEST ? `@- <<'END'\n${said}\nEND\n` : quoted(said);
  return `${head} \\\n  -H ${quoted(JSON_TYPE)} \\\n  -d ${data}`;
}

export function asPython(path, body) {
  const lines = [
    "import json, os, urllib.request",
    "",
    `headers = {"Authorization": "Bearer " + os.environ.get("OPENAI_API_KEY", "none"), "Content-Type": "application/json"}`,
    ...Object.entries(headersOf(path)).map(([name, value]) => `headers[${JSON.stringify(name)}] = ${JSON.stringify(value)}`),
    body === undefined ? "body = None" : `body = json.dumps(json.loads(${literal(body)})).encode()`,
    `with urllib.request.urlopen(urllib.request.Request(${JSON.stringify(urlOf(path))}, body, headers)) as answer:`,
    "    print(json.dumps(json.load(answer), indent=2))",
  ];
  return `${lines.join("\n")}\n`;
}
