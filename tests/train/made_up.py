"""Small caches of made-up hidden states, so that training is tested without a target or an extraction."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from dflash_offline.cache import Cache, Identity, State, create_cache, get_encoding, make_plan
from dflash_offline.config import TrainRecipe, validate_recipe
from dflash_offline.conversations import Corpus

HIDDEN, VOCAB, LAYERS = 64, 48, (1, 3)
MASK_TOKEN = 40


def write_target(folder: Path) -> None:
    """A target of random heads whose tokenizer knows words t0 ... t39; 40 and up are reserved."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(MASK_TOKEN)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t1", pad_token="t2").save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    heads = {
        "embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator),
        "lm_head.weight": torch.randn(VOCAB, HIDDEN, generator=generator),
        "norm.weight": torch.ones(HIDDEN),
    }
    save_file(heads, folder / "heads.safetensors")
    info = {"tied": False, "embed_scale": 1.0, "norm_eps": 1e-6, "norm_offset": 0, "logit_softcap": None}
    (folder / "heads.json").write_text(json.dumps(info))
    config = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    (folder / "config.json").write_text(json.dumps(config))


def make_corpus(documents: int, seed: int, longest: int = 60) -> Corpus:
    """Documents whose next token follows from the last one (so that it can be learned), the first quarter a prompt."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(8, longest + 1, documents).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ids, mask = np.empty(offsets[-1], np.uint32), np.zeros(offsets[-1], np.uint8)
    anchors = np.empty(documents, np.int32)
    supervised = np.empty(documents, np.int32)
    for index, (first, length) in enumerate(zip(offsets[:-1], lengths, strict=True)):
        ids[first : first + length] = (rng.integers(0, MASK_TOKEN) + 3 * np.arange(length)) % MASK_TOKEN
        loss = (np.arange(length) >= length // 4).astype(np.uint8)
        if length > 20:
            loss[length // 2] = 0  # a hole
        mask[first : first + length] = loss
        anchors[index], supervised[index] = (loss[:-1] & loss[1:]).sum(), loss.sum()
    return Corpus(
        rows=np.arange(documents, dtype=np.int64) * 10,
        ids=[f"row-{10 * i}" for i in range(documents)],
        lengths=lengths,
        supervised=supervised,
        anchors=anchors,
        prompt_hash=rng.integers(0, 2**63, documents).astype(np.uint64),
        input_ids=ids,
        loss_mask=mask,
        offsets=offsets,
        dropped={},
        truncated=0,
        total_rows=documents,
        fingerprint="0" * 64,
        dataset_fingerprint="1" * 64,
        mask_method={"given": documents},
    )


def hidden_states(cache: Cache, shard: int, noise: float = 0.5) -> torch.Tensor:
    """States [rows, L, H] of a shard: a fixed vector a token and layer, and noise of the shard's own seed."""
    rows = cache.shard_rows(shard)
    ids = torch.from_numpy(cache.read_tokens(shard)[0][:rows].astype(np.int64))
    table = torch.randn(VOCAB, len(LAYERS), HIDDEN, generator=torch.Generator().manual_seed(7))
    noisy = torch.randn(rows, len(LAYERS), HIDDEN, generator=torch.Generator().manual_seed(shard))
    return (table[ids] + noise * noisy).bfloat16()


def make_cache(
    path: Path,
    *,
    documents: int = 60,
    seed: int = 0,
    shard_tokens: int = 256,
    encoding: str = "int8",
    heldout: float = 0.15,
    finish: bool = True,
    extract: bool = True,
    dropped: tuple[int, ...] = (),
    aside: tuple[int, ...] = (),
    longest: int = 60,
) -> Cache:
    """A finished cache; ``dropped`` samples hold NaN and are listed so, shards ``aside`` are set aside.

    Without ``extract`` it is prepared only, without ``finish`` it has no state.
    """
    corpus = make_corpus(documents, seed, longest)
    in_heldout = np.random.default_rng(seed + 1).random(documents) < heldout
    plan = make_plan(corpus.lengths, in_heldout, shard_tokens, 0)
    codec = get_encoding(encoding)
    identity = Identity.model_validate(
        {
            "target": {"model": "random", "config_sha256": "2" * 64, "weights": {}, "dtype": "float32"},
            "data": {
                "dataset_fingerprint": corpus.dataset_fingerprint,
                "corpus_fingerprint": corpus.fingerprint,
                "tokenizer_sha256": "3" * 64,
                "template_sha256": "4" * 64,
                "max_length": longest,
                "overflow": "truncate",
                "loss_on": "assistant",
                "heldout_share": heldout,
                "split_seed": 0,
            },
            "target_layer_ids": list(LAYERS),
            "encoding": {"name": encoding, "params": codec.params()},
            "shard_tokens": shard_tokens,
            "plan_sha256": plan.sha256,
        }
    )
    cache = create_cache(
        path,
        corpus=corpus,
        plan=plan,
        identity=identity,
        provenance={},
        encoding=codec,
        hidden_size=HIDDEN,
        target_folder_writer=write_target,
        threads=1,
    )
    for shard in range(cache.num_shards) if extract else []:
        if shard in aside:
            continue
        hidden = hidden_states(cache, shard)
        listed = []
        for sample in cache.shard_samples(shard):
            if sample in dropped:
                first = int(cache.samples.start[sample]) - shard * shard_tokens
                hidden[first : first + int(cache.samples.length[sample])] = float("nan")
                listed.append(
                    {"sample": sample, "row": int(cache.samples.row[sample]), "id": "x", "reason": "not-finite"}
                )
        cache.write_shard(shard, codec.to_numpy(codec.encode(hidden)), {"dropped": listed})
    if finish and extract:
        cache.write_state(
            State(
                finished=True,
                set_aside=[{"shard": shard, "error": "boom"} for shard in aside],
                dropped=len(dropped),
            )
        )
    return cache


def make_recipe(cache: Path, run: Path, **sections) -> TrainRecipe:
    """A recipe of a tiny drafter; keyword arguments are sections that update it."""
    data = {
        "cache": str(cache),
        "run": str(run),
        "drafter": {"num_layers": 2, "block_size": 4, "mask_token_id": MASK_TOKEN},
        "rows": {
            "context_tokens": 128,
            "anchors_per_document": 8,
            "rows_per_step": 2,
            "lanes": 3,
            "window_shards": 2,
        },
        "loss": {},
        "optimizer": {"learning_rate": 3e-3},
        "training": {
            "epochs": 2,
            "log_every": 3,
            "evaluate_every": 5,
            "checkpoint_every": 4,
            "trackers": [],
            "threads": 1,
        },
    }
    for name, section in sections.items():
        data[name] = {**data[name], **section}
    return validate_recipe(data, TrainRecipe)
