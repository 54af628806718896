"""Models of text, sound and other sequences, of other libraries.

How a model is listed is left to ``catalogue``.
"""

# ruff: noqa: E501
# fmt: off

from __future__ import annotations

import importlib

import torch
from torch import nn

from .catalogue import add, by_class, sequence, sound, tokens

__all__: list[str] = []

LAYERS = {"dim": 32, "depth": 3, "heads": 4}
for name, more in {
    "plain": {}, "rotary": {"rotary_pos_emb": True}, "alibi": {"alibi_pos_bias": True, "alibi_num_heads": 2},
    "t5_bias": {"rel_pos_bias": True}, "rmsnorm": {"use_rmsnorm": True}, "glu": {"ff_glu": True},
    "dropout": {"attn_dropout": 0.1, "ff_dropout": 0.1}, "qk_norm": {"attn_qk_norm": True},
    "kv_heads": {"attn_kv_heads": 2}, "sandwich": {"sandwich_norm": True}, "macaron": {"macaron": True},
}.items():
    add(name, "x_transformers", lambda m, o=more: m.TransformerWrapper(num_tokens=64, max_seq_len=64, attn_layers=m.Decoder(**LAYERS, **o)), tokens())
add("encoder", "x_transformers", lambda m: m.TransformerWrapper(num_tokens=64, max_seq_len=64, attn_layers=m.Encoder(**LAYERS)), tokens())
add("continuous", "x_transformers", lambda m: m.ContinuousTransformerWrapper(dim_in=32, dim_out=16, max_seq_len=64, attn_layers=m.Encoder(**LAYERS)), sequence())

add("wav2vec2", "torchaudio.models", lambda m: m.wav2vec2_model("group_norm", [(32, 10, 5), (32, 3, 4)], False, 32, 0.1, 8, 2, 3, 4, 0.1, 64, 0.1, 0.1, False, 0.1, 8), lambda b, n: (torch.randn(b, 100 * n),))
add("conformer", "torchaudio.models", lambda m: m.Conformer(32, 4, 64, 3, 7), lambda b, n: (torch.randn(b, n, 32), torch.full((b,), n)))
add("conv_tasnet", "torchaudio.models", lambda m: m.ConvTasNet(2, 16, 32, 3, 16, 32, 2, 2), sound())
add("deepspeech", "torchaudio.models", lambda m: m.DeepSpeech(32, 64, 10), lambda b, n: (torch.randn(b, 1, n, 32),))
add("wavernn", "torchaudio.models", lambda m: m.WaveRNN([4, 4, 4], 16, 64, n_res_block=2, n_rnn=32, n_fc=32, n_freq=16, n_hidden=16, n_output=16), lambda b, n: (torch.randn(b, 1, 64 * (n - 4)), torch.randn(b, 1, 16, n)))
add("conformer", "conformer", lambda m: m.Conformer(dim=32, depth=3, dim_head=16, heads=2), sequence())
add(
    "encodec", "encodec.modules", lambda m: m.SEANetEncoder(dimension=32, n_filters=4, ratios=[4, 2]), sound(32)
)
by_class("speechbrain.nnet.normalization", sequence(), LayerNorm={"input_size": 32})

add("performer", "performer_pytorch", lambda m: m.PerformerLM(num_tokens=64, max_seq_len=64, dim=32, depth=3, heads=4, dim_head=8), tokens())
add("reformer", "reformer_pytorch", lambda m: m.ReformerLM(num_tokens=64, dim=32, depth=2, max_seq_len=64, heads=4, bucket_size=8, n_hashes=2), tokens())
add("perceiver", "perceiver_pytorch", lambda m: m.Perceiver(input_channels=3, input_axis=2, num_freq_bands=4, max_freq=8.0, depth=2, num_latents=8, latent_dim=32, num_classes=10), lambda b, n: (torch.randn(b, n, n, 3),))
add("linear_attention", "linear_attention_transformer", lambda m: m.LinearAttentionTransformerLM(num_tokens=64, dim=32, heads=4, depth=3, max_seq_len=64), tokens())
add("nystromformer", "nystrom_attention", lambda m: m.Nystromformer(dim=32, dim_head=8, heads=4, depth=3, num_landmarks=8), sequence())
add("sinkhorn", "sinkhorn_transformer", lambda m: m.SinkhornTransformerLM(num_tokens=64, dim=32, heads=4, depth=2, max_seq_len=64, bucket_size=8), tokens())
add("h_transformer", "h_transformer_1d", lambda m: m.HTransformer1D(num_tokens=64, dim=32, depth=2, max_seq_len=64, heads=4, dim_head=8, block_size=8), tokens())
add("axial", "axial_attention", lambda m: m.AxialAttention(dim=32, heads=4, num_dimensions=2), lambda b, n: (torch.randn(b, 8, 8, 32),))
add("gpt", "litgpt", lambda m: m.GPT(m.Config(n_layer=3, n_head=4, n_embd=32, vocab_size=64, padded_vocab_size=64, block_size=64)), tokens())
add("mamba", "mambapy.mamba", lambda m: m.Mamba(m.MambaConfig(d_model=32, n_layers=3)), sequence())
add("enformer", "enformer_pytorch", lambda m: m.Enformer.from_hparams(dim=384, depth=1, heads=4, target_length=8, output_heads={"human": 5}), lambda b, n: (torch.randn(b, 1024, 4),))

add("linformer", "linformer", lambda m: m.LinformerLM(64, 32, 32, 3, k=8, heads=4), lambda b, n: (torch.randint(1, 64, (b, 32)),))
add("local", "local_attention", lambda m: m.LocalTransformer(num_tokens=64, max_seq_len=64, dim=32, depth=3, local_attn_window_size=8, heads=4, dim_head=8), tokens())
add("routed", "colt5_attention", lambda m: m.ConditionalRoutedTransformerBlock(32, num_heavy_attn_tokens_q=8, num_heavy_attn_tokens_kv=8, num_heavy_ff_tokens=8, light_dim_head=8, light_heads=2, light_window_size=8, heavy_dim_head=8, heavy_heads=2), sequence())
add("memory", "product_key_memory", lambda m: nn.Sequential(nn.Linear(32, 32), m.PKM(32, heads=2, num_keys=16, topk=4, dim_head=16), nn.Linear(32, 4)), sequence())
add("llama3", "torchtune.models.llama3", lambda m: m.llama3(vocab_size=64, num_layers=3, num_heads=4, num_kv_heads=2, embed_dim=32, max_seq_len=64), tokens())
add("gemma", "torchtune.models.gemma", lambda m: m.gemma(vocab_size=64, num_layers=3, num_heads=4, head_dim=8, num_kv_heads=1, embed_dim=32, intermediate_dim=64, max_seq_len=64), tokens())
add("lora_llama3", "torchtune.models.llama3", lambda m: m.lora_llama3(["q_proj", "v_proj"], vocab_size=64, num_layers=3, num_heads=4, num_kv_heads=2, embed_dim=32, max_seq_len=64, lora_rank=4, lora_alpha=8), tokens())
add("clip_vision", "torchtune.models.clip", lambda m: m.clip_vision_encoder(tile_size=32, patch_size=8, embed_dim=32, num_layers=3, num_heads=4), lambda b, n: (torch.randn(b, 1, 1, 3, 32, 32),))
for name, more in {"gqa": {"n_query_groups": 2}, "parallel": {"parallel_residual": True, "shared_attention_norm": True}, "rms": {"norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "intermediate_size": 64}, "moe": {"norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMoE", "intermediate_size": 64, "n_expert": 4, "n_expert_per_token": 2}, "window": {"sliding_window_size": 8, "sliding_window_indices": [0, 1, 0]}}.items():
    add(f"gpt_{name}", "litgpt", lambda m, o=more: m.GPT(m.Config(**{"n_layer": 3, "n_head": 4, "n_embd": 32, "vocab_size": 64, "padded_vocab_size": 64, "block_size": 64, **o})), tokens())
add("whisper", "whisper.model", lambda m: m.Whisper(m.ModelDimensions(16, 32, 32, 4, 2, 64, 32, 32, 4, 2)), lambda b, n: (torch.randn(b, 16, 64), torch.randint(1, 64, (b, n))))
add("snac", "snac", lambda m: m.SNAC(encoder_dim=8, encoder_rates=[2, 2], decoder_dim=32, decoder_rates=[2, 2], attn_window_size=4, codebook_size=16, codebook_dim=4, vq_strides=[2, 1]), sound(16))
add("tcn", "pytorch_tcn", lambda m: m.TCN(8, [16, 16, 16], kernel_size=3), lambda b, n: (torch.randn(b, 8, n),))
add("cfc", "ncps.torch", lambda m: m.CfC(8, 16, proj_size=4), sequence(8))
add("ltc", "ncps.torch", lambda m: m.LTC(8, importlib.import_module("ncps.wirings").AutoNCP(12, 4)), sequence(8))
add("crf", "torchcrf", lambda m: _Tagger(m.CRF(5, batch_first=True)), lambda b, n: (torch.randn(b, n, 8), torch.randint(5, (b, n)), torch.arange(n)[None] < torch.randint(3, n, (b,))[:, None].clamp(min=3)))
add("entmax", "entmax", lambda m: nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8), m.Entmax15(dim=-1), nn.Linear(8, 8), m.Sparsemax(dim=-1)), sequence())
add("mel", "nnAudio.features", lambda m: nn.Sequential(m.MelSpectrogram(sr=8000, n_fft=64, n_mels=16, hop_length=32, verbose=False, trainable_mel=True), nn.Conv1d(16, 8, 3), nn.ReLU(), nn.Conv1d(8, 4, 3)), lambda b, n: (torch.randn(b, 32 * n),))
add("conv_tasnet", "asteroid.models", lambda m: m.ConvTasNet(2, n_blocks=2, n_repeats=2, bn_chan=8, hid_chan=16, skip_chan=8, n_filters=16), lambda b, n: (torch.randn(b, 320 * n),))
add("retnet", "torchscale.architecture.retnet", lambda m: m.RetNetDecoder(importlib.import_module("torchscale.architecture.config").RetNetConfig(decoder_embed_dim=32, decoder_value_embed_dim=64, decoder_retention_heads=4, decoder_ffn_embed_dim=64, decoder_layers=3, vocab_size=64), embed_tokens=nn.Embedding(64, 32)), tokens())
add("palm", "palm_pytorch", lambda m: m.PaLM(num_tokens=64, dim=32, depth=3, heads=4, dim_head=8), tokens())
add("routing", "routing_transformer", lambda m: m.RoutingTransformerLM(num_tokens=64, dim=32, heads=4, depth=2, max_seq_len=64, window_size=8, n_local_attn_heads=2), tokens())
add("soft_moe", "soft_moe_pytorch", lambda m: nn.Sequential(nn.Linear(32, 32), m.SoftMoE(dim=32, seq_len=32, num_experts=4), nn.Linear(32, 8)), sequence())
add("st_moe", "st_moe_pytorch", lambda m: m.SparseMoEBlock(m.MoE(dim=32, num_experts=4, gating_top_n=2, expert_hidden_mult=2)), sequence())
add("mixture", "mixture_of_experts", lambda m: m.MoE(dim=32, num_experts=4, hidden_dim=64), sequence())
add("taylor", "taylor_series_linear_attention", lambda m: nn.Sequential(nn.Linear(32, 32), m.TaylorSeriesLinearAttn(dim=32, dim_head=8, heads=2), nn.Linear(32, 8)), sequence())
add("hooked", "transformer_lens", lambda m: m.HookedTransformer(m.HookedTransformerConfig(n_layers=3, d_model=32, n_ctx=64, d_head=8, d_vocab=64, act_fn="gelu", device="cpu")), tokens())
add("lora", "loralib", lambda m: nn.Sequential(m.Embedding(64, 32, r=4), m.Linear(32, 32, r=4), nn.ReLU(), m.MergedLinear(32, 96, r=4, enable_lora=[True, False, True]), nn.Linear(96, 8)), tokens())


class _Tagger(nn.Module):
    def __init__(self, crf: nn.Module) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))
        self.crf = crf

    def forward(self, x: torch.Tensor, tags: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return -self.crf(self.features(x), tags, mask, reduction="mean")
