"""Asks the policy as one of a rollout's agents."""

import os

from lightning_proxy import client


def ask(agent: str, system: str, prompt: str, max_tokens: int) -> tuple[str, str | None]:
    """The model's line, and the id of the call, which a reward may name."""
    model = os.environ.get("MODEL", "policy")
    messages = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
    with client.agent(agent) as here, here.openai() as llm:
        answer = llm.chat.completions.with_raw_response.create(
            model=model, messages=messages, max_tokens=max_tokens, temperature=1
        )
    return (answer.parse().choices[0].message.content or "").strip(), answer.headers.get("x-call-id")
