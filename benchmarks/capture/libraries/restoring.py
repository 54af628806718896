"""Networks that restore, enlarge and fill images, of spandrel.

How a model is listed is left to ``catalogue``.
"""

# ruff: noqa: E501
# fmt: off

from __future__ import annotations

from typing import Any

import torch

from .catalogue import add, image

__all__: list[str] = []

SMALL = {"embed_dim": 16, "depths": (2, 2), "num_heads": (2, 2), "window_size": 8, "upscale": 2, "upsampler": "pixelshuffle", "img_size": 32}


def _listed(name: str, where: str, options: dict[str, Any], inputs: Any = None) -> None:
    module, _, kind = where.rpartition(".")
    add(name, f"spandrel.architectures.{module}", lambda m: getattr(m, kind)(**options), inputs or image(3, 32))


_listed("esrgan", "ESRGAN.__arch.RRDB.RRDBNet", {"in_nc": 3, "out_nc": 3, "num_filters": 16, "num_blocks": 2})
_listed("hat", "HAT.__arch.HAT.HAT", SMALL | {"num_feat": 16, "squeeze_factor": 4})
_listed("atd", "ATD.__arch.atd_arch.ATD", SMALL | {"category_size": 32, "num_tokens": 8})
_listed("drct", "DRCT.__arch.drct_arch.DRCT", SMALL | {"gc": 8})
_listed("craft", "CRAFT.__arch.CRAFT.CRAFT", {"embed_dim": 24, "depths": [1, 1], "num_heads": [2, 2], "upscale": 2})
_listed("fftformer", "FFTformer.__arch.fftformer_arch.FFTformer", {"dim": 16, "num_blocks": [1, 1, 1], "num_refinement_blocks": 1}, image(3, 32))
_listed("kbnet", "KBNet.__arch.kbnet_s.KBNet_s", {"width": 8, "middle_blk_num": 1, "enc_blk_nums": [1, 1], "dec_blk_nums": [1, 1]})
_listed("grl", "GRL.__arch.grl.GRL", {"img_size": 32, "embed_dim": 24, "depths": [2, 2], "num_heads_window": [2, 2], "num_heads_stripe": [2, 2], "window_size": 8, "anchor_window_down_factor": 2, "upscale": 2, "upsampler": "pixelshuffle"})
_listed("dat", "DAT.__arch.DAT.DAT", {"img_size": 32, "embed_dim": 24, "depth": [1, 1], "num_heads": [2, 2], "split_size": [8, 8], "upscale": 2})
_listed("ditn", "DITN.__arch.DITN_Real.DITN_Real", {"dim": 16, "ITL_blocks": 1, "SAL_blocks": 1, "UFONE_blocks": 1, "upscale": 2})
_listed("fdat", "FDAT.__arch.fdat.FDAT", {"embed_dim": 24, "num_groups": 1, "depth_per_group": 2, "num_heads": 2, "mid_dim": 16, "scale": 2})
_listed("cidnet", "HVICIDNet.__arch.cidnet.CIDNet", {"channels": [8, 8, 16, 16], "heads": [1, 2, 4, 8]})
_listed("codes", "RestoreFormer.__arch.restoreformer_arch.RestoreFormer", {"n_embed": 32, "embed_dim": 32, "ch": 32, "ch_mult": (1, 2), "num_res_blocks": 1, "attn_resolutions": (16,), "resolution": 32, "z_channels": 32, "head_size": 4, "enable_mid": True})
_listed("gfpgan", "GFPGAN.__arch.gfpganv1_clean_arch.GFPGANv1Clean", {"out_size": 32, "num_style_feat": 32, "channel_multiplier": 0.25, "fix_decoder": False, "num_mlp": 2, "input_is_latent": True, "different_w": True, "narrow": 0.25, "sft_half": True}, lambda b, n: (torch.rand(b, 3, 32, 32),))
