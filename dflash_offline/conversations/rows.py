"""One raw row → a conversation, a text, or ready token ids; or the reason why it is unusable.

Columns are found by their usual names, row by row, so one corpus may mix shapes. Names given in the recipe win, and
then only those are looked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_offline.config import DataConfig
from dflash_offline.errors import UsageError

# Usual names of the columns, by role, most telling first.
COLUMN_NAMES: dict[str, tuple[str, ...]] = {
    "id": ("id", "uuid", "conversation_id", "task_id"),
    "messages": ("messages", "conversation", "dialogue", "dialog"),
    "conversations": ("conversations",),
    "prompt": ("prompt", "instruction", "question", "query", "problem", "input", "user"),
    "response": ("response", "completion", "answer", "output", "solution", "assistant"),
    "system": ("system", "system_prompt"),
    "text": ("text", "content"),
    "input_ids": ("input_ids", "token_ids", "tokens"),
    "loss_mask": ("loss_mask", "assistant_masks", "assistant_mask", "completion_mask"),
    "tools": ("tools", "functions"),
}
# Roles that make a format, in the order in which they are tried.
FORMAT_COLUMNS: dict[str, tuple[str, ...]] = {
    "tokens": ("input_ids", "loss_mask"),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_response": ("prompt", "response"),
    "text": ("text",),
}
SPEAKERS = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant",
    "function_call": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "function_response": "tool", "tool_response": "tool",
}  # fmt: skip


class RowDropped(Exception):
    """A row cannot be used: ``reason`` is what is counted, ``detail`` says more about this one."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Conversation:
    """Messages in the form chat templates take, ending with an assistant turn."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class PlainText:
    """Text of which every token is supervised."""

    text: str


@dataclass(frozen=True)
class GivenTokens:
    """Ready ids int64 [T] and loss mask bool [T]."""

    input_ids: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]


@dataclass(frozen=True)
class RowReader:
    """Reads rows of the shape (or shapes) that a recipe's ``data.format`` and ``data.columns`` allow."""

    format: str = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_config(cls, data: DataConfig) -> RowReader:
        """Check the column roles of a recipe.

        Raises:
            UsageError: a role is unknown, or does not belong to the format.
        """
        for role in data.columns:
            if role not in COLUMN_NAMES:
                raise UsageError(f"data.columns: unknown role {role!r}; roles are {', '.join(COLUMN_NAMES)}")
        named = [kind for kind, roles in FORMAT_COLUMNS.items() if set(roles) & set(data.columns)]
        if data.format == "auto" and len(named) > 1:
            raise UsageError(f"data.columns names columns of several formats ({', '.join(named)}): set data.format")
        kind = named[0] if data.format == "auto" and named else data.format
        return cls(kind, dict(data.columns))

    def row_id(self, row: Any) -> str | None:
        """The row's own id, None where it has none."""
        value = self._get(row, "id") if isinstance(row, dict) else None
        try:
            return None if value is None else str(value).encode("utf-8", "replace").decode()
        except RecursionError:
            return None

    def read(self, row: Any) -> Conversation | PlainText | GivenTokens:
        """What the row holds.

        Raises:
            RowDropped: it cannot be used.
        """
        if not isinstance(row, dict):
            raise RowDropped("broken-row", f"a row must be an object, not {type(row).__name__}")
        for kind, roles in FORMAT_COLUMNS.items():
            if self.format in ("auto", kind) and all(self._get(row, role) is not None for role in roles):
                return getattr(self, f"_{kind}")(row)
        kinds = FORMAT_COLUMNS if self.format == "auto" else (self.format,)
        wanted = "; or ".join(" with ".join(map(self._names, FORMAT_COLUMNS[kind])) for kind in kinds)
        raise RowDropped(
            "unknown-columns",
            f"the row's columns are {sorted(row)}; wanted: {wanted}. Name them with --set "
            "data.columns.messages=NAME, or data.columns.prompt=NAME and data.columns.response=NAME",
        )

    def _names(self, role: str) -> str:
        return repr(self.columns[role]) if role in self.columns else "/".join(COLUMN_NAMES[role])

    def _get(self, row: dict[str, Any], role: str) -> Any:
        if role in self.columns:
            return row.get(self.columns[role])
        return next((row[name] for name in COLUMN_NAMES[role] if row.get(name) is not None), None)

    def _tokens(self, row: dict[str, Any]) -> GivenTokens:
        try:
            ids = np.asarray(self._get(row, "input_ids"))
            mask = np.asarray(self._get(row, "loss_mask"))
        except ValueError as error:
            raise RowDropped("broken-row", f"input_ids or loss_mask is ragged: {error}") from None
        if ids.ndim != 1 or ids.shape != mask.shape or ids.dtype.kind not in "iu" or mask.dtype.kind not in "iub":
            raise RowDropped(
                "broken-row", f"input_ids {ids.dtype}{list(ids.shape)} and loss_mask {mask.dtype}{list(mask.shape)} "
                "must be flat lists of whole numbers and of one length",
            )  # fmt: skip
        if mask.size and (mask.min() < 0 or mask.max() > 1):
            raise RowDropped("broken-row", "loss_mask holds other values than 0 and 1")
        return GivenTokens(ids.astype(np.int64), mask.astype(bool))

    def _text(self, row: dict[str, Any]) -> PlainText:
        text = self._get(row, "text")
        if not isinstance(text, str):
            raise RowDropped("broken-row", f"text is of type {type(text).__name__}")
        if not text:
            raise RowDropped("nothing-supervised", "empty text")
        _check_characters(text)
        return PlainText(text)

    def _messages(self, row: dict[str, Any], role: str = "messages") -> Conversation:
        return self._conversation(row, _message_list(self._get(row, role)))

    def _sharegpt(self, row: dict[str, Any]) -> Conversation:
        return self._messages(row, "conversations")

    def _prompt_response(self, row: dict[str, Any]) -> Conversation:
        prompt, response = self._get(row, "prompt"), self._get(row, "response")
        extra = row.get("input")
        alpaca = "prompt" not in self.columns and prompt is row.get("instruction") and response is not extra
        if alpaca and extra and isinstance(prompt, str) and isinstance(extra, str):
            prompt = f"{prompt}\n\n{extra}"  # Alpaca: the instruction, and what it is about
        messages = []
        for value, role in ((prompt, "user"), (response, "assistant")):
            if isinstance(value, str) and not value.lstrip().startswith("[{"):
                messages.append({"role": role, "content": value})
            else:
                messages.extend(_message_list(value) if not isinstance(value, str) else _list_or_text(value, role))
        return self._conversation(row, messages)

    def _conversation(self, row: dict[str, Any], raw: list[Any]) -> Conversation:
        messages = [_message(item) for item in raw]
        system = self._get(row, "system")
        if isinstance(system, str) and system and not (messages and messages[0]["role"] == "system"):
            messages.insert(0, {"role": "system", "content": system})
        tools = _tools(self._get(row, "tools"))
        try:
            _check_characters(json.dumps([messages, tools], ensure_ascii=False, default=str))
        except RecursionError:
            raise RowDropped("broken-row", "nested too deeply") from None
        return Conversation(_ordered(messages), tools)


def _check_characters(text: str) -> None:
    """Refuse text that no tokenizer takes and no file holds: JSON may spell half of a character, as ``\\ud83d``."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start : error.end].encode("unicode_escape").decode()
        raise RowDropped("broken-text", f"{half} is half of a character: the text was cut inside an emoji") from None


def _message_list(value: Any) -> list[Any]:
    if isinstance(value, str):
        value = _from_json(value, "messages")
    if not isinstance(value, list):
        raise RowDropped("broken-row", f"messages are of type {type(value).__name__}, not a list")
    return value


def _list_or_text(value: str, role: str) -> list[Any]:
    """A prompt that looks like JSON messages, taken as plain text where it is not."""
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        parsed = None
    if isinstance(parsed, list) and parsed and all(isinstance(m, dict) and "content" in m for m in parsed):
        return parsed
    return [{"role": role, "content": value}]


def _message(item: Any) -> dict[str, Any]:
    """One message as templates take it: role, content as text, and whatever else it carries."""
    if isinstance(item, str):
        item = _from_json(item, "message")
    if not isinstance(item, dict):
        raise RowDropped("broken-row", f"a message is of type {type(item).__name__}, not an object")
    speaker = item.get("role", item.get("from"))
    if not isinstance(speaker, str):
        raise RowDropped("broken-row", f"a message has no role: its keys are {sorted(item)}")
    role = SPEAKERS.get(speaker.strip().lower())
    if role is None:
        raise RowDropped("unknown-role", f"role {speaker!r}")
    rest = {k: v for k, v in item.items() if k not in ("role", "from", "content", "value") and v is not None}
    if isinstance(rest.get("tool_calls"), str):
        rest["tool_calls"] = _from_json(rest["tool_calls"], "tool_calls")
    if "tool_calls" in rest:
        calls = rest["tool_calls"]
        if not isinstance(calls, list):
            raise RowDropped("broken-row", f"tool_calls are of type {type(calls).__name__}, not a list")
        rest["tool_calls"] = [_tool_call(call) for call in calls]
        if not rest["tool_calls"]:
            del rest["tool_calls"]
    return {"role": role, "content": _content(item.get("content", item.get("value"))), **rest}


def _content(value: Any) -> str:
    if value is None:
        return ""  # a message that only calls tools
    if isinstance(value, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in value):
        return "".join(part["text"] for part in value)
    if not isinstance(value, str):
        raise RowDropped("broken-row", f"a message's content is of type {type(value).__name__}, not text")
    return value


def _tool_call(call: Any) -> dict[str, Any]:
    """Arguments as an object, which is what templates expect; APIs give them as JSON text."""
    call = _from_json(call, "tool call") if isinstance(call, str) else call
    if not isinstance(call, dict):
        raise RowDropped("broken-row", f"a tool call is of type {type(call).__name__}")
    if isinstance(call.get("function"), dict):
        return {**call, "function": _tool_call(call["function"])}
    if isinstance(call.get("arguments"), str):
        try:
            arguments = json.loads(call["arguments"])
        except (ValueError, RecursionError):
            return call
        return {**call, "arguments": arguments} if isinstance(arguments, dict) else call
    return call


def _tools(value: Any) -> list[dict[str, Any]] | None:
    if isinstance(value, str):
        value = _from_json(value, "tools") if value.strip() else None
    if isinstance(value, dict):
        value = [value]
    if not value:
        return None
    if not isinstance(value, list):
        raise RowDropped("broken-row", f"tools are of type {type(value).__name__}, not a list")
    tools = [_from_json(tool, "tools") if isinstance(tool, str) else tool for tool in value]
    if not all(isinstance(tool, dict) for tool in tools):
        raise RowDropped("broken-row", "tools must be a list of JSON schemas")
    return tools


def _from_json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowDropped("broken-row", f"{what} is text but not JSON: {error}") from None


# Who may speak after whom; None is the beginning.
_AFTER: dict[str, tuple[str | None, ...]] = {
    "system": (None, "system"),
    "user": (None, "system", "assistant"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}


def _ordered(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Check the order of roles, and cut what follows the last assistant turn: nothing there can be learnt."""
    last = max((n for n, message in enumerate(messages) if message["role"] == "assistant"), default=None)
    if last is None:
        raise RowDropped("no-assistant-turn", f"roles are {[message['role'] for message in messages]}")
    previous: str | None = None
    for number, message in enumerate(messages):
        role = message["role"]
        if previous not in _AFTER[role]:
            where = f"follows {previous!r}" if previous else "comes first"
            raise RowDropped("roles-out-of-order", f"message {number}: {role!r} {where}")
        previous = role
    return messages[: last + 1]
