"""The mask token is a reserved row of the embedding, never a token that means something."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from dflash_offline.errors import UsageError
from dflash_offline.target import check_mask_token, find_mask_token


def tokenizer_of(words: list[str], **special: str) -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    return PreTrainedTokenizerFast(tokenizer_object=inner, **special)


def test_smollm2_has_empty_output(smollm2_tokenizer):
    assert find_mask_token(smollm2_tokenizer, {"vocab_size": 49152}) == 16


def test_rows_past_the_tokenizer_serve_where_nothing_is_named_reserved():
    words = [f"w{i}" for i in range(20)] + ["<|endoftext|>", "<|im_end|>", "<|fim_pad|>"]
    tokenizer = tokenizer_of(words, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    assert find_mask_token(tokenizer, {"vocab_size": 32}) == 23  # Qwen3: 151669, the first past its last token
    assert find_mask_token(tokenizer, {"vocab_size": 32, "pad_token_id": 23}) == 24


@pytest.mark.parametrize(
    "name", ["<|reserved_special_token_0|>", "<unused0>", "<empty_output>", "[unused7]", "<|reserved_5|>"]
)
def test_tokens_named_reserved_come_first(name):
    tokenizer = tokenizer_of(["a", "b", "</s>", "c", name, "d"], eos_token="</s>")
    assert find_mask_token(tokenizer, {"vocab_size": 8}) == 4


def test_a_reserved_token_in_use_as_pad_is_passed_over():
    tokenizer = tokenizer_of(["a", "</s>", "<unused0>", "<unused1>"], eos_token="</s>", pad_token="<unused0>")
    assert find_mask_token(tokenizer, {"vocab_size": 4}) == 3


@pytest.mark.parametrize("word", ["<reserve>", "unused", "<tool_call>", "<|fim_pad|>", "<unusedness>"])
def test_tokens_that_only_look_reserved_are_not_taken(word):
    tokenizer = tokenizer_of(["a", "</s>", word], eos_token="</s>")
    with pytest.raises(UsageError, match=r"drafter.mask_token_id"):
        find_mask_token(tokenizer, {"vocab_size": 3})


def test_pad_eos_bos_and_ids_outside_are_refused_with_the_reason(smollm2_tokenizer):
    config = {"vocab_size": 49152, "eos_token_id": [2, 7], "pad_token_id": 2, "bos_token_id": 1}
    generation = {"eos_token_id": [2, 9]}
    assert check_mask_token(16, smollm2_tokenizer, config, generation) == 16
    for token, reason in [
        (2, "the .* token of the tokenizer"),
        (1, "bos token"),
        (7, "eos token of the config"),
        (9, "eos token of the generation config"),
        (49152, "outside the target's embedding of 49152 rows"),
        (-1, "outside the target's embedding"),
    ]:
        with pytest.raises(UsageError, match=reason):
            check_mask_token(token, smollm2_tokenizer, config, generation)
