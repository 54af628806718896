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


def mixtral() -> Known:
    h, f, layers, heads, kv, v = 6144, 16384, 56, 48, 8, 32768
    layer = h * (heads + 2 * kv) * 128 + heads * 128 * h + 2 * 3 * h * f + h * 8
    config = {
        "vocab_size": v,
        "hidden_size": h,
        "intermediate_size": f,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    return Known("Mixtral-8x22B", "Mixtral", config, layers * layer + h * v, layers * heads * 256)


def qwen3() -> Known:
    h, f, layers, heads, kv, v = 4096, 1536, 94, 64, 4, 151936
    layer = h * (heads + 2 * kv) * 128 + heads * 128 * h + 8 * 3 * h * f + h * 128
    config = {
        "vocab_size": v,
        "hidden_size": h,
        "moe_intermediate_size": f,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    }
    return Known("Qwen3-235B-A22B", "Qwen3Moe", config, layers * layer + h * v, layers * heads * 256)


def deepseek() -> Known:
    h, layers, heads, v = 7168, 61, 128, 129280
    latent = h * 1536 + 1536 * heads * 192 + h * 576 + 512 * heads * 256 + heads * 128 * h
    routed = 9 * 3 * h * 2048 + h * 256
    products = layers * latent + 3 * 3 * h * 18432 + (layers - 3) * routed + h * v
    return Known("DeepSeek-V3", "DeepseekV3", {}, products, layers * heads * (192 + 128))


def gpt_oss() -> Known:
    h, f, layers, heads, kv, v = 2880, 2880, 36, 64, 8, 201088
    layer = h * (heads + 2 * kv) * 64 + heads * 64 * h + 4 * 3 * h * f + h * 128
    config = {
        "vocab_size": v,
        "hidden_size": h,
        "intermediate_size": f,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": 64,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
    }
    return Known("gpt-oss-120b", "GptOss", config, layers * layer + h * v, layers * heads * 128, False)


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
    return tuple(products + 2 * batch * n * known.attention for n in (seq * (seq + 1) // 2, seq * seq))  # type: ignore[return-value]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=2048)
    asked = parser.parse_args()
    print("| model | counted, TFLOP | by hand | apart |\n|---|--:|--:|--:|")
    for make in (mixtral, qwen3, deepseek, gpt_oss):
        known = make()
        found, (causal, whole) = (
            counted(known, asked.batch, asked.seq),
            by_hand(known, asked.batch, asked.seq),
        )
        hand = causal if known.is_fused else whole
        print(
            f"| {known.name} | {found / 1e12:.2f} | {hand / 1e12:.2f} | {found / hand - 1:+.2%} |", flush=True
        )


if __name__ == "__main__":
    main()
