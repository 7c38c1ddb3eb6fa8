"""One conversation rewritten: each assistant turn is asked for anew, with the new answers before it as context.

Pure: ``next_request`` says what to ask, ``accept`` takes the answer. What ends a conversation early is what came after
a turn that can no longer be followed: a cut-off answer, or a tool call other than the recorded one, whose recorded
result answers another question.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

from dflash_offline.conversations.rows import COLUMN_NAMES, SPEAKERS, Conversation, RowDropped, RowReader

LengthPolicy = Literal["keep", "cut", "drop"]


@dataclass(frozen=True)
class Answer:
    """What the target wrote for one turn.

    Attributes:
        content: the text; may be empty beside tool calls.
        finish_reason: ``stop``, ``length``, ``tool_calls`` or what else the server says.
        reasoning: what it thought before, where a server (or a ``</think>``) tells it apart.
        tool_calls: in the form of the API.
        prompt_tokens, completion_tokens: as counted by whoever answered, None where it did not say.
    """

    content: str
    finish_reason: str
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None

    def message(self) -> dict[str, Any]:
        """The answer as a message of a conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message


@dataclass
class Rewrite:
    """A conversation on its way to new answers.

    Attributes:
        row: row number in the source.
        row_id: the row's own id, or None.
        source: the conversation as read.
        on_length: what an answer that was cut off does.
        messages: what stands so far.
    """

    row: int
    row_id: str | None
    source: Conversation
    on_length: LengthPolicy = "keep"
    messages: list[dict[str, Any]] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    completion_tokens: int = 0
    ended: bool = False

    def __post_init__(self) -> None:
        self._copy_until_assistant()

    @property
    def turn(self) -> int:
        """Number of the assistant turn that comes next, from 0."""
        return len(self.finish_reasons)

    def next_request(self) -> list[dict[str, Any]] | None:
        """Messages to answer next, None when the conversation is done.

        Earlier reasoning is left out: chat templates drop it, and servers may refuse the field.
        """
        if self.ended or len(self.messages) >= len(self.source.messages):
            return None
        return [{k: v for k, v in message.items() if k != "reasoning_content"} for message in self.messages]

    def accept(self, answer: Answer) -> None:
        """Put an answer into the conversation.

        Raises:
            RowDropped: the row cannot be used: nothing was written, it was cut off and the policy drops it, or the
                server ended it for another reason (a content filter).
        """
        place = len(self.messages)
        if answer.finish_reason == "length" and self.on_length != "keep":
            if self.on_length == "cut" and self.finish_reasons:
                self._end_before_this_turn()
                return
            raise RowDropped("length", f"answer {self.turn} reached max_tokens")
        if answer.finish_reason not in ("stop", "length", "tool_calls"):
            raise RowDropped(f"finish-{answer.finish_reason}", f"answer {self.turn}")
        if not answer.content.strip() and not answer.tool_calls:
            raise RowDropped("empty-answer", f"answer {self.turn} is empty (finish_reason {answer.finish_reason})")
        recorded = self.source.messages[place]
        self.messages.append(answer.message())
        self.finish_reasons.append(answer.finish_reason)
        self.completion_tokens += answer.completion_tokens or 0
        same_calls = _calls(recorded.get("tool_calls")) == _calls(answer.tool_calls)
        followed_by_tool = place + 1 < len(self.source.messages) and self.source.messages[place + 1]["role"] == "tool"
        if answer.finish_reason == "length" or (not same_calls and (followed_by_tool or answer.tool_calls)):
            self.ended = True
            return
        self._copy_until_assistant()

    def result(self, model: str) -> dict[str, Any]:
        """The finished row: a conversation that ``prepare`` reads, with what made it under ``regenerated``."""
        row: dict[str, Any] = {
            "id": self.row_id if self.row_id is not None else f"row-{self.row}",
            "row": self.row,
            "messages": self.messages,
        }
        if self.source.tools:
            row["tools"] = self.source.tools
        row["regenerated"] = {
            "model": model,
            "finish_reasons": self.finish_reasons,
            "completion_tokens": self.completion_tokens,
        }
        return row

    def _copy_until_assistant(self) -> None:
        for message in self.source.messages[len(self.messages) :]:
            if message["role"] == "assistant":
                return
            self.messages.append(message)

    def _end_before_this_turn(self) -> None:
        self.ended = True
        while self.messages and self.messages[-1]["role"] != "assistant":
            self.messages.pop()


def read_conversation(reader: RowReader, row: Any) -> Conversation:
    """The conversation of a raw row; rows that only ask (a prompt, or a last turn of the user) get a turn to answer.

    Raises:
        RowDropped: the row cannot be read, or is plain text or ready tokens, in which nobody answers.
    """
    item = reader.read(_with_open_turn(reader, row))
    if not isinstance(item, Conversation):
        raise RowDropped("not-a-conversation", "plain text and ready tokens have no turns to answer")
    return item


def _with_open_turn(reader: RowReader, row: Any) -> Any:
    if not isinstance(row, dict):
        return row
    for role in ("messages", "conversations"):
        name = _present(reader, row, role)
        if name is None:
            continue
        turns = row[name]
        if isinstance(turns, str):
            try:
                turns = json.loads(turns)
            except json.JSONDecodeError:
                return row  # the reader says what is wrong with it
        if isinstance(turns, list) and turns and isinstance(turns[-1], dict):
            speaker = str(turns[-1].get("role", turns[-1].get("from"))).strip().lower()
            if SPEAKERS.get(speaker) in ("user", "tool"):
                return {**row, name: [*turns, {"role": "assistant", "content": ""}]}
        return row
    if reader.format in ("auto", "prompt_response") and _present(reader, row, "prompt"):
        if _present(reader, row, "response") is None:
            return {**row, reader.columns.get("response", "response"): ""}
    return row


def _present(reader: RowReader, row: dict[str, Any], role: str) -> str | None:
    names = (reader.columns[role],) if role in reader.columns else COLUMN_NAMES[role]
    return next((name for name in names if row.get(name) is not None), None)


def _calls(calls: Any) -> list[tuple[str, Any]]:
    """Names and arguments of tool calls, comparable however the arguments are written."""
    found = []
    for call in calls or []:
        function = call.get("function", call)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except json.JSONDecodeError:
                pass
        found.append((function.get("name", ""), arguments))
    return found


def split_reasoning(text: str) -> tuple[str | None, str]:
    """Reasoning and answer of a text with ``</think>``; the opening tag may stand in the prompt instead."""
    before, tag, after = text.partition("</think>")
    if not tag:
        return None, text
    return before.strip().removeprefix("<think>").strip() or None, after.lstrip("\n")
