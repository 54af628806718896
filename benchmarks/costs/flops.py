"""FLOPs of large mixtures of experts, counted from the kernels they would run and by hand.

To reproduce: ``python -m benchmarks.costs.flops`` (meta device, no weights; a few minutes, 2 GB).

By hand: twice the weights a token meets in products, and attention over the pairs that the causal mask lets
through (gpt-oss's attention, which is not fused, makes all pairs).
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import torch

import autopipe
from autopipe.measure import device, estimate


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    """A published configuration: what transformers needs to make it, and its sizes for the hand count.

    ``products`` are the weights that a token meets in its products; ``attention`` is layers × heads × (query
    width + value width).
    """

    name: str
    kind: str
    config: dict[str, Any]
    products: int
    attention: int
    is_fused: bool = True


def experts(
    name: str,
    kind: str,
    *,
    hidden: int,
    inner: tuple[str, int],
    layers: int,
    heads: tuple[int, int, int],
    experts: tuple[str, int, int],
    vocabulary: int,
    is_fused: bool = True,
) -> Known:
    """Layers of grouped attention and gated experts; ``heads``: of queries, of keys and values, their width.

    ``inner`` and ``experts`` have the configuration's own name for the size; of ``experts`` so many in all,
    so many for a token.
    """
    (queries, keys, width), (called, n, chosen) = heads, experts
    attention = hidden * (queries + 2 * keys) * width + queries * width * hidden
    layer = attention + chosen * 3 * hidden * inner[1] + hidden * n
    config = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        inner[0]: inner[1],
        "num_hidden_layers": layers,
        "num_attention_heads": queries,
        "num_key_value_heads": keys,
        "head_dim": width,
        called: n,
        "num_experts_per_tok": chosen,
    }
    products = layers * layer + hidden * vocabulary
    return Known(name, kind, config, products, layers * queries * 2 * width, is_fused)


def deepseek() -> Known:
    h, layers, heads, v = 7168, 61, 128, 129280
    latent = h * 1536 + 1536 * heads * 192 + h * 576 + 512 * heads * 256 + heads * 128 * h
    routed = 9 * 3 * h * 2048 + h * 256
    products = layers * latent + 3 * 3 * h * 18432 + (layers - 3) * routed + h * v
    return Known("DeepSeek-V3", "DeepseekV3", {}, products, layers * heads * (192 + 128))


MODELS = (
    experts(
        "Mixtral-8x22B",
        "Mixtral",
        hidden=6144,
        inner=("intermediate_size", 16384),
        layers=56,
        heads=(48, 8, 128),
        experts=("num_local_experts", 8, 2),
        vocabulary=32768,
    ),
    experts(
        "Qwen3-235B-A22B",
        "Qwen3Moe",
        hidden=4096,
        inner=("moe_intermediate_size", 1536),
        layers=94,
        heads=(64, 4, 128),
        experts=("num_experts", 128, 8),
        vocabulary=151936,
    ),
    deepseek(),
    experts(
        "gpt-oss-120b",
        "GptOss",
        hidden=2880,
        inner=("intermediate_size", 2880),
        layers=36,
        heads=(64, 8, 64),
        experts=("num_local_experts", 128, 4),
        vocabulary=201088,
        is_fused=False,
    ),
)


def counted(known: Known, batch: int, seq: int) -> int:
    """FLOPs of the model's forward, as its cost table has them."""
    import transformers

    config = getattr(transformers, f"{known.kind}Config")(**known.config, use_cache=False)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        ids = torch.zeros(batch, seq, dtype=torch.long)
    table = estimate(autopipe.capture(model, (), {"input_ids": ids, "labels": ids}), device("H200"))
    return table.total(table.costs).flops


def by_hand(known: Known, batch: int, seq: int) -> tuple[int, int]:
    """With the pairs that a causal mask lets through, and with all."""
    products = 2 * batch * seq * known.products
    pairs = seq * (seq + 1) // 2, seq * seq
    return products + 2 * batch * pairs[0] * known.attention, products + 2 * batch * pairs[
        1
    ] * known.attention


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=2048)
    asked = parser.parse_args()
    print("| model | counted, TFLOP | by hand | apart |\n|---|--:|--:|--:|")
    for known in MODELS:
        found = counted(known, asked.batch, asked.seq)
        causal, whole = by_hand(known, asked.batch, asked.seq)
        hand = causal if known.is_fused else whole
        apart = f"{found / hand - 1:+.2%}"
        print(f"| {known.name} | {found / 1e12:.2f} | {hand / 1e12:.2f} | {apart} |", flush=True)


if __name__ == "__main__":
    main()
