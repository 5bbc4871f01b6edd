// What an agent does with Anthropic's client for JavaScript, printed as JSON, one line a step.
//
//     node anthropic_client.mjs ROOT_URL MODEL
import { readFileSync } from "node:fs";
import Anthropic from "@anthropic-ai/sdk";

const [baseURL, model] = process.argv.slice(2);
const client = new Anthropic({ baseURL, apiKey: "unused", maxRetries: 2 });
const messages = [{ role: "user", content: "Say hello to Zoë." }];
const asked = { model, messages, max_tokens: 8, temperature: 0 };

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
    return [error.constructor.name, error.message, error.status, error.error];
  }
};

const installed = new URL("./node_modules/@anthropic-ai/sdk/package.json", import.meta.url);
said("version", JSON.parse(readFileSync(installed)).version);
said("message", await client.messages.create(asked));
said("events", await all(client.messages.create({ ...asked, stream: true })));
said("final", await client.messages.stream(asked).finalMessage());
said("tokens", await client.messages.countTokens({ model, messages }));
said("no such model", await failure(() => client.messages.create({ ...asked, model: "nobody" })));
