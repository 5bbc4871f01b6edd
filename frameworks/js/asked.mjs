// What the programs here are asked: by their arguments, and their environment.
export const questions = process.argv.slice(2); // of one conversation, in order
export const stream = Boolean(process.env.STREAM);
export const headers = JSON.parse(process.env.HEADERS ?? "{}"); // with every request of the agent
