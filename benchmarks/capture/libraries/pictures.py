"""Networks of pictures and predictors of noise that are listed nowhere else, of timm and diffusers.

How a model is listed is left to ``catalogue``.
"""

# ruff: noqa: E501
# fmt: off

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .catalogue import add, fixed_image, image

__all__: list[str] = []

for name in ["test_vit", "test_byobnet", "test_resnet", "test_mambaout", "test_nfnet", "test_convnext", "test_efficientnet", "pvt_v2_b0", "ghostnetv2_100", "mobileone_s1", "resnetaa34d", "regnetz_005", "hgnetv2_b0", "swiftformer_xs", "inception_next_atto", "vit_relpos_small_patch16_224", "vit_srelpos_small_patch16_224", "mvitv2_tiny", "csatv2", "fbnetc_100", "mixnet_s", "dpn48b", "darknet17", "gcresnet33ts", "seresnext26t_32x4d", "convnextv2_atto", "efficientformerv2_s0", "mobilenetv4_hybrid_medium", "flexivit_small", "vit_xsmall_patch16_clip_224", "shvit_s1", "rdnet_tiny", "nextvit_small"]:
    side = 240 if name == "flexivit_small" else 224 if any(s in name for s in ("224", "mvitv2", "pvt", "nextvit", "rdnet", "swiftformer", "efficientformer", "shvit", "csat")) else 160 if name.startswith("test_") else 96
    add(name, "timm", lambda m, n=name: m.create_model(n, num_classes=10), fixed_image(side=side))
add("features", "timm", lambda m: m.create_model("resnet10t", features_only=True), image())
add("drop_path", "timm", lambda m: m.create_model("vit_tiny_patch16_224", num_classes=10, img_size=64, drop_path_rate=0.3, drop_rate=0.1, global_pool="avg"), fixed_image())
add("dynamic", "timm", lambda m: m.create_model("vit_tiny_patch16_224", num_classes=10, dynamic_img_size=True), image())
add("patch_drop", "timm", lambda m: m.create_model("vit_tiny_patch16_224", num_classes=10, img_size=64, patch_drop_rate=0.5, class_token=True), fixed_image())
add("no_pool", "timm", lambda m: m.create_model("vit_tiny_patch16_224", num_classes=0, img_size=64, global_pool=""), fixed_image())
add("map_pool", "timm", lambda m: m.create_model("vit_tiny_patch16_224", num_classes=3, img_size=64, global_pool="map", class_token=False, qk_norm=True, init_values=0.1), fixed_image())
add("checkpointed", "timm", lambda m: _checkpointed(m.create_model("convnext_atto", num_classes=3)), fixed_image())

HEADS = {"num_attention_heads": 2, "attention_head_dim": 8}


def steps(b: int) -> torch.Tensor:
    """A step of time for each row."""
    return torch.randint(1, 100, (b,))


add("lumina", "diffusers", lambda m: m.LuminaNextDiT2DModel(sample_size=16, patch_size=2, in_channels=4, hidden_size=16, num_layers=2, num_attention_heads=2, num_kv_heads=1, multiple_of=16, ffn_dim_multiplier=None, norm_eps=1e-5, learn_sigma=False, qk_norm=True, cross_attention_dim=16), lambda b, n: {"hidden_states": torch.randn(b, 4, 16, 16), "timestep": torch.rand(b), "encoder_hidden_states": torch.randn(b, 6, 16), "encoder_mask": torch.ones(b, 6), "image_rotary_emb": torch.polar(torch.ones(8, 8, 4), torch.randn(8, 8, 4)), "cross_attention_kwargs": {}})
add("stable_cascade", "diffusers", lambda m: m.StableCascadeUNet(in_channels=4, out_channels=4, timestep_ratio_embedding_dim=8, patch_size=1, conditioning_dim=16, block_out_channels=(16, 16), num_attention_heads=(2, 2), down_num_layers_per_block=(1, 1), up_num_layers_per_block=(1, 1), down_blocks_repeat_mappers=(1, 1), up_blocks_repeat_mappers=(1, 1), block_types_per_layer=(("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"),) * 2, clip_text_in_channels=16, clip_text_pooled_in_channels=16, clip_image_in_channels=16, clip_seq=2), lambda b, n: {"sample": torch.randn(b, 4, 8, 8), "timestep_ratio": torch.rand(b), "clip_text_pooled": torch.randn(b, 1, 16), "clip_text": torch.randn(b, 4, 16)})
add("deep_compression", "diffusers", lambda m: m.AutoencoderDC(in_channels=3, latent_channels=4, attention_head_dim=2, encoder_block_types=("ResBlock", "EfficientViTBlock"), decoder_block_types=("ResBlock", "EfficientViTBlock"), encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8), encoder_qkv_multiscales=((), (5,)), decoder_qkv_multiscales=((), (5,)), encoder_layers_per_block=(1, 1), decoder_layers_per_block=(1, 1), upsample_block_type="interpolate", downsample_block_type="stride_conv", decoder_norm_types="rms_norm", decoder_act_fns="silu"), fixed_image(3, 32))
add("hunyuan_video", "diffusers", lambda m: m.HunyuanVideoTransformer3DModel(in_channels=4, out_channels=4, **HEADS, num_layers=1, num_single_layers=2, num_refiner_layers=1, patch_size=1, patch_size_t=1, guidance_embeds=True, text_embed_dim=16, pooled_projection_dim=8, rope_axes_dim=(2, 4, 2)), lambda b, n: {"hidden_states": torch.randn(b, 4, 1, 8, 8), "timestep": steps(b), "encoder_hidden_states": torch.randn(b, 6, 16), "pooled_projections": torch.randn(b, 8), "encoder_attention_mask": torch.ones(b, 6).long(), "guidance": torch.full((b,), 6.0)})
add("mochi", "diffusers", lambda m: m.MochiTransformer3DModel(patch_size=2, **HEADS, num_layers=2, pooled_projection_dim=16, in_channels=4, text_embed_dim=16, time_embed_dim=4, activation_fn="swiglu", max_sequence_length=8), lambda b, n: {"hidden_states": torch.randn(b, 4, 2, 8, 8), "timestep": steps(b), "encoder_hidden_states": torch.randn(b, 8, 16), "encoder_attention_mask": torch.ones(b, 8).bool()})
add("lumina2", "diffusers", lambda m: m.Lumina2Transformer2DModel(sample_size=16, patch_size=2, in_channels=4, hidden_size=24, num_layers=2, num_refiner_layers=1, num_attention_heads=3, num_kv_heads=1, multiple_of=2, ffn_dim_multiplier=None, norm_eps=1e-5, scaling_factor=1.0, axes_dim_rope=(4, 2, 2), axes_lens=(128, 128, 128), cap_feat_dim=16), lambda b, n: {"hidden_states": torch.randn(b, 4, 8, 8), "timestep": torch.rand(b), "encoder_hidden_states": torch.randn(b, 8, 16), "encoder_attention_mask": torch.ones(b, 8).bool()})
add("chroma", "diffusers", lambda m: m.ChromaTransformer2DModel(patch_size=1, in_channels=4, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32, axes_dims_rope=(4, 4, 8), approximator_num_channels=8, approximator_hidden_dim=16, approximator_layers=1), lambda b, n: {"hidden_states": torch.randn(b, 16, 4), "encoder_hidden_states": torch.randn(b, 6, 32), "timestep": torch.rand(b), "img_ids": torch.randn(16, 3), "txt_ids": torch.zeros(6, 3)})
add("cogview", "diffusers", lambda m: m.CogView3PlusTransformer2DModel(patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2, out_channels=4, text_embed_dim=16, time_embed_dim=8, condition_dim=4, pos_embed_max_size=8, sample_size=8), lambda b, n: {"hidden_states": torch.randn(b, 4, 8, 8), "encoder_hidden_states": torch.randn(b, 6, 16), "timestep": steps(b), "original_size": torch.tensor([[64.0, 64.0]]).repeat(b, 1), "target_size": torch.tensor([[64.0, 64.0]]).repeat(b, 1), "crop_coords": torch.zeros(b, 2)})
add("cogvideox_autoencoder", "diffusers", lambda m: m.AutoencoderKLCogVideoX(in_channels=3, out_channels=3, down_block_types=("CogVideoXDownBlock3D",) * 2, up_block_types=("CogVideoXUpBlock3D",) * 2, block_out_channels=(8, 8), latent_channels=4, layers_per_block=1, norm_num_groups=2, temporal_compression_ratio=2), lambda b, n: (torch.randn(b, 3, 5, 16, 16),))
add("wan_autoencoder", "diffusers", lambda m: m.AutoencoderKLWan(base_dim=4, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, temperal_downsample=[False], latents_mean=[0.0] * 4, latents_std=[1.0] * 4), lambda b, n: (torch.randn(b, 3, 1, 16, 16),))
add("spatio_temporal", "diffusers", lambda m: m.UNetSpatioTemporalConditionModel(sample_size=8, in_channels=8, block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=16, num_attention_heads=4, addition_time_embed_dim=8, projection_class_embeddings_input_dim=24, down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"), up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"), num_frames=2), lambda b, n: {"sample": torch.randn(b, 2, 8, 8, 8), "timestep": torch.tensor(3.0), "encoder_hidden_states": torch.randn(b, 1, 16), "added_time_ids": torch.randn(b, 3)})
add("unet_checkpointed", "diffusers", lambda m: _checkpointed_unet(m), lambda b, n: (torch.randn(b, 3, 16, 16), steps(b)))
add("unet_classes", "diffusers", lambda m: m.UNet2DModel(sample_size=16, num_class_embeds=4, layers_per_block=1, block_out_channels=(32, 32), down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"), resnet_time_scale_shift="scale_shift", downsample_type="resnet", upsample_type="resnet", dropout=0.1), lambda b, n: {"sample": torch.randn(b, 3, 16, 16), "timestep": steps(b), "class_labels": torch.randint(4, (b,)), "return_dict": False})
add("sdxl", "diffusers", lambda m: m.UNet2DConditionModel(sample_size=16, layers_per_block=1, block_out_channels=(32, 64), cross_attention_dim=16, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), transformer_layers_per_block=(1, 2), attention_head_dim=(2, 4), use_linear_projection=True, addition_embed_type="text_time", addition_time_embed_dim=8, projection_class_embeddings_input_dim=8 * 6 + 16), lambda b, n: {"sample": torch.randn(b, 4, 16, 16), "timestep": steps(b), "encoder_hidden_states": torch.randn(b, 5, 16), "added_cond_kwargs": {"text_embeds": torch.randn(b, 16), "time_ids": torch.randn(b, 6)}})


def _checkpointed(model: Any) -> nn.Module:
    model.set_grad_checkpointing()
    return model


def _checkpointed_unet(m: Any) -> nn.Module:
    model = m.UNet2DModel(sample_size=16, layers_per_block=1, block_out_channels=(32, 32), down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"))
    model.enable_gradient_checkpointing()
    return model
