"""Finds how vLLM sampled a call: asks vLLM once for each set of sampling parameters, or reads the request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from ...core.errors import UpstreamTimeout, UpstreamUnreachable
from ...core.json_text import dumps
from ...core.records import ModelCall
from ...core.tokens import constraint, is_not_followed
from ...serving.vllm import VllmError, VllmFleet, VllmServer
from ..rows.sampling import cannot_be_replayed, sampling_of
from ..types import Sampling

log = logging.getLogger(__name__)
Json = dict[str, Any]

# What decides how an answer is sampled, in all of the recorded APIs.
_PARAMETERS = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "stop_token_ids", "structured_outputs",
    "response_format", "text", "output_format", "tools", "tool_choice", "parallel_tool_calls", "chat_template",
    "chat_template_kwargs", "reasoning_effort", "reasoning", "include_reasoning",
)  # fmt: skip
_KEPT = 10_000  # sets of parameters, far more than a step has
_MESSAGE: Json = {"messages": [{"role": "user", "content": "0"}]}
_PROMPTS: dict[str, Json] = {"completions": {"prompt": "0"}, "responses": {"input": "0"}}
_NOT_UNDERSTOOD = "the sampling parameters are not understood"
_NO_ROUTE = (
    "vLLM does not report its sampling parameters (%s): calls with a grammar are left out, and for others only the "
    "requests are read; start vLLM with `lightning-proxy vllm`, or add --enable-scale-out"
)

# Returns the chat request that a request of another API was sent as; None if it was sent unchanged.
AsChat = Callable[[str, Json], Json | None]
Known = Sampling | str  # how an answer was sampled, or why that cannot be computed again


class Sampled:
    """Says how calls were sampled. Without `vllm` it reads only their requests, which do not contain the grammars."""

    def __init__(self, vllm: VllmServer | VllmFleet | None = None, as_chat: AsChat | None = None) -> None:
        self._vllm, self._as_chat = vllm, as_chat
        self._known: dict[str, Known] = {}
        self._warned = False

    async def look(self, calls: Iterable[ModelCall]) -> None:
        """Ask vLLM how trainable calls were sampled. If vLLM is down, raises its error for one with a grammar."""
        for call in calls:
            if call.trainable and (key := self._key(call)) not in self._known and (known := await self._ask(call)):
                self._known[key] = known
        while len(self._known) > _KEPT:
            self._known.pop(next(iter(self._known)))

    def of(self, call: ModelCall) -> Sampling | None:
        """Return how the call's answer was sampled, or None if that cannot be recomputed."""
        known = self._of(call)
        return None if isinstance(known, str) else known

    def why_not(self, call: ModelCall) -> str | None:
        """Return why the call's sampling excludes it from training; None if it does not."""
        if not call.trainable:
            return call.untrainable_reason if is_not_followed(call.untrainable_reason) else None
        known = self._of(call)
        return known if isinstance(known, str) else None

    def _of(self, call: ModelCall) -> Known:
        return self._known.get(self._key(call)) or _by_request(call)

    async def _ask(self, call: ModelCall) -> Known | None:
        """Ask vLLM, or read the request if vLLM cannot tell. If it is down, return None, or raise for a grammar."""
        if self._vllm is None:
            return _by_request(call)
        try:
            model = await self._vllm.base_model()
            endpoint, parameters = self._sent(call)
            prompt = _PROMPTS.get(endpoint, _MESSAGE)
            rendered = await self._vllm.rendered(endpoint, {"model": model, **prompt, **parameters})
        except VllmError as error:
            if not self._warned:
                log.warning(_NO_ROUTE, error.message)
            self._warned = True
            return _by_request(call)
        except (UpstreamUnreachable, UpstreamTimeout):
            if constraint(call.request):
                raise
            return None
        return _as_rendered(rendered, call)

    def _sent(self, call: ModelCall) -> tuple[str, Json]:
        """The endpoint that the call was sent to, and the parameters that decided how its answer was sampled."""
        endpoint, request = call.endpoint, _shortened(call.request)
        if self._as_chat and (chat := self._as_chat(endpoint, request)) is not None:
            endpoint, request = "chat/completions", chat
        return endpoint, {name: request[name] for name in _PARAMETERS if request.get(name) is not None}

    def _key(self, call: ModelCall) -> str:
        endpoint, parameters = self._sent(call)
        return f"{endpoint} {dumps(parameters)}"


def _as_rendered(rendered: Json, call: ModelCall) -> Known:
    parameters = rendered["sampling_params"]
    outputs = parameters.get("structured_outputs")
    if outputs is not None:
        name = constraint(call.request) or "the server's defaults"
        if rendered.get("reasoning_ended") is False:
            return f"{name}: a grammar that begins after the model's reasoning cannot be replayed"
        if why := cannot_be_replayed(outputs):
            return f"{name}: its grammar cannot be replayed, because {why}"
    return sampling_of(parameters) or _NOT_UNDERSTOOD


def _by_request(call: ModelCall) -> Known:
    if name := constraint(call.request):
        return f"{name}: only vLLM knows its grammar, and no vLLM with --enable-scale-out could be asked"
    return sampling_of(call.request) or _NOT_UNDERSTOOD


def _shortened(request: Json) -> Json:
    """The request with a minimal conversation: only its sampling parameters matter here."""
    left_out = ("system", "previous_response_id")
    placeholders = {name: value for name, value in {**_MESSAGE, "input": "0"}.items() if name in request}
    return {name: value for name, value in request.items() if name not in left_out} | placeholders
