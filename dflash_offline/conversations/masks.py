"""A conversation → rendered text, and which of its characters, then tokens, the assistant wrote.

Templates that mark ``{% generation %}`` are believed. For all others the assistant's turns are found by rendering
prefixes: turn i runs from the end of ``render(messages[:i], add_generation_prompt=True)`` to the end of
``render(messages[:i+1])``, as long as both are prefixes of the whole text. It covers the token that ends the turn
(``<|im_end|>``), which the drafter must learn too, but no white space after it, which the target never writes.

Where a prefix does not match (templates that drop earlier reasoning), the model would have seen another text at that
point, so only the last turn is supervised, and the row is counted as ``last-turn-fallback``. Rendering costs about
0.1 ms a turn, as much as tokenising it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dflash_offline.config import DataConfig
from dflash_offline.conversations.rows import Conversation, RowDropped
from dflash_offline.errors import DFlashOfflineError, UsageError

_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_OWN_ARGUMENTS = frozenset({
    "conversation", "tools", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize", "padding",
    "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
})  # fmt: skip

Spans = list[tuple[int, int]]


@dataclass(frozen=True)
class RenderedChat:
    """Text of a conversation and the character spans [start, end) that are supervised."""

    text: str
    spans: Spans
    method: Literal["prefix-rendering", "last-turn-fallback"]


def template_text(tokenizer: Any, data: DataConfig) -> str | dict[str, str] | None:
    """The chat template in force: the recipe's file, else the tokenizer's own (some have one by purpose), else None.

    Raises:
        UsageError: the recipe's file cannot be read.
    """
    if data.chat_template is None:
        return getattr(tokenizer, "chat_template", None)
    try:
        return Path(data.chat_template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"data.chat_template {data.chat_template!r} cannot be read: {error}") from None


class ChatRenderer:
    """Renders conversations with one tokenizer, one template and one set of arguments.

    Args:
        tokenizer: a Hugging Face tokenizer.
        template: template replacing the tokenizer's, or None.
        arguments: passed to the template, e.g. ``{"enable_thinking": False}``.
        last_only: supervise the last assistant turn only.

    Raises:
        UsageError: an argument is one that this class sets itself.
    """

    def __init__(self, tokenizer: Any, template: str | None, arguments: dict[str, Any], last_only: bool):
        if clash := _OWN_ARGUMENTS & arguments.keys():
            raise UsageError(f"data.template_arguments: {', '.join(sorted(clash))} cannot be set there")
        self._tokenizer, self._template, self._arguments = tokenizer, template, arguments
        self._last_only = last_only
        self._tags: dict[bool, bool] = {}

    def has_generation_tags(self, tools: list[dict[str, Any]] | None) -> bool:
        """Whether the template in force marks what the assistant wrote.

        Raises:
            UsageError: there is no template.
        """
        key = tools is not None
        if key not in self._tags:
            if self._template is None and not getattr(self._tokenizer, "chat_template", None):
                raise UsageError(
                    "rows are conversations, but the tokenizer has no chat template (a base model?): set "
                    "data.chat_template to a Jinja file, or give the corpus as plain text"
                )
            try:
                template = self._template or self._tokenizer.get_chat_template(None, tools)
            except ValueError as error:  # several templates, none of them the default
                raise UsageError(f"{error}; set data.chat_template to a file with the one to use") from None
            # Only fast tokenizers can say which token a character went to.
            self._tags[key] = self._tokenizer.is_fast and bool(_GENERATION_TAG.search(template))
        return self._tags[key]

    def encode_tagged(self, chat: Conversation) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
        """Token ids [T] and mask [T] by the template's generation tags.

        Raises:
            RowDropped: the template refuses the conversation, or its tags cover what the user wrote.
        """
        out = self._apply(
            chat.messages, chat.tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True,
            tokenizer_kwargs={"verbose": False},
        )  # fmt: skip
        mask = np.asarray(out["assistant_masks"], dtype=bool)
        if mask.any() and (mask.all() or self._is_before_answer(chat, out, int(mask.argmax()))):
            raise RowDropped("everything-supervised", "the template's generation tags cover the user's turns too")
        if self._last_only and mask.any():
            last = int(np.flatnonzero(mask)[-1])
            before = np.flatnonzero(~mask[:last])
            mask[: int(before[-1]) + 1 if len(before) else 0] = False
        return np.asarray(out["input_ids"], dtype=np.uint32), mask

    def _is_before_answer(self, chat: Conversation, encoding: Any, token: int) -> bool:
        """Whether a token lies in what the template writes before the first assistant turn."""
        first = next(number for number, message in enumerate(chat.messages) if message["role"] == "assistant")
        try:
            before = self._text(chat.messages[:first], chat.tools).rstrip()
        except RowDropped:  # the template cannot render this part alone: nothing to compare with
            return False
        place = encoding.token_to_chars(token)
        return (
            place is not None and place.start < len(before) and self._text(chat.messages, chat.tools).startswith(before)
        )

    def render(self, chat: Conversation) -> RenderedChat:
        """Text and supervised spans by rendering prefixes.

        Raises:
            RowDropped: the template refuses the conversation, or not even its last turn can be found.
        """
        messages, tools = chat.messages, chat.tools
        text = self._text(messages, tools)
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        spans: Spans = []
        for number in turns[-1:] if self._last_only else turns:
            span = self._turn(messages, tools, number, text)
            if span is None:
                start = self._start_of_last(messages, tools, text)
                return RenderedChat(text, [(start, len(text.rstrip()))], "last-turn-fallback")
            spans.append(span)
        return RenderedChat(text, spans, "prefix-rendering")

    def _turn(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, number: int, text: str
    ) -> tuple[int, int] | None:
        """Characters of one assistant turn, None where a prefix does not match."""
        try:
            prompt = self._text(messages[:number], tools, add_generation_prompt=True)
            turn = text if number == len(messages) - 1 else self._text(messages[: number + 1], tools)
        except RowDropped:  # the template takes the whole conversation but not this part of it
            return None
        if not (text.startswith(turn) and turn.startswith(prompt)):
            return None
        return len(prompt), max(len(prompt), len(turn.rstrip()))

    def _start_of_last(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, text: str) -> int:
        """Where the last turn begins: after all that its prompt has in common with the text.

        Some generation prompts hold more than the history does (an opened ``<think>``).
        """
        before = self._text(messages[:-1], tools)
        prompt = self._text(messages[:-1], tools, add_generation_prompt=True)
        common = next(
            (n for n, (a, b) in enumerate(zip(prompt, text, strict=False)) if a != b), min(len(prompt), len(text))
        )
        if common < len(before.rstrip()) or not before:
            raise RowDropped("prompt-not-a-prefix", "the template renders the prompt otherwise when an answer follows")
        return common

    def _text(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, add_generation_prompt: bool = False
    ) -> str:
        return self._apply(messages, tools, tokenize=False, add_generation_prompt=add_generation_prompt)

    def _apply(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, **options: Any) -> Any:
        import jinja2

        try:
            return self._tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=self._template, **options, **self._arguments
            )
        except jinja2.TemplateSyntaxError as error:
            raise DFlashOfflineError(f"the chat template is not valid Jinja: {error}, line {error.lineno}") from None
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise RowDropped("template-error", f"{type(error).__name__}: {error}") from None


def spans_to_mask(offsets: NDArray[np.int64], spans: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """Tokens that lie whole within a span.

    A token that straddles the beginning of a span is not supervised: at serving time the prompt ends there, and the
    target never has to write that token.

    Args:
        offsets: int64 [T, 2], first character and end of each token.
        spans: character spans [start, end).

    Returns:
        bool [T].
    """
    mask = np.zeros(len(offsets), dtype=bool)
    start, end = offsets[:, 0], offsets[:, 1]
    for first, last in spans:
        mask |= (start >= first) & (end <= last) & (start < last)
    return mask


def mask_by_token_prefixes(tokenizer: Any, text: str, ids: NDArray[np.uint32], spans: Spans) -> NDArray[np.bool_]:
    """The same for tokenizers without offsets: the tokens of each text prefix must be a prefix of all tokens.

    Raises:
        RowDropped: a boundary of a span falls inside a token.
    """
    mask = np.zeros(len(ids), dtype=bool)
    for span in spans:
        cuts = []
        for place in span:
            prefix = np.asarray(tokenizer(text[:place], add_special_tokens=False, verbose=False)["input_ids"])
            if not np.array_equal(prefix, ids[: len(prefix)]):
                raise RowDropped("token-boundary", "a turn begins or ends inside a token")
            cuts.append(len(prefix))
        mask[cuts[0] : cuts[1]] = True
    return mask
