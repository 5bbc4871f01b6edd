// Makes a rollout's requests whole: each has only what it adds to an earlier call's, which `request_of` names. Pure.

export function wholeRequests(rollout) {
  const requests = new Map();
  const calls = rollout.calls.map((call) => {
    const { call_id, ...shared } = call.request_of ?? {};
    const before = requests.get(call_id);
    const request = { ...call.request };
    for (const [name, n] of Object.entries(shared)) request[name] = begun(before[name], n, request[name]);
    requests.set(call.call_id, request);
    return { ...call, request };
  });
  return { ...rollout, calls };
}

// The first `n` of an earlier field, and then what is in this one. A text counts in characters, not in UTF-16 units.
function begun(before, n, own) {
  if (Array.isArray(before)) return [...before.slice(0, n), ...own];
  if (typeof before === "string") return first(before, n) + own;
  return Object.fromEntries([...Object.entries(before).slice(0, n), ...Object.entries(own)]);
}

function first(text, n) {
  let end = 0;
  for (let i = 0; i < n; i += 1) end += text.codePointAt(end) > 0xffff ? 2 : 1;
  return text.slice(0, end);
}
