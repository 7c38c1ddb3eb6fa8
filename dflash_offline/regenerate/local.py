"""Answers without a server: a small target through transformers, many prompts at once.

Meant for targets of a few hundred million parameters or a few thousand rows; a server with paged attention is many
times faster for anything larger. Hybrid targets are answered one prompt at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dflash_offline.config import TargetConfig
from dflash_offline.conversations.rows import RowDropped
from dflash_offline.errors import UsageError
from dflash_offline.regenerate.rewrite import Answer, Rewrite, split_reasoning
from dflash_offline.regenerate.settings import AnswerSettings, turn_seed

if TYPE_CHECKING:
    from dflash_offline.decode import Generation


class LocalTarget:
    """A loaded target that answers batches of conversations.

    Args:
        target: the target, its tokenizer with a chat template.
        settings: what to ask for.

    Raises:
        UsageError: the target cannot be loaded, or its tokenizer has no chat template.
    """

    def __init__(self, target: TargetConfig, settings: AnswerSettings) -> None:
        import torch

        from dflash_offline.evaluate import target_stop_ids
        from dflash_offline.target import load_target

        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._target = load_target(target, device, layer_ids=(0,), stop_early=False)
        self._tokenizer = self._target.resolved.tokenizer()
        if not getattr(self._tokenizer, "chat_template", None):
            raise UsageError(
                f"the tokenizer of {target.model} has no chat template (a base model?): name a tokenizer that has one "
                "with --tokenizer"
            )
        self._stop_ids = target_stop_ids(self._target, self._tokenizer)
        self._settings = settings
        self._limit = getattr(self._target.config, "max_position_embeddings", None)

    def answer(self, batch: Sequence[Rewrite]) -> list[Answer | RowDropped]:
        """The next answer of each conversation, or why it can have none; all must have a next request."""
        prompts: list[list[int] | RowDropped] = []
        for item in batch:
            try:
                prompts.append(self._prompt(item))
            except RowDropped as drop:
                prompts.append(drop)
        usable = [(n, prompt) for n, prompt in enumerate(prompts) if not isinstance(prompt, RowDropped)]
        answers: list[Any] = list(prompts)
        done = self._generate([prompt for _, prompt in usable], batch)
        for (number, prompt), generation in zip(usable, done, strict=True):
            answers[number] = self._read(len(prompt), generation)
        return answers

    def _prompt(self, item: Rewrite) -> list[int]:
        import jinja2

        try:
            text = self._tokenizer.apply_chat_template(
                item.next_request(),
                tools=item.source.tools,
                tokenize=False,
                add_generation_prompt=True,
                **self._settings.template_arguments,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise RowDropped("template-error", f"{type(error).__name__}: {error}") from None
        ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if self._limit is not None and len(ids) + self._settings.max_tokens > self._limit:
            raise RowDropped("refused", f"{len(ids)} tokens and max_tokens exceed the context of {self._limit}")
        return ids

    def _generate(self, prompts: list[list[int]], batch: Sequence[Rewrite]) -> list[Generation]:
        from dflash_offline.decode import Sampling, plain_generate
        from dflash_offline.decode.batched import batched_generate, supports_batches

        settings = self._settings
        options: dict[str, Any] = {
            "max_new_tokens": settings.max_tokens,
            "stop_ids": self._stop_ids,
            "sampling": Sampling(settings.temperature, settings.top_k, settings.top_p),
        }
        seed = turn_seed(settings.seed, batch[0].row, batch[0].turn)
        if supports_batches(self._target):
            return batched_generate(self._target, None, prompts, seed=seed, **options)
        return [plain_generate(self._target, prompt, seed=seed + n, **options) for n, prompt in enumerate(prompts)]

    def _read(self, prompt_tokens: int, generation: Generation) -> Answer:
        tokens = generation.tokens[: self._settings.max_tokens]
        stopped = bool(tokens) and tokens[-1] in self._stop_ids
        text = self._tokenizer.decode(tokens[:-1] if stopped else tokens, skip_special_tokens=True)
        reasoning, content = split_reasoning(text)
        return Answer(content, "stop" if stopped else "length", reasoning, None, prompt_tokens, len(tokens))
