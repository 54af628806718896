"""Models of images of further toolkits: they restore, detect, look at the earth, judge quality and novelty.

How a model is listed is left to ``catalogue``.
"""

# ruff: noqa: E501
# fmt: off

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .catalogue import add, by_class, fixed_image, image

__all__: list[str] = []

# basicsr
add("edsr", "basicsr.archs.edsr_arch", lambda m: m.EDSR(3, 3, num_feat=16, num_block=4, upscale=2), image(side=16))
add("rrdbnet", "basicsr.archs.rrdbnet_arch", lambda m: m.RRDBNet(3, 3, num_feat=16, num_block=3, num_grow_ch=8), image(side=16))
add("rcan", "basicsr.archs.rcan_arch", lambda m: m.RCAN(3, 3, num_feat=16, num_group=2, num_block=2, squeeze_factor=4, upscale=2), image(side=16))
add("ridnet", "basicsr.archs.ridnet_arch", lambda m: m.RIDNet(3, 16, 3, num_block=3), image(side=16))
add("duf", "basicsr.archs.duf_arch", lambda m: m.DUF(scale=2, num_layer=16), lambda b, n: (torch.randn(b, 7, 3, 16, 16),))

# torchsr
by_class("torchsr.models", image(side=16), edsr_r16f64={"scale": 2, "pretrained": False}, carn_m={"scale": 2, "pretrained": False}, ninasr_b0={"scale": 2, "pretrained": False})

# super-image
for _name in ("Edsr", "Carn", "Pan", "A2n", "Awsrn", "Msrn", "Ddbpn", "Drln", "Han", "Rnan", "Mdsr"):
    add(_name.lower(), "super_image", lambda m, n=_name: getattr(m, f"{n}Model")(getattr(m, f"{n}Config")(scale=2)), image(side=16))

# EfficientDet
def _effdet(m: Any) -> nn.Module:
    config = m.get_efficientdet_config("tf_efficientdet_lite0")
    config.image_size, config.fpn_channels, config.fpn_cell_repeats, config.num_classes = (128, 128), 16, 1, 3
    return m.EfficientDet(config, pretrained_backbone=False)


add("detector", "effdet", _effdet, fixed_image(3, 128))

# torchgeo
add("fcn", "torchgeo.models", lambda m: m.FCN(3, 4, num_filters=8), image(side=32))
add("fcsiam_diff", "torchgeo.models", lambda m: m.FCSiamDiff("resnet18", encoder_weights=None, in_channels=3), lambda b, n: (torch.randn(b, 2, 3, 64, 64),))
add("fcsiam_conc", "torchgeo.models", lambda m: m.FCSiamConc("resnet18", encoder_weights=None, in_channels=3), lambda b, n: (torch.randn(b, 2, 3, 64, 64),))
add("farseg", "torchgeo.models", lambda m: m.FarSeg("resnet18", classes=4, backbone_pretrained=False), fixed_image(3, 64))
add("convlstm", "torchgeo.models", lambda m: m.ConvLSTM(3, [8, 8], (3, 3), num_layers=2, batch_first=True), lambda b, n: (torch.randn(b, 4, 3, 16, 16),))
add("ltae", "torchgeo.models", lambda m: m.LTAE(in_channels=32, n_head=4, d_k=8, n_neurons=(32, 16), d_model=32, len_max_seq=16), lambda b, n: (torch.randn(b, 16, 32),))
add("dofa", "torchgeo.models", lambda m: _Waves(m.DOFA(img_size=32, patch_size=8, embed_dim=32, depth=3, num_heads=4, num_classes=4, dynamic_embed_dim=16)), fixed_image(3, 32))


class _Waves(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x, [0.664, 0.56, 0.49])


# pytorch-ood
add("wide_resnet", "pytorch_ood.model", lambda m: m.WideResNet(4, depth=10, widen_factor=1, drop_rate=0.1), image(side=32))
add("centers", "pytorch_ood.model", lambda m: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8), m.ClassCenters(4, 8)), lambda b, n: (torch.randn(b, 16),))

# pyiqa
add("wadiqam", "pyiqa.archs.wadiqam_arch", lambda m: m.WaDIQaM(pretrained=False), lambda b, n: (torch.rand(b, 3, 64, 64), torch.rand(b, 3, 64, 64)))
add("ssim", "pyiqa.archs.ssim_arch", lambda m: _Restored(m.SSIM(channels=3)), lambda b, n: (torch.rand(b, 3, 32, 32), torch.rand(b, 3, 32, 32)))
add("gmsd", "pyiqa.archs.gmsd_arch", lambda m: _Restored(m.GMSD()), lambda b, n: (torch.rand(b, 3, 64, 64), torch.rand(b, 3, 64, 64)))


class _Restored(nn.Module):
    """A net that restores images, and how good they are."""

    def __init__(self, judge: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(*[layer for w in (3, 8, 8) for layer in (nn.Conv2d(w, 8, 3, padding=1), nn.GELU())], nn.Conv2d(8, 3, 3, padding=1))
        self.judge = judge

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> Any:
        made = torch.sigmoid(self.net(x) + x)
        return {"loss": 1 - self.judge(made, target).mean(), "image": made}


# anomalib
add("ganomaly", "anomalib.models.image.ganomaly.torch_model", lambda m: m.GanomalyModel((32, 32), 3, 8, 16, 0, True), fixed_image(3, 32))
add("supersimplenet", "anomalib.models.image.supersimplenet.torch_model", lambda m: m.SegmentationDetectionModule(channel_dim=16, stop_grad=True), lambda b, n: (torch.randn(b, 16, 16, 16), torch.randn(b, 16, 16, 16)))
add("student_teacher", "anomalib.models.image.efficient_ad.torch_model", lambda m: nn.Sequential(m.SmallPatchDescriptionNetwork(16, padding=True)), fixed_image(3, 64))
