"""Answers from OpenAI-compatible servers: many requests in flight, retries with growing pauses, nothing lost.

Worth retrying: no connection, a connection cut, a timeout, 408, 409, 429 (its ``Retry-After`` is obeyed) and 5xx. A
request that the server refuses (400, 413, 422: usually a prompt longer than its context) drops that row; 401, 403 and
404 stop the run, as every other row would get the same.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

from dflash_offline.conversations.rows import RowDropped
from dflash_offline.errors import DFlashOfflineError, UsageError
from dflash_offline.regenerate.rewrite import Answer
from dflash_offline.regenerate.settings import AnswerSettings, FetchSettings, turn_seed

if TYPE_CHECKING:
    import httpx2

RETRIED_STATUS = {408, 409, 425, 429}
FATAL_STATUS = {401, 403, 404, 405}
LONGEST_PAUSE = 60.0


class AnswerFailed(Exception):
    """No answer came, by no fault of the row: it is asked for again when the command is run again.

    Attributes:
        retry_after: seconds that the server asks to wait, or None.
    """

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


def chat_url(server: str) -> str:
    """The address of chat completions below a base URL, with or without its ``/v1``.

    Raises:
        UsageError: it is no http(s) address.
    """
    if not server.startswith(("http://", "https://")):
        raise UsageError(f"--server {server!r}: write it as a URL, e.g. http://localhost:8000")
    base = server.rstrip("/").removesuffix("/chat/completions")
    return f"{base if base.endswith('/v1') else base + '/v1'}/chat/completions"


def request_body(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, settings: AnswerSettings, seed: int
) -> dict[str, Any]:
    """One request; fields that only vLLM and SGLang know (top_k, chat_template_kwargs) are sent only where set."""
    body: dict[str, Any] = {
        "model": settings.model,
        "messages": [_for_api(message) for message in messages],
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "max_tokens": settings.max_tokens,
        "stream": False,
    }
    if settings.temperature > 0:
        body["seed"] = seed
    if settings.top_k:
        body["top_k"] = settings.top_k
    if settings.template_arguments:
        body["chat_template_kwargs"] = settings.template_arguments
    if tools:
        body["tools"] = [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]
    return body | settings.extra_body


def parse_answer(data: Any) -> Answer:
    """The answer in a chat completion.

    Raises:
        AnswerFailed: the reply has another form, or was aborted.
    """
    try:
        choice = data["choices"][0]
        message = choice["message"]
        reason = choice.get("finish_reason")
        content = message.get("content") or ""
        usage = data.get("usage") or {}
    except (KeyError, IndexError, TypeError, AttributeError):
        raise AnswerFailed(f"the reply is no chat completion: {str(data)[:200]}") from None
    if not isinstance(content, str):
        raise AnswerFailed(f"the reply's content is of type {type(content).__name__}")
    if reason in (None, "abort", "error"):
        raise AnswerFailed(f"the server ended the answer early (finish_reason {reason!r})")
    return Answer(
        content=content,
        finish_reason=str(reason),
        reasoning=message.get("reasoning_content") or message.get("reasoning") or None,
        tool_calls=message.get("tool_calls") or None,
        prompt_tokens=usage.get("prompt_tokens"),
        completion_tokens=usage.get("completion_tokens"),
    )


class ChatServers:
    """One or more servers of the same model; each request goes to the one with the fewest in flight.

    Args:
        settings: what to ask for.
        fetch: how.
        api_key: sent as a bearer token, or None.
    """

    def __init__(self, settings: AnswerSettings, fetch: FetchSettings, api_key: str | None) -> None:
        import httpx2

        self._settings, self._fetch = settings, fetch
        self._urls = [chat_url(server) for server in fetch.servers]
        self._in_flight: Counter[str] = Counter()
        self._random = random.Random()
        self._client = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx2.Timeout(fetch.timeout, connect=min(30.0, fetch.timeout), pool=None),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=fetch.concurrency),
        )

    async def __aenter__(self) -> ChatServers:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def answer(
        self, row: int, turn: int, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> Answer:
        """One answer, however often it has to be asked for.

        Raises:
            AnswerFailed: all tries failed.
            RowDropped: the server refuses this request.
            DFlashOfflineError: it would refuse every request.
        """
        body = request_body(messages, tools, self._settings, turn_seed(self._settings.seed, row, turn))
        for attempt in range(self._fetch.retries + 1):
            try:
                return parse_answer(await self._post(body))
            except AnswerFailed as error:
                if attempt == self._fetch.retries:
                    raise
                await asyncio.sleep(self._pause(attempt, error))
        raise AssertionError("unreachable")

    async def _post(self, body: dict[str, Any]) -> Any:
        import httpx2

        url = min(self._urls, key=lambda u: self._in_flight[u])
        self._in_flight[url] += 1
        try:
            # The client's own timeout is between two bytes; this one is for the whole answer.
            reply = await asyncio.wait_for(self._client.post(url, json=body), self._fetch.timeout)
            return self._read(url, reply)
        except (httpx2.TransportError, TimeoutError) as error:
            raise AnswerFailed(f"{url}: {type(error).__name__} {error}".strip()) from error
        finally:
            self._in_flight[url] -= 1

    def _read(self, url: str, reply: httpx2.Response) -> Any:
        status = reply.status_code
        if status in RETRIED_STATUS or status >= 500:
            wait = _seconds(reply.headers.get("Retry-After"))
            raise AnswerFailed(f"{url}: status {status}: {reply.text[:200]}", wait)
        if status in FATAL_STATUS:
            raise DFlashOfflineError(
                f"{url} answers {status}: {reply.text[:300]}\n"
                f"  401, 403: put the key into the environment variable {self._fetch.api_key_env} (or name another "
                "with --api-key-env); 404: check --server and --model"
            )
        if status >= 400:
            raise RowDropped("refused", f"status {status}: {reply.text[:300]}")
        try:
            return reply.json()
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise AnswerFailed(f"{url}: the reply is not JSON: {reply.text[:200]}") from None

    def _pause(self, attempt: int, error: AnswerFailed) -> float:
        """Doubling, between half and all of it by chance, so that many waiting requests do not return at once."""
        if error.retry_after is not None:
            return min(error.retry_after, LONGEST_PAUSE)
        return min(self._fetch.backoff * 2**attempt, LONGEST_PAUSE) * (0.5 + self._random.random() / 2)


def served_model(fetch: FetchSettings, api_key: str | None) -> str:
    """Name of the one model that the first server serves.

    Raises:
        UsageError: it serves several.
        DFlashOfflineError: it does not answer.
    """
    import httpx2

    url = chat_url(fetch.servers[0]).removesuffix("/chat/completions") + "/models"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        reply = httpx2.get(url, headers=headers, timeout=min(30.0, fetch.timeout))
        reply.raise_for_status()
        names = [str(model["id"]) for model in reply.json()["data"]]
    except (httpx2.HTTPError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise DFlashOfflineError(
            f"{url} does not say which model it serves ({type(error).__name__}: {error}); is the server up? "
            "Name the model with --model"
        ) from None
    if len(names) != 1:
        raise UsageError(f"{url} serves {names}: choose one with --model")
    return names[0]


def _for_api(message: dict[str, Any]) -> dict[str, Any]:
    """Tool calls in the form of the API: arguments as JSON text, where conversations carry objects."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for number, call in enumerate(message["tool_calls"]):
        function = dict(call.get("function", call))
        if not isinstance(function.get("arguments"), str):
            function["arguments"] = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
        calls.append({"id": call.get("id", f"call_{number}"), "type": "function", "function": function})
    return {**message, "tool_calls": calls}


def _seconds(text: str | None) -> float | None:
    try:
        return max(0.0, float(text)) if text is not None else None
    except ValueError:
        return None
