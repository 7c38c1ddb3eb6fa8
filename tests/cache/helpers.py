"""A small corpus and caches of it, with random hidden states that look like real ones."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from dflash_offline.cache import Cache, Identity, create_cache, get_encoding, make_plan
from dflash_offline.cache.statistics import layer_statistics


@dataclass(frozen=True)
class SmallCorpus:
    """The fields of ``dflash_offline.conversations.Corpus`` that a cache is made from."""

    rows: np.ndarray
    ids: list[str]
    lengths: np.ndarray
    supervised: np.ndarray
    anchors: np.ndarray
    input_ids: np.ndarray
    loss_mask: np.ndarray
    offsets: np.ndarray
    dropped: dict[str, int] = field(default_factory=lambda: {"too-long": 1})
    truncated: int = 0
    total_rows: int = 0
    mask_method: dict[str, int] = field(default_factory=dict)


def small_corpus(lengths: list[int] | np.ndarray, seed: int = 0) -> SmallCorpus:
    """Random tokens of these lengths; the second half of each sample is supervised."""
    rng = np.random.default_rng(seed)
    lengths = np.asarray(lengths, np.int32)
    offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    mask = np.concatenate([(np.arange(n) >= n // 2).astype(np.uint8) for n in lengths])
    supervised = np.array([mask[a:b].sum() for a, b in pairwise(offsets)], np.int32)
    return SmallCorpus(
        rows=np.arange(len(lengths), dtype=np.int64) * 2,
        ids=[f"row-{2 * i}" for i in range(len(lengths))],
        lengths=lengths,
        supervised=supervised,
        anchors=np.maximum(supervised - 1, 0),
        input_ids=rng.integers(0, 1000, offsets[-1]).astype(np.uint32),
        loss_mask=mask,
        offsets=offsets,
        total_rows=len(lengths) + 1,
        mask_method={"prefix-rendering": len(lengths)},
    )


def real_looking_states(tokens: int, layers: int, hidden: int, seed: int) -> torch.Tensor:
    """[tokens, layers, hidden] bf16: channels of very different size, and a few huge ones at the first token."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(tokens, layers, hidden, generator=generator)
    states *= torch.exp(torch.randn(1, layers, hidden, generator=generator))
    states[0, :, :3] *= 5000
    return states.bfloat16()


def write_target(folder: Path) -> None:
    """The files that the target's owner puts under ``target/``."""
    (folder / "config.json").write_text(json.dumps({"hidden_size": 64}))
    (folder / "heads.json").write_text(json.dumps({"tied": True}))
    save_file({"embed_tokens.weight": torch.arange(256.0).reshape(4, 64)}, folder / "heads.safetensors")


def make_cache(
    path: Path, encoding: str = "int8", num_samples: int = 40, shard_tokens: int = 1024, layer_ids: tuple = (1, 3)
) -> Cache:
    """A prepared cache without hidden states."""
    rng = np.random.default_rng(7)
    corpus = small_corpus(rng.integers(10, 300, num_samples))
    plan = make_plan(corpus.lengths, np.arange(num_samples) % 10 == 0, shard_tokens, seed=3)
    kind = get_encoding(encoding)
    return create_cache(
        path,
        corpus=corpus,
        plan=plan,
        identity=make_identity(kind, plan, layer_ids),
        provenance={"torch": torch.__version__, "created_at": "now"},
        encoding=kind,
        hidden_size=64,
        target_folder_writer=write_target,
        target={"num_layers": 5, "vocab_size": 1000},
    )


def make_identity(encoding, plan, layer_ids=(1, 3), **target) -> Identity:
    """The identity of a made-up target and corpus."""
    facts = {
        "model": "tiny",
        "config_sha256": "c" * 64,
        "weights": {"model.safetensors": "a" * 64},
        "dtype": "bfloat16",
    }
    return Identity.model_validate(
        {
            "target": {**facts, **target},
            "data": {
                "dataset_fingerprint": "d",
                "corpus_fingerprint": "f",
                "tokenizer_sha256": "t",
                "template_sha256": "u",
                "max_length": 300,
                "overflow": "truncate",
                "loss_on": "assistant",
                "heldout_share": 0.1,
                "split_seed": 0,
            },
            "target_layer_ids": list(layer_ids),
            "encoding": {"name": encoding.name, "params": encoding.params()},
            "shard_tokens": plan.shard_tokens,
            "plan_sha256": plan.sha256,
        }
    )


def shard_states(cache: Cache, shard: int) -> torch.Tensor:
    """The hidden states that :func:`fill` puts into a shard."""
    layout = cache.manifest.layout
    return real_looking_states(cache.shard_rows(shard), layout.num_layers_kept, layout.hidden_size, seed=shard)


def fill(cache: Cache, shards: list[int] | None = None) -> None:
    """Write shards as extraction does."""
    for shard in range(cache.num_shards) if shards is None else shards:
        states = shard_states(cache, shard)
        encoded = cache.encoding.encode(states)
        layers = layer_statistics(states, cache.encoding.decode(encoded))
        run = {"started_at": 1000.0 + shard, "finished_at": 1001.0 + shard, "worker": "cpu:0", "device": "cpu"}
        cache.write_shard(shard, cache.encoding.to_numpy(encoded), {"layers": layers, "run": run})
