// Reads the four recorded APIs' requests and answers as messages: {role, blocks: [{kind, title, content}]}. Pure.
// Agents and models wrote all of it, so nothing is taken for granted about its types.
import { text } from "./parts.mjs";

const TEXTS = new Set(["text", "input_text", "output_text", "summary_text", "reasoning_text", "refusal"]);
const IMAGES = new Set(["image", "image_url", "input_image", "input_audio", "input_file", "file", "document"]);

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const listOf = (value) => (Array.isArray(value) ? value : value === undefined || value === null ? [] : [value]);
const block = (kind, content, title) => ({ kind, content, title: title === undefined ? undefined : text(title) });

export function requestMessages(request) {
  if (!isObject(request)) return [];
  if (request.prompt !== undefined) return [{ role: "prompt", blocks: [block("text", text(request.prompt))] }];
  const system = request.instructions ?? request.system;
  const before = system ? [{ role: "system", content: system }] : [];
  return [...before, ...listOf(request.messages ?? request.input)].map(messageOf);
}

export function answerMessages(response) {
  if (!isObject(response)) return response === null || response === undefined ? [] : [messageOf(text(response))];
  if (isObject(response.error)) return [{ role: "error", blocks: [block("error", text(response.error.message ?? response.error))] }];
  if (Array.isArray(response.choices)) {
    return response.choices.map((choice) => messageOf(choice?.message ?? { role: "assistant", content: choice?.text }));
  }
  if (Array.isArray(response.output)) return response.output.map(messageOf);
  if (response.content !== undefined) return [messageOf(response)];
  return [{ role: "answer", blocks: [block("other", pretty(response))] }];
}

function messageOf(message) {
  if (!isObject(message)) return { role: "user", blocks: [block("text", text(message))] };
  if (message.type !== undefined && message.type !== "message") return itemOf(message);
  const thought = message.reasoning_content ?? message.reasoning;
  const blocks = [
    ...(thought ? [block("thought", text(thought))] : []),
    ...(message.role === "tool"
      ? [block("result", text(plain(message.content)), message.name ?? message.tool_call_id ?? "")]
      : listOf(message.content).map(partOf).filter(({ content }) => content !== "")),
    ...(message.refusal ? [block("error", text(message.refusal))] : []),
    ...listOf(message.tool_calls).map((call) => callOf(call?.function?.name ?? call?.custom?.name, call?.function?.arguments ?? call?.custom?.input)),
  ];
  return { role: text(message.role) || "message", blocks };
}

// An item of the Responses API that is not a message.
function itemOf(item) {
  if (item.type === "function_call") return { role: "assistant", blocks: [callOf(item.name, item.arguments)] };
  if (item.type === "function_call_output") return { role: "tool", blocks: [block("result", text(plain(item.output)), item.call_id ?? "")] };
  if (item.type === "reasoning") {
    const thoughts = [...listOf(item.summary), ...listOf(item.content)].map((part) => block("thought", text(part?.text)));
    return { role: "assistant", blocks: thoughts };
  }
  return { role: text(item.type), blocks: [block("other", pretty(item))] };
}

function partOf(part) {
  if (!isObject(part)) return block("text", text(part));
  if (TEXTS.has(part.type)) return block("text", text(part.text ?? part.refusal));
  if (part.type === "tool_use") return callOf(part.name, part.input);
  if (part.type === "tool_result") return block(part.is_error ? "error" : "result", text(plain(part.content)), part.tool_use_id ?? "");
  if (part.type === "thinking") return block("thought", text(part.thinking));
  if (IMAGES.has(part.type)) return block("file", `${text(part.type)}, ${JSON.stringify(part).length} characters`);
  return block("other", pretty(part));
}

const callOf = (name, args) => block("call", pretty(args), name ?? "");

// A tool's result as text, where it is a list of texts.
function plain(content) {
  if (!Array.isArray(content)) return content;
  return content.every((part) => typeof part?.text === "string") ? content.map((part) => part.text).join("\n") : content;
}

// The messages of a call's request without what the call before it has shown: its messages, its answer, its tools' results.
export function withoutKnown(messages, { request_of: of }, before) {
  if (!before) return messages;
  const isShort = of?.messages || of?.input;
  const earlier = [...(isShort ? [] : requestMessages(before.request)), ...answerMessages(before.response)];
  const differs = messages.findIndex((message, i) => JSON.stringify(message) !== JSON.stringify(earlier[i]));
  const fresh = differs === -1 ? [] : messages.slice(differs);
  return before.tool_calls.some(({ result }) => result !== null) ? fresh.filter((message) => !isResult(message)) : fresh;
}

const isResult = ({ blocks }) => blocks.length > 0 && blocks.every(({ kind }) => kind === "result");

// JSON text with indentation; other text is left unchanged.
export function pretty(value) {
  if (typeof value !== "string") return text(value);
  try {
    return JSON.stringify(JSON.parse(value), null, 2);
  } catch {
    return value;
  }
}
