// What an agent does with an official client for JavaScript, printed as JSON, one line a step.
//
//     node client.mjs openai|@anthropic-ai/sdk URL MODEL
import { readFileSync } from "node:fs";

const [name, baseURL, model] = process.argv.slice(2);
const { default: Client } = await import(name);
const client = new Client({ baseURL, apiKey: "unused", maxRetries: 2 });
const messages = [{ role: "user", content: "Say hello to Zoë." }];
const asked = { model, messages, temperature: 0, max_tokens: 8 };
const ours = ["x-rollout-id", "x-call-id", "x-policy-version", "date", "content-length", "transfer-encoding", "connection", "keep-alive"];

const said = (step, value) => console.log(JSON.stringify({ [step]: value }));
const all = async (stream) => {
  const parts = [];
  for await (const part of await stream) parts.push(part);
  return parts;
};
const failure = async (call) => {
  try {
    return await call();
  } catch (error) {
    return [error.constructor.name, error.message, error.status, error.code, error.type, error.param, error.error];
  }
};

async function openai() {
  const chat = client.chat.completions;
  said("chat", await chat.create(asked));
  said("stream", await all(chat.create({ ...asked, stream: true })));
  said("final", await chat.stream(asked).finalChatCompletion());
  const { data, response } = await chat.create(asked).withResponse();
  said("raw", [response.status, [...response.headers].filter(([name]) => !ours.includes(name)), data]);
  const request = { model, input: "Say hello.", temperature: 0, max_output_tokens: 8 };
  said("response", await client.responses.create(request));
  said("response, streamed", (await all(client.responses.create({ ...request, stream: true }))).map((event) => event.type));
  said("at once", await Promise.all([1, 2, 3].map(() => chat.create(asked))));
  said("no such model", await failure(() => chat.create({ ...asked, model: "nobody" })));
}

async function anthropic() {
  said("message", await client.messages.create(asked));
  said("events", await all(client.messages.create({ ...asked, stream: true })));
  said("final", await client.messages.stream(asked).finalMessage());
  said("tokens", await client.messages.countTokens({ model, messages }));
  said("no such model", await failure(() => client.messages.create({ ...asked, model: "nobody" })));
}

said("version", JSON.parse(readFileSync(new URL(`./node_modules/${name}/package.json`, import.meta.url))).version);
await (name === "openai" ? openai() : anthropic());
