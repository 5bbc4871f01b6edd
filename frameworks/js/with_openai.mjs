// OpenAI's client for JavaScript, without a framework: its own loop over tools.
import { headers, questions, stream } from "./asked.mjs";
import OpenAI from "openai";

const client = new OpenAI({ defaultHeaders: headers });

const integers = { a: { type: "integer" }, b: { type: "integer" } };
const multiply = {
  name: "multiply",
  description: "Multiply two integers.",
  parameters: { type: "object", properties: integers },
  parse: JSON.parse,
  function: ({ a, b }) => `${a * b}`,
};
const tools = [{ type: "function", function: multiply }];
const ask = (messages) => client.chat.completions.runTools({ model: "policy", messages, tools, stream });

let messages = [];
for (const question of questions) {
  const runner = ask([...messages, { role: "user", content: question }]);
  console.log(await runner.finalContent());
  messages = runner.messages;
}
