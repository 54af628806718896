"""Models of packages on speech, words, series, pictures and policies.

How a model is listed is left to ``catalogue``.
"""

# ruff: noqa: E501
# fmt: off

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .by_hand import ids
from .catalogue import add, by_class, fixed_image, tokens

__all__: list[str] = []


class Named(nn.Module):
    """A model whose further arguments are given by name, or of whose output one attribute is the result."""

    def __init__(self, body: nn.Module, *names: str, gives: str = "", **given: Any) -> None:
        super().__init__()
        self.body, self.names, self.gives, self.given = body, names, gives, given

    def forward(self, x: Any, *more: Tensor) -> Any:
        out = self.body(x, **dict(zip(self.names, more, strict=True)), **self.given)
        return getattr(out, self.gives) if self.gives else out


# speech: resemblyzer, squeezeformer, audio-encoders
add("voice", "resemblyzer", lambda m: m.VoiceEncoder(device="cpu", verbose=False), lambda b, n: (torch.rand(b, n, 40),))
add("squeezeformer", "squeezeformer.model", lambda m: m.Squeezeformer(num_classes=12, input_dim=16, encoder_dim=32, num_encoder_layers=4, reduce_layer_index=1, recover_layer_index=3, num_attention_heads=2, conv_kernel_size=5, input_dropout_p=0.0, feed_forward_dropout_p=0.0, attention_dropout_p=0.0, conv_dropout_p=0.0), lambda b, n: (torch.randn(b, 2 * n, 16), torch.arange(b) % 2 * 8 + 2 * n - 8))
by_class("audio_encoders_pytorch", lambda b, n: (torch.randn(b, 2, 4 * n),), AutoEncoder1d={"in_channels": 2, "channels": 16, "multipliers": [1, 1, 2], "factors": [2, 2], "num_blocks": [1, 1], "resnet_groups": 4, "bottleneck_channels": 8})


# words: palm-rlhf, uni2ts, minimamba, perceiver-io, mixture-of-attention, tiny-recursive-model, crossformer
add("palm", "palm_rlhf_pytorch", lambda m: Named(m.PaLM(num_tokens=64, dim=32, depth=2, dim_head=16, heads=2), return_loss=True), tokens())


def _patches(m: Any) -> nn.Module:
    from uni2ts.module.position import QueryKeyProjection, RotaryProjection

    turned = partial(QueryKeyProjection, proj_layer=RotaryProjection, kwargs={"max_len": 64}, partial_factor=(0.0, 0.5))
    return Named(m.TransformerEncoder(32, 2, num_heads=4, time_qk_proj_layer=turned, shared_time_qk_proj=True), "var_id", "time_id")


add("encoder", "uni2ts.module.transformer", _patches, lambda b, n: (torch.randn(b, n, 32), torch.zeros(b, n, dtype=torch.long), torch.arange(n).expand(b, n)))


def _losing(b: int, n: int) -> dict[str, Tensor]:
    """Token ids and labels, of which each row leaves out others."""
    x = ids(b, n)
    return {"input_ids": x, "labels": x.masked_fill(torch.rand(b, n) < 0.2, -100)}


add("causal", "minimamba.models", lambda m: m.MambaForCausalLM(m.MambaLMConfig(d_model=32, n_layer=2, d_state=8, vocab_size=64, device="cpu")), _losing)
add("causal", "perceiver.model.text.clm", lambda m: m.CausalLanguageModel(m.CausalLanguageModelConfig(vocab_size=64, max_seq_len=32, num_latents=8, num_channels=32, num_heads=2, num_self_attention_layers=2, cross_attention_dropout=0.0)), lambda b, n: (ids(b, n),))
add("routed", "mixture_of_attention", lambda m: m.MixtureOfAttention(32, num_routed_queries=8, num_routed_key_values=8, num_experts=2, dim_head=16, heads=2, use_triton=False, flash_attn=False), lambda b, n: (torch.randn(b, n, 32),))
add("autoregressive", "mixture_of_attention", lambda m: m.MixtureOfAutoregressiveAttention(32, num_routed_queries=4, num_routed_key_values=4, local_attn_window_size=8, num_experts=2, dim_head=16, heads=2, flash_attn=False), lambda b, n: (torch.randn(b, n, 32),))
add("refined", "tiny_recursive_model.trm", lambda m: m.TinyRecursiveModel(dim=32, num_tokens=64, network=m.MLPMixer1D(dim=32, depth=2, seq_len=16), num_refinement_blocks=2, num_latent_refinements=2), lambda b, n: (ids(b, 16), torch.randn(b, 16, 32), torch.randn(b, 16, 32), ids(b, 16)))
add("forecast", "crossformer.model.crossformer", lambda m: m.Crossformer(4, 32, 8, 4, window_size=2, factor=2, model_dim=16, feedforward_dim=32, heads_num=2, blocks_num=2), lambda b, n: (torch.randn(b, 32, 4),))


# pictures and policies: swin-transformer, unet, pfrl, hl-gauss
add("swin", "swin_transformer_pytorch", lambda m: m.SwinTransformer(hidden_dim=16, layers=(2, 2, 2, 2), heads=(1, 2, 2, 4), num_classes=4, head_dim=8, window_size=2, downscaling_factors=(4, 2, 2, 2)), fixed_image(3, 64))
add("unet", "unet_pytorch.model", lambda m: m.UNet(3, 4), fixed_image(3, 32))
add("dueling", "pfrl.q_functions", lambda m: Named(m.DuelingDQN(3, n_input_channels=4), gives="q_values"), fixed_image(4, 84))
by_class("pfrl.q_functions", lambda b, n: (torch.randn(b, 8), torch.randn(b, 2)), FCBNLateActionSAQFunction={"n_dim_obs": 8, "n_dim_action": 2, "n_hidden_channels": 32, "n_hidden_layers": 2})
add("bins", "hl_gauss_pytorch", lambda m: m.HLGaussLayer(16, network=nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16)), hl_gauss_loss={"min_value": -2.0, "max_value": 2.0, "num_bins": 16}), lambda b, n: (torch.randn(b, 16), torch.randn(b)))
