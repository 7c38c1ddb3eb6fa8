"""``new``: a recipe pair for any target, from its configuration (and its tokenizer, where there is one) alone.

Sizes follow the public DFlash drafters: five layers of the target's own attention shape, or 32 heads of 128 where the
target's heads are wider or its attention is of another kind; the target's MLP width, or 8/3 of the hidden size where
the target is a mixture of experts (7680 at 2880, as z-lab's gpt-oss-20b drafter has it).
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_offline.cache.files import remove_leftovers, write_atomic
from dflash_offline.config import DrafterConfig, TargetConfig
from dflash_offline.errors import DFlashOfflineError, UsageError

LAYERS = 5
BLOCK = 16
CPU_LENGTH = 1024
SHARD_BYTES = 512e6
INT8_BYTES = 1 + 2 / 64
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "num_routed_experts")


@dataclass(frozen=True)
class RecipeFacts:
    """What a recipe pair is written from.

    Attributes:
        name: of the recipe; folders are named after it.
        model: as it was given.
        config: the text model's configuration.
        layer_ids: layers that are kept.
        mask_token: a reserved row of the embedding; None where none was found.
        mask_problem: why there is no mask token.
    """

    name: str
    model: str
    config: dict[str, Any]
    layer_ids: list[int]
    mask_token: int | None
    mask_problem: str | None = None


def new_recipe(target: str, out: Path | None = None, data: str | None = None, gpus: int = 1) -> Path:
    """Write ``extract.toml`` and ``train.toml`` for a target; never overwrites.

    Args:
        target: folder, hub id (only small files are downloaded) or .gguf file.
        out: folder of the pair; default: a folder named after the target.
        data: source of the conversations; default: a file to be made.
        gpus: GPUs that both stages use, one after the other.

    Returns:
        The folder.

    Raises:
        UsageError: the target is none, or the folder already holds a recipe.
    """
    if gpus < 0:
        raise UsageError(f"--gpus {gpus}: a number of GPUs, 0 for the CPU")
    name = recipe_name(target)
    folder = Path(name) if out is None else out
    texts = {"extract.toml": "", "train.toml": ""}
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; name a folder with --out")
    if all((folder / file).exists() for file in texts):
        raise _already_there(folder, list(texts))
    facts = target_facts(target, name)
    recipe = shlex.quote(str(folder))
    texts["extract.toml"] = extract_text(facts, data or f"data/{name}.jsonl", gpus, recipe)
    texts["train.toml"] = train_text(facts, gpus, recipe)
    # a half that an interrupted call wrote is what would be written now
    others = [
        file for file, text in texts.items() if (path := folder / file).exists() and path.read_bytes() != text.encode()
    ]
    if others:
        raise _already_there(folder, others)
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    for file, text in texts.items():
        write_atomic(folder / file, text.encode())
    return folder


def _already_there(folder: Path, files: list[str]) -> UsageError:
    return UsageError(
        f"{folder} already holds {' and '.join(files)}, which are never overwritten: choose another --out"
    )


def recipe_name(target: str) -> str:
    """A short name of a target: ``Qwen/Qwen3-4B`` gives ``qwen3-4b``."""
    path = Path(target).expanduser()
    last = path.resolve().name if path.exists() else target.rstrip("/").split("/")[-1]
    return re.sub(r"[^a-z0-9._-]+", "-", last.lower().removesuffix(".gguf")).strip("-.") or "target"


def target_facts(target: str, name: str) -> RecipeFacts:
    """Read a target's configuration and look for its mask token; no weights are read, except of a GGUF file.

    Raises:
        UsageError: it is no target.
        DFlashOfflineError: the hub could not be reached.
    """
    from dflash_offline.target import default_layer_ids, find_mask_token, resolve_target

    path = Path(target).expanduser()
    here = path.exists() or target.endswith(".gguf") or path.is_absolute() or target.startswith(".")
    resolved = resolve_target(TargetConfig(model=target if here else str(_small_files(target))))
    count = min(LAYERS, resolved.num_layers)
    mask, problem = None, None
    try:
        tokenizer = resolved.tokenizer()
        if len(tokenizer.get_vocab()) < resolved.vocab_size // 2:  # transformers makes an empty one where there is none
            raise UsageError("no tokenizer lies beside the model")
        mask = find_mask_token(tokenizer, resolved.config, resolved.generation_config)
    except UsageError as error:
        problem = str(error).splitlines()[0]
    config = resolved.config.to_dict()
    config["tie_word_embeddings"] = resolved.tied
    return RecipeFacts(name, target, config, default_layer_ids(resolved.num_layers, count), mask, problem)


def _small_files(model: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=["*.json", "*.txt", "*.model", "*.jinja"]))
    except Exception as error:
        raise DFlashOfflineError(
            f"target {model}: no local folder or file of that name, and the hub did not give it "
            f"({str(error).splitlines()[0] if str(error) else type(error).__name__}); check the id, or give a folder"
        ) from error


def drafter_sizes(config: dict[str, Any]) -> dict[str, int]:
    """num_heads, num_kv_heads, head_dim and intermediate_size of a drafter for a target's configuration."""
    hidden, heads = int(config["hidden_size"]), int(config.get("num_attention_heads") or 0)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or (hidden // heads if heads else 0))
    plain = heads and kv_heads and head_dim and head_dim <= 128 and head_dim % 2 == 0 and heads % kv_heads == 0
    if not plain or config.get("kv_lora_rank"):
        heads = 32 if hidden >= 2048 else max(1, hidden // 128)
        head_dim, kv_heads = 128, 8 if heads % 8 == 0 else 1
    width = int(config.get("intermediate_size") or 0)
    if not width or (is_mixture(config) and width < 2 * hidden):
        width = max(64, round(8 * hidden / 3 / 64) * 64)
    return {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim, "intermediate_size": width}


def is_mixture(config: dict[str, Any]) -> bool:
    """Whether the target is a mixture of experts."""
    return any((config.get(key) or 0) > 1 for key in _EXPERTS)


def estimate_parameters(config: dict[str, Any]) -> float:
    """The target's parameters from its configuration, within a tenth or so."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    experts = max([config.get(key) or 1 for key in _EXPERTS])
    width = config.get("moe_intermediate_size") or config.get("intermediate_size") or 4 * hidden
    heads = config.get("num_attention_heads") or 1
    head_dim = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    attention = 2 * hidden * head_dim * (heads + kv_heads)
    embeddings = config["vocab_size"] * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return float(embeddings + layers * (attention + 3 * hidden * width * experts))


def extract_sizes(config: dict[str, Any], layers: int, gpus: int) -> dict[str, int]:
    """max_length, shard_tokens and batch_tokens: shards below half a gigabyte, passes that fit beside the weights.

    Without a GPU everything is short: a CPU's attention takes memory with the square of a row's length.
    """
    token_bytes = layers * config["hidden_size"] * INT8_BYTES
    shard_tokens = 16384
    while shard_tokens > 4096 and shard_tokens * token_bytes > SHARD_BYTES:
        shard_tokens //= 2
    size = estimate_parameters(config)
    batch_tokens = 65536 if size < 1e9 else 32768 if size < 10e9 else 16384
    longest = config.get("max_position_embeddings") or 4096
    if not gpus:
        shard_tokens, batch_tokens = 4096, 4096
    return {
        "max_length": min(4096 if gpus else CPU_LENGTH, longest),
        "shard_tokens": shard_tokens,
        "batch_tokens": batch_tokens,
    }


def extract_text(facts: RecipeFacts, data: str, gpus: int, recipe: str) -> str:
    """Content of ``extract.toml``; ``recipe`` is how the command line names the pair's folder."""
    layers = len(facts.layer_ids)
    sizes = extract_sizes(facts.config, layers, gpus)
    token_bytes = layers * facts.config["hidden_size"] * INT8_BYTES
    attention = ""
    if facts.config.get("model_type") == "gpt_oss":
        attention = '\nattention = "eager"          # attention sinks: transformers has no sdpa path for this family'
    usable = facts.config["hidden_size"] % 64 == 0
    encoding = "int8" if usable else "bf16"
    why = f"{token_bytes / 1e3:.1f} kB a token; bf16 keeps every bit in 1.4 times that"
    if not usable:
        why = "exact; int8 needs a hidden size that is a multiple of 64"
    return f"""\
# Stage one for {_comment(facts.model)}: the target reads the conversations once.
#   dflash-offline preview {recipe}    look at the supervised tokens first
#   dflash-offline extract {recipe}    run it again to resume
# Relative paths are seen from the folder in which the command is started.
cache = {_toml(f"runs/{facts.name}/cache")}

[target]
model = {_toml(facts.model)}
dtype = {_toml("bfloat16" if gpus else "float32")}
# The DFlash rule for {facts.config["num_hidden_layers"]} layers; id i is the output of layer i, counted from 0.
layer_ids = {facts.layer_ids}{attention}

[data]
# `messages`, ShareGPT, prompt/response, text or token rows. Answers should be the target's own: a drafter learns what
# this target would say, not what another model said.
source = {_toml(data)}
max_length = {sizes["max_length"]}
heldout_share = 0.01

[layout]
encoding = "{encoding}"            # {why}
shard_tokens = {sizes["shard_tokens"]}        # one job, one object: {sizes["shard_tokens"] * token_bytes / 1e6:.0f} MB

[run]
batch_tokens = {sizes["batch_tokens"]}        # of one forward pass; lower it when memory does not suffice
{_gpus_line(gpus, "one replica of the target each; the whole target must fit on one")}"""


def train_text(facts: RecipeFacts, gpus: int, recipe: str) -> str:
    """Content of ``train.toml``; ``recipe`` is how the command line names the pair's folder."""
    from dflash_offline.drafter.shape import shape_from_target

    sizes = drafter_sizes(facts.config)
    drafter = DrafterConfig.model_validate({"num_layers": LAYERS, "block_size": BLOCK, **sizes})
    vocab = int(facts.config["vocab_size"])
    mask = facts.mask_token if facts.mask_token is not None else vocab - 1
    shape = shape_from_target(drafter, facts.config, facts.layer_ids, mask)
    if facts.mask_token is not None:
        mask_line = f"mask_token_id = {facts.mask_token}       # a reserved row of the target's embedding, never read"
    else:
        mask_line = (
            f"# mask_token_id: not found now ({_comment(facts.mask_problem or 'no tokenizer')}).\n"
            "# Left out, it is searched when training starts: a row of the embedding that stands for nothing else."
        )
    small = shape.num_parameters < 100e6
    longest = extract_sizes(facts.config, len(facts.layer_ids), gpus)["max_length"]
    context, anchors, rows = (max(4096, longest), 512, 8) if gpus else (max(CPU_LENGTH, longest), 16, 2)
    rate = "2e-3" if small else "6e-4"
    return f"""\
# Stage two for {_comment(facts.model)}: a drafter of {shape.num_parameters / 1e6:,.0f} M parameters.
#   dflash-offline train {recipe}      run it again to resume
cache = {_toml(f"runs/{facts.name}/cache")}
run = {_toml(f"runs/{facts.name}/run")}

[drafter]
num_layers = {LAYERS}
block_size = {BLOCK}              # proposes up to {BLOCK - 1} tokens a round
num_heads = {sizes["num_heads"]}
num_kv_heads = {sizes["num_kv_heads"]}
head_dim = {sizes["head_dim"]}
intermediate_size = {sizes["intermediate_size"]}
{mask_line}
# For long contexts let all layers but the last see a window only: sliding_window = 2048

[rows]
context_tokens = {context}        # whole documents are packed into rows of this size; at least data.max_length
anchors_per_document = {anchors:<6} # draft blocks trained of a document in each epoch
rows_per_step = {rows}             # {rows * context:,} tokens a step, whatever the number of GPUs

[loss]
name = "ce"                   # as published; "d-pace" (arXiv 2605.18810) did better on SmolLM2-135M

[optimizer]
learning_rate = {rate}          # 6e-4 at width 4096; small drafters take more
warmup_share = 0.04

[training]
epochs = 6
{_gpus_line(gpus, "after extraction; to run both stages at once give each its own, e.g. 0-4 and 5-7")}"""


def _gpus_line(gpus: int, why: str) -> str:
    if gpus < 2:
        return '# gpus = "0-7"              # default: one GPU, or the CPU\n'
    return f'gpus = "0-{gpus - 1}"                # {why}\n'


def _toml(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _comment(text: str) -> str:
    return " ".join(text.split())
