"""Models that make pictures, films and waves, and models of scenes and genomes beside them.

How a model is listed is left to ``catalogue``.
"""

# ruff: noqa: E501
# fmt: off

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .catalogue import add, fixed_image, sequence

__all__: list[str] = []


class _Keywords(nn.Module):
    """A model that takes what comes after its first argument by name, beside what is given for all calls."""

    def __init__(self, body: nn.Module, *names: str, **given: Any) -> None:
        super().__init__()
        self.body, self.names, self.given = body, names, given

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> Any:
        return self.body(x, **dict(zip(self.names, more, strict=True)), **self.given)


class _Denoised(nn.Module):
    """A denoiser and its loss of noise that comes with the batch."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor, sigma: torch.Tensor, noise: torch.Tensor) -> Any:
        made = self.body(x + sigma.view(-1, *[1] * (x.ndim - 1)) * noise, sigma)
        return {"loss": F.mse_loss(made, noise), "made": made}


def _noised(*shape: int) -> Any:
    return lambda b, n: (torch.randn(b, *shape), torch.rand(b) + 0.1, torch.randn(b, *shape))


# diffusion
add("dit", "smalldiffusion", lambda m: _Denoised(m.DiT(in_dim=8, channels=3, patch_size=2, depth=3, head_dim=16, num_heads=2)), _noised(3, 8, 8))
add("unet", "smalldiffusion", lambda m: _Denoised(m.Unet(8, 3, 3, ch=32, ch_mult=(1, 2), num_res_blocks=1, attn_resolutions=(4,), dropout=0.0)), _noised(3, 8, 8))
add("mlp", "smalldiffusion", lambda m: _Denoised(m.TimeInputMLP(dim=2, hidden_dims=(16, 32, 16))), _noised(2))
add("classes", "smalldiffusion", lambda m: m.ConditionalMLP(dim=2, hidden_dims=(16, 32, 16), cond_dim=4, num_classes=10, dropout_prob=0.0), lambda b, n: (torch.randn(b, 2), torch.rand(b) + 0.1, torch.randint(0, 10, (b,))))
add("rin", "rin_pytorch", lambda m: m.RIN(dim=32, image_size=16, patch_size=4, channels=3, depth=2, num_latents=8, dim_latent=32, heads=2, dim_head=16, latent_self_attn_depth=2), lambda b, n: (torch.randn(b, 3, 16, 16), torch.rand(b)))
add("segmentation", "med_seg_diff_pytorch", lambda m: m.Unet(dim=16, image_size=32, mask_channels=1, input_img_channels=3, dim_mults=(1, 2), full_self_attn=(False, True), attn_dim_head=8, attn_heads=2, conditioning_kwargs={"dim_head": 8, "heads": 2, "depth": 1, "patch_size": 8}), lambda b, n: (torch.randn(b, 1, 32, 32), torch.rand(b), torch.randn(b, 3, 32, 32)))
add("unet3d", "video_diffusion_pytorch", lambda m: m.Unet3D(dim=16, dim_mults=(1, 2), attn_heads=2, attn_dim_head=16), lambda b, n: (torch.randn(b, 3, 4, 16, 16), torch.rand(b)))
add("space_time", "make_a_video_pytorch", lambda m: m.SpaceTimeUnet(dim=16, channels=3, dim_mult=(1, 2), resnet_block_depths=(1, 1), temporal_compression=(False, True), self_attns=(False, True), condition_on_timestep=True, attn_pos_bias=False, attn_dim_head=8, attn_heads=2), lambda b, n: (torch.randn(b, 3, 4, 16, 16), torch.rand(b)))
add("pseudo3d", "make_a_video_pytorch", lambda m: nn.Sequential(m.PseudoConv3d(dim=3, dim_out=16, kernel_size=3), m.SpatioTemporalAttention(dim=16, dim_head=8, heads=2), m.PseudoConv3d(dim=16, dim_out=3, kernel_size=3)), lambda b, n: (torch.randn(b, 3, 4, 16, 16),))
add("diffusion", "autoregressive_diffusion_pytorch", lambda m: m.AutoregressiveDiffusion(dim_input=8, dim=32, max_seq_len=16, depth=2, mlp_depth=2, mlp_width=32, heads=2, dim_head=16), lambda b, n: (torch.randn(b, 16, 8),))
add("flow", "autoregressive_diffusion_pytorch", lambda m: m.AutoregressiveFlow(dim_input=8, dim=32, max_seq_len=16, depth=2, mlp_depth=2, mlp_width=32, heads=2, dim_head=16), lambda b, n: (torch.randn(b, 16, 8),))
add("mask_git", "phenaki_pytorch", lambda m: _Keywords(m.MaskGit(num_tokens=64, max_seq_len=64, dim=32, dim_context=32, depth=2, heads=2, dim_head=16), "context", "text_mask", video_patch_shape=(2, 4, 4)), lambda b, n: (torch.randint(0, 64, (b, 32)), torch.randn(b, 6, 32), torch.ones(b, 6, dtype=torch.bool)))
add("c_vi_vit", "phenaki_pytorch", lambda m: m.CViViT(dim=32, codebook_size=64, image_size=16, patch_size=8, temporal_patch_size=2, spatial_depth=1, temporal_depth=1, dim_head=16, heads=2, use_vgg_and_gan=False), lambda b, n: (torch.randn(b, 3, 5, 16, 16),))

# pictures as codes, and worlds
add("titok", "titok_pytorch", lambda m: m.TiTokTokenizer(dim=32, image_size=32, patch_size=8, num_latent_tokens=4, enc_depth=1, enc_heads=2, enc_dim_head=16, dec_depth=1, dec_heads=2, dec_dim_head=16, codebook_size=64), fixed_image(side=32))
add("memcodes", "nwt_pytorch", lambda m: nn.Sequential(nn.Linear(16, 32), m.Memcodes(dim=32, num_codes=16, heads=2).eval(), _First(), nn.Linear(32, 8)), sequence(16))
add("jet", "jet_pytorch.jet", lambda m: m.Jet(patch_size=4, patch_dim=48, n_patches=16, img_dims=(16, 16), coupling_layers=2, block_depth=1, block_width=32, num_heads=2), lambda b, n: (torch.rand(b, 16, 16, 3),))
add("views", "lvsm_pytorch", lambda m: m.LVSM(dim=32, max_image_size=16, patch_size=8, channels=3, depth=2, heads=2, dim_head=16, rand_input_image_embed=False, perceptual_loss_weight=0.0), lambda b, n: (torch.randn(b, 2, 3, 16, 16), torch.randn(b, 2, 6, 16, 16), torch.randn(b, 6, 16, 16)))
add("slots", "slot_attention_pytorch.slot_attention_module", lambda m: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), m.SlotAttentionModule(4, 32, 16, 2, mlp_size=32), nn.Linear(16, 8)), sequence(16))


class _First(nn.Module):
    def forward(self, x: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return x[0]


# retrieval, words and pictures, genomes, molecules
add("captions", "mammut_pytorch", lambda m: _Keywords(m.MaMMUT(dim=32, num_tokens=64, depth=2, dim_latents=32, image_dim=16, num_img_queries=8, dim_head=16, heads=2), "image_tokens"), lambda b, n: (torch.randint(1, 64, (b, n)), torch.randn(b, 9, 16)))
add("genome", "alphagenome_pytorch.alphagenome", lambda m: _Embeds(m.AlphaGenome(dims=(16, 24, 32), dna_embed_width=5, transformer_kwargs={"depth": 2, "heads": 2, "dim_head_qk": 16, "dim_head_v": 16, "dim_pairwise": 8, "pool_size": 4, "single_to_pairwise_heads": 2})), lambda b, n: (torch.randint(0, 4, (b, 64)), torch.randint(0, 2, (b,))))
add("gotennet", "gotennet_pytorch", lambda m: m.GotenNet(dim=16, max_degree=2, depth=2, heads=2, dim_head=8, cutoff_radius=5.0, dim_edge_refinement=16, return_coors=False), lambda b, n: (torch.randint(0, 14, (b, 6)), torch.randn(b, 6, 3), torch.ones(b, 6, 6, dtype=torch.bool)))
add("gotennet_coordinates", "gotennet_pytorch", lambda m: m.GotenNet(dim=16, max_degree=2, depth=2, heads=2, dim_head=8, invariant_full_attn=True, return_coors=True), lambda b, n: (torch.randint(0, 14, (b, 6)), torch.randn(b, 6, 3)))
add("repvgg", "repvgg_pytorch.repvgg", lambda m: m.RepVGG(num_blocks=[1, 1, 1, 1], num_classes=10, width_multiplier=[0.25, 0.25, 0.25, 0.25]), fixed_image(side=32))
add("plus", "repvgg_pytorch.repvggplus", lambda m: m.RepVGGplus(num_blocks=[1, 2, 2, 1], num_classes=10, width_multiplier=[0.25, 0.25, 0.25, 0.25], use_post_se=True), fixed_image(side=32))


class _Embeds(nn.Module):
    """What a genome's model knows of each place."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor, organism: torch.Tensor) -> Any:
        return self.body(x, organism, return_embeds=True)
