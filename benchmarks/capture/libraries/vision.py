"""Models of images, of other libraries.

How a model is listed is left to ``catalogue``.
"""

# ruff: noqa: E501
# fmt: off

from __future__ import annotations

import importlib

import torch
from torch import nn

from .catalogue import add, by_class, fixed_image, image, rows

__all__: list[str] = []

VIT = {
    "image_size": 64,
    "patch_size": 16,
    "num_classes": 10,
    "dim": 32,
    "depth": 3,
    "heads": 4,
    "mlp_dim": 64,
}
SQUARE = fixed_image()
for name, more in {
    "vit": {}, "simple_vit": {}, "deepvit": {}, "simple_flash_attn_vit": {},
    "vit_for_small_dataset": {}, "simple_vit_with_register_tokens": {}, "simple_vit_with_qk_norm": {},
    "simple_vit_with_patch_dropout": {}, "vit_with_patch_dropout": {}, "parallel_vit": {},
    "vit_with_patch_merger": {}, "rvt": {}, "local_vit": {},
}.items():
    title = {"simple_vit": "SimpleViT", "deepvit": "DeepViT", "rvt": "RvT", "local_vit": "LocalViT"}
    kind = title.get(name, "SimpleViT" if name.startswith("simple") else "ViT")
    add(name, f"vit_pytorch.{name}", lambda m, k=kind, o=more: getattr(m, k)(**VIT, **o), SQUARE)
add(
    "cait",
    "vit_pytorch.cait",
    lambda m: m.CaiT(**{**VIT, "depth": 2}, cls_depth=1, dropout=0.1, emb_dropout=0.1),
    SQUARE,
)
add(
    "twins",
    "vit_pytorch.twins_svt",
    lambda m: m.TwinsSVT(
        num_classes=10, s1_emb_dim=16, s2_emb_dim=16, s3_emb_dim=16, s4_emb_dim=16, s3_depth=1
    ),
    fixed_image(side=224),
)
add("mobile_vit", "vit_pytorch.mobile_vit", lambda m: m.MobileViT((64, 64), [24, 32, 40], [4, 4, 8, 8, 8, 8, 8, 8, 8, 8, 8], 10), SQUARE)
add("cct", "vit_pytorch.cct", lambda m: m.CCT(img_size=64, embedding_dim=32, n_conv_layers=2, kernel_size=7, stride=2, padding=3, pooling_kernel_size=3, pooling_stride=2, pooling_padding=1, num_layers=2, num_heads=4, mlp_ratio=2.0, num_classes=10, positional_embedding="learnable"), SQUARE)
add("mixer", "mlp_mixer_pytorch", lambda m: m.MLPMixer(image_size=64, channels=3, patch_size=16, dim=32, depth=3, num_classes=10), SQUARE)
add("gmlp", "g_mlp_pytorch", lambda m: m.gMLPVision(image_size=64, patch_size=16, num_classes=10, dim=32, depth=3), SQUARE)

by_class("torchvision.models", image(), resnet18={"num_classes": 10}, resnet50={"num_classes": 10},
    densenet121={"num_classes": 10}, mobilenet_v2={"num_classes": 10}, mobilenet_v3_small={"num_classes": 10},
    efficientnet_b0={"num_classes": 10}, regnet_y_400mf={"num_classes": 10}, shufflenet_v2_x0_5={"num_classes": 10},
    squeezenet1_1={"num_classes": 10}, convnext_tiny={"num_classes": 10}, mnasnet0_5={"num_classes": 10},
    swin_t={"num_classes": 10})
add("fcn", "torchvision.models.segmentation", lambda m: m.fcn_resnet50(weights=None, weights_backbone=None, num_classes=4), image())
for name in ["resnet10t.c3_in1k", "resnetv2_50", "vit_tiny_patch16_224", "deit_tiny_patch16_224", "mixer_s32_224", "convnext_atto", "efficientnet_lite0", "mobilenetv3_small_050", "regnetx_002", "ghostnet_050", "tinynet_e", "lcnet_035", "poolformer_s12", "levit_128s", "xcit_nano_12_p16_224", "coat_tiny", "swin_tiny_patch4_window7_224", "mobilevit_xxs", "edgenext_xx_small", "repvgg_a0", "hrnet_w18_small", "gernet_s", "dla34", "pit_ti_224", "resmlp_12_224", "gmixer_12_224", "convmixer_768_32"]:
    side = 224 if "224" in name or name.startswith(("levit", "coat_", "xcit")) else 96
    name = name.partition(".")[0] if "c3" in name else name
    add(name, "timm", lambda m, n=name: m.create_model(n, num_classes=10), fixed_image(side=side))
SMP = {"encoder_name": "resnet18", "encoder_weights": None, "classes": 2}
by_class("segmentation_models_pytorch", image(side=128), Unet=SMP, UnetPlusPlus=SMP, FPN=SMP, Linknet=SMP, PAN=SMP,
    DeepLabV3=SMP, DeepLabV3Plus=SMP, MAnet=SMP, UPerNet=SMP)
add("unet", "monai.networks.nets", lambda m: m.UNet(2, 1, 2, (8, 16, 32), (2, 2), num_res_units=2), image(1))
add("attention_unet", "monai.networks.nets", lambda m: m.AttentionUnet(2, 1, 2, (8, 16, 32), (2, 2)), image(1))
add("segresnet", "monai.networks.nets", lambda m: m.SegResNet(2, init_filters=8, in_channels=1), image(1))
add("vit", "monai.networks.nets", lambda m: m.ViT(1, 64, 16, hidden_size=32, mlp_dim=64, num_layers=3, num_heads=4, classification=True, spatial_dims=2), fixed_image(1))
add("densenet", "monai.networks.nets", lambda m: m.DenseNet121(2, 1, 4), image(1))
add("vnet", "monai.networks.nets", lambda m: m.BasicUNet(2, 1, 2, (8, 8, 16, 16, 32, 8)), image(1))

add("unet2d", "diffusers", lambda m: m.UNet2DModel(sample_size=32, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(32, 64), down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D")), lambda b, n: (torch.randn(b, 3, n, n), torch.randint(100, (b,))))
add("unet2d_condition", "diffusers", lambda m: m.UNet2DConditionModel(sample_size=32, layers_per_block=1, block_out_channels=(32, 64), cross_attention_dim=32, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D")), lambda b, n: (torch.randn(b, 4, n, n), torch.randint(100, (b,)), torch.randn(b, 7, 32)))
add("autoencoder", "diffusers", lambda m: m.AutoencoderKL(block_out_channels=(32, 64), down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2), image(3, 32))
add("vq", "diffusers", lambda m: m.VQModel(block_out_channels=(32, 64), down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, num_vq_embeddings=32), image(3, 32))
add("dit", "diffusers", lambda m: m.DiTTransformer2DModel(num_attention_heads=2, attention_head_dim=16, in_channels=4, num_layers=3, sample_size=16, patch_size=2, num_embeds_ada_norm=10), lambda b, n: (torch.randn(b, 4, 16, 16), torch.randint(100, (b,)), torch.randint(10, (b,))))
add("prior", "diffusers", lambda m: m.PriorTransformer(num_attention_heads=2, attention_head_dim=16, num_layers=3, embedding_dim=32, num_embeddings=8), lambda b, n: (torch.randn(b, 32), torch.randint(100, (b,)), torch.randn(b, 32), torch.randn(b, 8, 32)))

add("yolo", "ultralytics.nn.tasks", lambda m: m.ClassificationModel("yolov8n-cls.yaml", nc=10, verbose=False), image())
add("clip_text", "open_clip.transformer", lambda m: m.TextTransformer(context_length=32, vocab_size=64, width=32, heads=4, layers=3), lambda b, n: (torch.randint(1, 64, (b, 32)),))
add("clip_vision", "open_clip.transformer", lambda m: m.VisionTransformer(64, 16, 32, 3, 4, 2.0), SQUARE)
add("efficientnet", "efficientnet_pytorch", lambda m: m.EfficientNet.from_name("efficientnet-b0", num_classes=10), image())
add("hardnet", "kornia.feature", lambda m: m.HardNet(False), lambda b, n: (torch.randn(b, 1, 32, 32),))
add("unet", "denoising_diffusion_pytorch", lambda m: m.Unet(dim=16, dim_mults=(1, 2), flash_attn=False), lambda b, n: (torch.randn(b, 3, n, n), torch.randint(100, (b,))))
add("simclr", "lightly.models.modules", lambda m: m.SimCLRProjectionHead(32, 32, 16), rows(32))
add("byol", "lightly.models.modules", lambda m: m.BYOLProjectionHead(32, 64, 16), rows(32))

add("yolo_detect", "ultralytics.nn.tasks", lambda m: m.DetectionModel("yolov8n.yaml", nc=4, verbose=False), image())
add("yolo_segment", "ultralytics.nn.tasks", lambda m: m.SegmentationModel("yolov8n-seg.yaml", nc=4, verbose=False), image())
add("clip", "open_clip", lambda m: m.CLIP(32, m.CLIPVisionCfg(layers=3, width=32, head_width=8, patch_size=16, image_size=64), m.CLIPTextCfg(context_length=16, vocab_size=64, width=32, heads=4, layers=3)), lambda b, n: (torch.randn(b, 3, 64, 64), torch.randint(1, 64, (b, 16))))
add("coca", "open_clip", lambda m: m.CoCa(32, m.coca_model.MultimodalCfg(context_length=15, vocab_size=64, width=32, heads=4, layers=2), m.CLIPTextCfg(context_length=16, vocab_size=64, width=32, heads=4, layers=3, embed_cls=True, output_tokens=True), m.CLIPVisionCfg(layers=3, width=32, head_width=8, patch_size=16, image_size=64, attentional_pool=True, attn_pooler_heads=4, output_tokens=True)), lambda b, n: (torch.randn(b, 3, 64, 64), torch.randint(1, 64, (b, 16))))
add("image_encoder", "segment_anything.modeling", lambda m: m.ImageEncoderViT(img_size=64, patch_size=16, embed_dim=32, depth=3, num_heads=4, out_chans=16, use_rel_pos=True, window_size=3, global_attn_indexes=(1,)), fixed_image())
add("mask_decoder", "segment_anything.modeling", lambda m: m.MaskDecoder(transformer_dim=32, transformer=m.TwoWayTransformer(depth=2, embedding_dim=32, mlp_dim=64, num_heads=4)), lambda b, n: (torch.randn(1, 32, 8, 8), torch.randn(1, 32, 8, 8), torch.randn(b, 3, 32), torch.randn(b, 32, 8, 8), True))
add("inception_resnet", "facenet_pytorch", lambda m: m.InceptionResnetV1(pretrained=None, classify=True, num_classes=10), fixed_image(side=96))
add("se_resnet", "pretrainedmodels.models.senet", lambda m: m.se_resnet50(num_classes=1000, pretrained=None), fixed_image(side=224))
for name in ["resnet10", "mobilenet_wd4", "shufflenetv2_wd2", "airnet50_1x64d_r2"]:
    add(name, "pytorchcv.model_provider", lambda m, n=name: m.get_model(n, num_classes=10), fixed_image(side=224))
add("dynamic_unet", "fastai.vision.all", lambda m: m.DynamicUnet(nn.Sequential(*list(m.resnet18().children())[:-2]), 2, (64, 64)), fixed_image())
add("xresnet", "fastai.vision.all", lambda m: m.xresnet18(n_out=10), image())
add("segformer", "segformer_pytorch", lambda m: m.Segformer(dims=(16, 16, 32, 32), heads=(1, 1, 2, 2), ff_expansion=(2, 2, 2, 2), reduction_ratio=(8, 4, 2, 1), num_layers=1, decoder_dim=32, num_classes=4), fixed_image())
add("lambda_layer", "lambda_networks", lambda m: nn.Sequential(nn.Conv2d(3, 16, 1), m.LambdaLayer(dim=16, dim_out=16, r=7, dim_k=8, heads=4, dim_u=2), nn.BatchNorm2d(16), m.LambdaLayer(dim=16, dim_out=16, n=16, dim_k=8, heads=4, dim_u=1)), fixed_image(side=16))
add("bottleneck", "bottleneck_transformer_pytorch", lambda m: m.BottleStack(dim=16, fmap_size=16, dim_out=32, proj_factor=4, num_layers=3, heads=4, dim_head=8, rel_pos_emb=True), fixed_image(16, 16))
add("byol", "byol_pytorch", lambda m: m.BYOL(importlib.import_module("torchvision.models").resnet18(), image_size=32, hidden_layer="avgpool", augment_fn=nn.Identity(), augment_fn2=nn.Identity()), fixed_image(side=32))
add("unet3d", "monai.networks.nets", lambda m: m.DynUNet(3, 1, 2, (3, 3, 3), (1, 2, 2), (2, 2), filters=(8, 16, 32), deep_supervision=True), lambda b, n: (torch.randn(b, 1, n // 2, 16, 16),))
add("unetr", "monai.networks.nets", lambda m: m.UNETR(1, 2, (32, 32), feature_size=8, hidden_size=32, mlp_dim=64, num_heads=4, spatial_dims=2), fixed_image(1, 32))
add("swin_unetr", "monai.networks.nets", lambda m: m.SwinUNETR(in_channels=1, out_channels=2, feature_size=12, depths=(1, 1, 1, 1), num_heads=(2, 2, 2, 2), spatial_dims=2), fixed_image(1))
add("autoencoder", "monai.networks.nets", lambda m: m.AutoEncoder(2, 1, 2, (8, 16, 32), (2, 2, 2)), image(1))
add("vae", "monai.networks.nets", lambda m: m.VarAutoEncoder(2, (1, 32, 32), 1, 8, (8, 16), (2, 2)), fixed_image(1, 32))
add("diffusion_unet", "monai.networks.nets", lambda m: m.DiffusionModelUNet(2, 1, 1, (1, 1), (8, 16), (False, True), norm_num_groups=4, num_head_channels=8), lambda b, n: (torch.randn(b, 1, n, n), torch.randint(100, (b,))))
add("vit_tiny", "kornia.models.vit", lambda m: m.VisionTransformer(image_size=64, patch_size=16, embed_dim=32, depth=3, num_heads=4), SQUARE)
add("edge", "kornia.filters", lambda m: nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), m.GaussianBlur2d((3, 3), (1.0, 1.0)), m.Sobel(), m.UnsharpMask((3, 3), (1.0, 1.0))), image())
add("augmented", "kornia.augmentation", lambda m: nn.Sequential(m.RandomHorizontalFlip(p=0.5), m.RandomErasing(p=0.5), nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)), image())
add("ema", "ema_pytorch", lambda m: m.EMA(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)), beta=0.9), image())
add("scattering", "kymatio.torch", lambda m: nn.Sequential(nn.Conv2d(3, 2, 3, padding=1), m.Scattering2D(J=2, shape=(32, 32)), nn.Flatten(), nn.Linear(2 * 81 * 64, 4)), fixed_image(side=32))
add("diffusion", "denoising_diffusion_pytorch", lambda m: m.GaussianDiffusion(m.Unet(dim=16, dim_mults=(1, 2), flash_attn=False, self_condition=True), image_size=16, timesteps=10), lambda b, n: (torch.rand(b, 3, 16, 16),))
add("transformer2d", "diffusers", lambda m: m.PixArtTransformer2DModel(num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=8, num_layers=3, cross_attention_dim=32, sample_size=16, patch_size=2, caption_channels=16), lambda b, n: (torch.randn(b, 4, 16, 16), torch.randn(b, 7, 16), torch.randint(100, (b,)), {"resolution": None, "aspect_ratio": None}))
add("flux", "diffusers", lambda m: m.FluxTransformer2DModel(in_channels=8, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=16, axes_dims_rope=(4, 4, 8)), lambda b, n: (torch.randn(b, n, 8), torch.randn(b, 7, 32), torch.randn(b, 16), torch.rand(b), torch.randint(4, (n, 3)).float(), torch.zeros(7, 3)))
add("sd3", "diffusers", lambda m: m.SD3Transformer2DModel(sample_size=16, patch_size=2, in_channels=4, num_layers=3, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=16, out_channels=4), lambda b, n: (torch.randn(b, 4, 16, 16), torch.randn(b, 7, 32), torch.randn(b, 16), torch.randint(100, (b,))))
