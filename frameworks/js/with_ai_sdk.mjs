// Vercel's AI SDK: an agent over chat completions.
import { headers, questions, stream } from "./asked.mjs";
import { createOpenAI } from "@ai-sdk/openai";
import { ToolLoopAgent, tool } from "ai";
import { z } from "zod";

const openai = createOpenAI({ headers });
const multiply = tool({
  description: "Multiply two integers.",
  inputSchema: z.object({ a: z.number(), b: z.number() }),
  execute: ({ a, b }) => a * b,
});
const agent = new ToolLoopAgent({ model: openai.chat("policy"), tools: { multiply } });

const messages = [];
for (const question of questions) {
  messages.push({ role: "user", content: question });
  const result = stream ? await agent.stream({ messages }) : await agent.generate({ messages });
  if (stream) await result.consumeStream();
  console.log(await result.text);
  messages.push(...(await result.responseMessages));
}
