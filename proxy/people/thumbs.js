// Two thumbs below an answer. <script src="http://PROXY/thumbs.js"></script>, then `thumbs(element, key)` with the
// `key` that your server got from POST /rollouts/{id}/calls/{call}/reward-key.
{
  const route = new URL("thumb", document.currentScript.src);
  const AGAIN_MS = 1100; // a key changes its value once a second

  globalThis.thumbs = (element, key) => {
    let wanted = 0;
    const buttons = [[1, "👍", "good answer"], [-1, "👎", "bad answer"]].map(([value, sign, label]) => {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: sign, title: label });
      button.setAttribute("aria-label", label);
      button.addEventListener("click", () => {
        wanted = value;
        send(value);
      });
      element.append(button);
      return { value, button };
    });
    const show = (of) => buttons.forEach(({ value, button }) => button.setAttribute("aria-pressed", String(value === of)));
    const send = async (value) => {
      const sent = await fetch(route, { method: "POST", body: JSON.stringify({ key, value }) }).catch(() => null);
      if (value !== wanted) return; // the other one was pressed meanwhile
      if (!sent || sent.status === 429 || sent.status >= 500) setTimeout(() => value === wanted && send(value), AGAIN_MS);
      else if (sent.ok) show(value);
      else buttons.forEach(({ button }) => Object.assign(button, { disabled: true, title: "no longer possible" }));
    };
    show(0);
  };
}
