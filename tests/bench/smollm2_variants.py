"""Recipes tried on the 7,273 SmolLM2 conversations, by expected gain, and what each costs.

What the plain recipe (6 epochs, about 680 steps, acceptance length 2.54) lacks, and so what comes first:

- Updates. A step averages 64 conversations, 6,000 blocks, 85,000 predictions; at loss 2.4 the gradient's noise is far
  below its mean, so most of that averaging is wasted. 12 epochs at 8 conversations a step are 10,900 updates.
- Learning rate. 6e-4 was chosen for drafters 4,096 wide; at width 576 the same relative change of a layer's output
  allows about 4,096/576 = 7 times as much. And the run whose cosine was planned for 12 epochs was better after 6 (2.81)
  than the one that had gone to zero (2.54): the sum of learning rates was too small, not its tail too hot.
- Weight where rounds end. Near acceptance length 3 a position k is reached in about 0.68^(k-1) of the rounds; decay 7
  weighs it exp(-(k-1)/7) = 0.87^(k-1). D-PACE weighs by the drafter's own confidence; smaller gamma is the plain form.
- Blocks. 96 of 189 valid anchors; all of them are twice the gradient an epoch, at twice the time.

Overfitting is the risk on the other side (19 M parameters, 1.4 M answer tokens): the held-out loss and the replayed
acceptance length of every run say where it begins, and weight decay and depth are listed for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

DOCUMENTS = 7273
TOKENS = 2_035_626
MEAN_VALID_ANCHORS = {96: 93.7, 192: 161.9, 448: 188.6}  # mean of min(limit, valid anchors of a conversation)
LAYER_PARAMETERS = 2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536
HEAD_PARAMETERS = 576 * 49152


@dataclass(frozen=True)
class Variant:
    """A training recipe as changes to ``smollm2_plain.toml`` beside this file.

    Attributes:
        changes: dotted recipe keys and their values; None removes a key.
        expected: gain in acceptance length over the line it builds on, guessed beforehand.
        why: the reasoning, in one line.
        cache: which cache it trains from; ``wide`` keeps twelve layers instead of five.
        needs: what is missing before it can run, or empty.
    """

    changes: dict[str, Any]
    expected: str = ""
    why: str = ""
    cache: str = "main"
    needs: str = ""


def per_step(documents: int, anchors: int = 96) -> dict[str, Any]:
    """Rows that hold about ``documents`` conversations of 280 tokens a step, one row if they fit 4,608 tokens."""
    rows = max(1, documents // 16)
    row_documents = documents // rows
    context = -(-max(row_documents * 288, 576) // 128) * 128
    slots = None if anchors > 96 else -(-row_documents * 96 // 8) * 8
    return {
        "rows.context_tokens": context,
        "rows.rows_per_step": rows,
        "rows.anchors_per_document": anchors,
        "rows.anchor_slots": slots,
    }


TWELVE = {"training.epochs": 12}
FAST = {**TWELVE, **per_step(16), "optimizer.learning_rate": 2e-3, "optimizer.betas": [0.9, 0.95]}
BEST_GUESS = {**FAST, "loss.name": "d-pace"}

VARIANTS: dict[str, Variant] = {
    "plain": Variant({}, "0 (2.54)", "the plain recipe: 6 epochs, 64 conversations a step, 6e-4"),
    "12ep-b16-2e-3": Variant(
        FAST, "+0.6", "eight times the updates and three times the rate: the two things it lacks at once"
    ),
    "12ep-b16-2e-3-dpace": Variant(
        BEST_GUESS, "+0.05 to +0.15", "weights follow the drafter's confidence: more weight where rounds end"
    ),
    "12ep-b16-2e-3-dpace-all": Variant(
        {**BEST_GUESS, **per_step(16, 448)}, "+0.05 to +0.1", "every valid anchor each epoch instead of half of them"
    ),
    "12ep-b8-2e-3-dpace": Variant(
        {**BEST_GUESS, **per_step(8)}, "-0.05 to +0.05", "10,900 updates; the gain of more updates should flatten here"
    ),
    "12ep-b16-1e-3-dpace": Variant(
        {**BEST_GUESS, "optimizer.learning_rate": 1e-3}, "-0.1 to 0", "brackets the learning rate from below"
    ),
    "12ep-b16-4e-3-dpace": Variant(
        {**BEST_GUESS, "optimizer.learning_rate": 4e-3, "optimizer.warmup_share": 0.08},
        "-0.2 to +0.1",
        "brackets it from above: the width rule's own value; may be unstable early, hence the longer warm-up",
    ),
    "12ep-b16-2e-3-gamma3": Variant(
        {**FAST, "loss.gamma": 3.0}, "as D-PACE", "the plain form of D-PACE's idea; tells the two apart"
    ),
    "12ep-b16-2e-3-dpace-init": Variant(
        {**BEST_GUESS, "drafter.init_from": "{init}"},
        "+0.05 to +0.25",
        "the draft layers have the target's own shape: start them from its last five layers and its final norm, "
        "so that MLPs and output already speak the head's language",
    ),
    "12ep-b16-2e-3-dpace-8layers": Variant(
        {**BEST_GUESS, "drafter.num_layers": 8},
        "+0.05 to +0.15",
        "more rounds of attention between the block's positions; more parameters to overfit with",
    ),
    "12ep-b16-2e-3-dpace-wd": Variant(
        {**BEST_GUESS, "optimizer.weight_decay": 0.1}, "0 to +0.05", "if held-out loss turns up late"
    ),
    "12ep-b16-2e-3-dpace-linear": Variant(
        {**BEST_GUESS, "optimizer.schedule": "linear"}, "0 to +0.03", "linear to zero often beats cosine slightly"
    ),
    "12ep-b64-2e-3-dpace": Variant(
        {**BEST_GUESS, **per_step(64)}, "-0.2", "separates the learning rate's gain from that of more updates"
    ),
    "12ep-b16-2e-3-dpace-block12": Variant(
        {**BEST_GUESS, "drafter.block_size": 12},
        "-0.05 to +0.05",
        "a quarter less compute; rounds longer than 12 are rare at acceptance length 3",
    ),
    "12ep-b16-2e-3-dpace-block8": Variant(
        {**BEST_GUESS, "drafter.block_size": 8},
        "-0.15",
        "half the compute, but 0.68^7 = 7 % of the rounds would go beyond",
    ),
    "12ep-b16-2e-3-dpace-wide": Variant(
        {**BEST_GUESS, "drafter.target_layer_ids": [1, 4, 8, 11, 14, 17, 20, 23, 27, 29]},
        "0 to +0.1",
        "ten target layers in the context feature instead of five",
        cache="wide",
    ),
    "12ep-b16-2e-3-dpace-late": Variant(
        {**BEST_GUESS, "drafter.target_layer_ids": [4, 13, 20, 25, 29]},
        "-0.05 to +0.05",
        "five layers moved towards the end; the last holds the target's own belief about the anchor only",
        cache="wide",
    ),
    "12ep-b16-2e-3-dpace-ema": Variant(
        BEST_GUESS, "0 to +0.05", "averaged weights; small after a schedule that ends at zero", needs="EMA of weights"
    ),
    "12ep-b16-muon-dpace": Variant(
        BEST_GUESS, "+0.05 to +0.15", "orthogonalised updates use few steps better than AdamW", needs="Muon"
    ),
}


def merge(recipe: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The recipe with dotted keys set, or removed where the value is None."""
    merged = {key: dict(value) if isinstance(value, dict) else value for key, value in recipe.items()}
    for dotted, value in changes.items():
        *tables, key = dotted.split(".")
        place = merged
        for table in tables:
            place = place.setdefault(table, {})
        if value is None:
            place.pop(key, None)
        else:
            place[key] = value
    return merged


def block_flops(num_layers: int = 5, block_size: int = 16) -> float:
    """Floating-point operations of one draft block in training.

    Matrix products only: layers forward and backward (three times forward), the frozen head forward and for its input
    (twice forward) at the ``block_size - 1`` positions that predict. Attention adds about 15 % to the layers.
    """
    layers = 2 * num_layers * LAYER_PARAMETERS * block_size * 1.15
    head = 2 * HEAD_PARAMETERS * (block_size - 1)
    return 3 * layers + 2 * head


def estimate(changes: dict[str, Any], recipe: dict[str, Any], tflops: float, row_seconds: float) -> dict[str, float]:
    """Steps, blocks, FLOPs and seconds of a run: arithmetic at ``tflops``, and a floor of ``row_seconds`` a row."""
    full = merge(recipe, changes)
    rows_config, drafter = full["rows"], full["drafter"]
    blocks = DOCUMENTS * MEAN_VALID_ANCHORS[rows_config["anchors_per_document"]] * full["training"]["epochs"]
    rows = TOKENS * full["training"]["epochs"] / (rows_config["context_tokens"] * 0.975)
    flops = blocks * block_flops(drafter["num_layers"], drafter["block_size"])
    return {
        "steps": rows / rows_config["rows_per_step"],
        "blocks": blocks,
        "petaflop": flops / 1e15,
        "seconds": max(flops / (tflops * 1e12), rows * row_seconds),
    }
