"""Small transformers configs by rule: every attribute is shrunk by what its name says it is.

No model is named here. Which models are walked is left to ``zoo``, whether a config works to ``trial``:
a ladder of ever milder rules is tried until the model builds and runs.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any, Literal

__all__ = ["RUNGS", "Rung", "shrink", "walk"]


@dataclasses.dataclass(frozen=True, slots=True)
class Rung:
    """One strength of shrinking: the sizes that its rules give to widths, heads and images."""

    name: str
    widths: Literal["fixed", "scaled", "own"] = "fixed"
    width: int = 64
    heads: int = 4
    layers: int = 4
    image: int = 32
    is_rebuilt: bool = True

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


RUNGS = (
    Rung("small"),
    Rung("small, set in place", is_rebuilt=False),
    Rung("small, larger image", image=64),
    Rung("small, 8 layers", layers=8, image=64),
    Rung("scaled", "scaled", image=64),
    Rung("scaled, 8 layers", "scaled", layers=8, image=64),
    Rung("wider, image of 224", width=128, image=224),
    Rung("own widths", "own", image=64),
    Rung("own widths, set in place", "own", image=64, is_rebuilt=False),
    Rung("own widths and image", "own", layers=8, image=1024),
)
"""Tried in turn until the model builds and runs."""

_LAYERS = re.compile(
    r"(num|n)_(\w+_)?(hidden_)?(layers?|blocks)$|^(\w+_)?layers$|^depth$|^(\w+_)?(depth|num_layers|n_layers)$"
)
_NOT_LAYERS = re.compile(r"dense|feature|adapter|conv_pos|drop|shared|skip|window|next|mtp|feat_|_token")
_HEADS = re.compile(
    r"^(\w+_)?(num|n)_(\w+_)?heads?$|^(\w+_)?attention_heads$|^n_head$|^heads$|^num_(\w+_)?attention_heads$"
)
_KV_HEADS = re.compile(r"(key_value|kv)_heads?$|num_kv|n_head_kv|query_groups")
_HEAD_DIM = re.compile(
    r"^(\w+_)?head_(dim|size)$|^mamba_d_head$|^(d_kv|d_head|attention_head_dim|kv_channels|attention_head_size)$"
)
_WIDTH = re.compile(
    r"^(\w+_)?(hidden_size|hidden_dim|d_model|n_embd|embed_dim|embedding_size|embedding_dim|d_embed|dim|"
    r"model_dim|output_dim|projection_dim|proj_dim|channels|hidden_channels|width|emb_dim|embed_size|"
    r"lru_width|embed_size_per_head|output_hidden_size|out_hidden_size|num_channels_hidden)$"
)
_INNER = re.compile(
    r"^(\w+_)?(intermediate_size|intermediate_dim|ffn_dim|n_inner|d_ff|d_inner|inner_dim|ffn_hidden_size|"
    r"mlp_dim|feed_forward_\w+|ff_dim|mlp_hidden_size|expert_ffn_hidden_size|moe_intermediate_size)$"
)
_VOCAB = re.compile(r"^(\w+_)?(vocab_size|vocabulary_size|n_vocab|vocab)$|^vocab_size_\w+$")
_TOKEN = re.compile(r"(token_id|token_index|_token_ids|_id|token_idx)$")
_EXPERTS = re.compile(r"^(\w+_)?(num|n)_(\w+_)?(local_)?experts$|^n_routed_experts$|^(moe_)?num_experts$")
_POSITIONS = re.compile(
    r"max_(\w+_)?(position_embeddings|positions|seq_len|sequence_length|length)$|^n_positions$|^n_ctx$"
)
_LOW_RANK = re.compile(r"lora_rank$|^(\w+_)?rank$|^time_step_rank$|_rank_dim$")
_IMAGE = re.compile(r"^(\w+_)?(image_size|img_size|input_size|crop_size|image_width|image_height)$")

VOCAB = 128
POSITIONS = 64


def walk(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, config) of a config and of every config nested in it."""
    yield path, config
    for name, value in vars(config).items():
        if _is_config(value):
            yield from walk(value, f"{path}.{name}" if path else name)


def shrink(config: Any, rung: Rung) -> Any:
    """``config`` and its nested configs, shrunk as strongly as ``rung`` says.

    Rebuilt from their changed fields, so that sizes derived from others follow; or changed in place.
    """
    changes = _changes(config, rung)
    for name, value in vars(config).items():
        if _is_config(value):
            changes[name] = shrink(value, rung)
    if rung.is_rebuilt:
        fields = inspect.signature(type(config).__init__).parameters
        return type(config)(**{n: v for n, v in changes.items() if n in fields})
    for name, value in changes.items():
        _set(config, name, value)
    return config


def _is_config(value: Any) -> bool:
    return hasattr(value, "to_dict") and hasattr(value, "model_type")


def _changes(config: Any, rung: Rung) -> dict[str, Any]:
    names = {n: v for n, v in vars(config).items() if not n.startswith("_")}
    factor = max(1, _hidden(names) // 64) if rung.widths == "scaled" else 1
    n_old, n_new = _layer_count(names, rung)
    out = {}
    for name, old in names.items():
        new = old
        if isinstance(old, (list, tuple)):
            new = _list(name, old, rung, n_old, n_new)
        elif isinstance(old, dict):
            new = _rope(old, rung)
        elif isinstance(old, int) and not isinstance(old, bool):
            new = _number(name, old, rung, names, factor)
        elif old is None:
            new = _unset(name, names, rung)
        if new != old:
            out[name] = new
    return out


def _unset(name: str, names: dict[str, Any], rung: Rung) -> Any:
    """A value for a field without a default that some models cannot do without."""
    if name == "default_language" and names.get("languages"):
        return names["languages"][0]
    if name == "vocab_size":
        return VOCAB
    if name in ("image_token_id", "image_token_index"):
        return VOCAB - 7
    if rung.widths == "fixed" and (name == "head_dim" or _KV_HEADS.search(name)):
        return rung.head_dim if name == "head_dim" else rung.heads
    return None


def _hidden(names: dict[str, Any]) -> int:
    """The config's main width."""
    found = [names.get(n) for n in ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "width")]
    return next((v for v in found if isinstance(v, int)), 64)


def _set(config: Any, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except (AttributeError, TypeError, ValueError, NotImplementedError):
        vars(config)[name] = value


def _layer_count(names: dict[str, Any], rung: Rung) -> tuple[int, int]:
    for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "depth"):
        if isinstance(names.get(name), int) and names[name] > 0:
            return names[name], min(names[name], rung.layers)
    return 0, 0


def _number(name: str, old: int, rung: Rung, names: dict[str, Any], factor: int) -> int:
    if old <= 1:
        return old
    if _LAYERS.search(name) and not _NOT_LAYERS.search(name):
        return min(old, rung.layers)
    if _VOCAB.search(name):
        return min(old, VOCAB)
    if _TOKEN.search(name):
        return old if old < VOCAB else VOCAB - 1 - old % 61
    if _IMAGE.search(name):
        return min(old, rung.image)
    if _EXPERTS.search(name):
        return min(old, 4)
    if re.search(r"^(n_group|topk_group)$", name):
        return 1
    if re.search(r"experts_per_tok|expert_topk|moe_top_?k|^moe_k$|^top_?k$|num_selected_experts", name):
        return min(old, 2)
    if _POSITIONS.search(name) and old > 256:
        return POSITIONS * 4
    if re.search(r"sliding_window|attention_window|chunk_size$|block_size$", name) and old > 64:
        return 16
    if rung.widths == "scaled":
        is_scaled = any(rule.search(name) for rule in (_KV_HEADS, _HEADS, _WIDTH, _INNER))
        return max(1, old // factor) if is_scaled and not _HEAD_DIM.search(name) else old
    return _width(name, old, rung, names) if rung.widths == "fixed" else old


def _width(name: str, old: int, rung: Rung, names: dict[str, Any]) -> int:
    if _KV_HEADS.search(name):
        heads = max((v for n, v in names.items() if _HEADS.search(n) and isinstance(v, int)), default=old)
        return rung.heads if old == heads else min(old, rung.heads // 2)
    if re.search(r"rope_head_dim|rotary_dim|rope_dim", name):
        return min(old, rung.head_dim // 2)
    if re.search(r"nope_head_dim|v_head_dim", name):
        return min(old, rung.head_dim)
    if _HEAD_DIM.search(name):
        return min(old, rung.head_dim)
    if re.search(r"^(\w+_)?(n|num)_groups$|^n_groups$", name):
        return min(old, 2)
    expand = names.get("expand", names.get("mamba_expand"))
    if expand and re.search(r"^mamba_n_heads$|^mamba_num_heads$|^n_mamba_heads$|^num_heads$", name):
        return int(expand) * rung.width // rung.head_dim
    if _HEADS.search(name):
        return min(old, rung.heads)
    if _LOW_RANK.search(name):
        return min(old, 8)
    if _INNER.search(name):
        return min(old, 2 * rung.width)
    if _WIDTH.search(name):
        return min(old, rung.width)
    return old


def _list(name: str, old: Any, rung: Rung, n_old: int, n_new: int) -> Any:
    if len(old) > 1 and len(old) == n_old != n_new:
        return type(old)(_sample(old, n_new))
    if not old or not all(isinstance(v, int) and not isinstance(v, bool) for v in old):
        return old
    if _IMAGE.search(name):
        return type(old)(min(v, rung.image) for v in old)
    if re.search(r"depths|num_blocks|layer_depths|stage_layers|layers$", name):
        return type(old)(min(v, 2) for v in old)
    if re.search(r"mrope_section", name) and rung.widths == "fixed":
        return [rung.head_dim // 2 - 2 * (rung.head_dim // 8), *[rung.head_dim // 8] * 2]
    if (
        re.search(r"hidden_sizes|embed_dims?$|channels$|encoder_hidden_sizes|dims$|widths", name)
        and rung.widths == "fixed"
    ):
        factor = max(1, min(old) // 32)
        return type(old)(max(8, v // factor) for v in old)
    if re.search(r"out_indices|_layer_ids|layer_idx|layers_\w+|_layers$|select_layer|indexes$", name):
        return type(old)(sorted({min(v, rung.layers - 1) for v in old}))
    return old


def _sample(old: Any, n_new: int) -> list[Any]:
    """``n_new`` entries that keep one of every kind that ``old`` has, in order of appearance."""
    if len(old) < n_new:
        return [old[i % len(old)] for i in range(n_new)]
    kinds = list(dict.fromkeys(map(repr, old)))
    first = [next(i for i, v in enumerate(old) if repr(v) == kind) for kind in kinds][:n_new]
    rest = [i for i in range(len(old)) if i not in first][: n_new - len(first)]
    return [old[i] for i in sorted(first + rest)]


def _rope(old: dict[Any, Any], rung: Rung) -> dict[Any, Any]:
    """RoPE settings split the head's frequencies in sections, which must add up to the smaller head."""
    if rung.widths == "fixed" and "mrope_section" in old:
        eighth = rung.head_dim // 8
        return {**old, "mrope_section": [rung.head_dim // 2 - 2 * eighth, eighth, eighth]}
    return {k: _rope(v, rung) if isinstance(v, dict) else v for k, v in old.items()}
