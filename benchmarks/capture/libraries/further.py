"""More models of the libraries that the other lists draw from: images, sound, graphs and sequences.

How a model is listed is left to ``catalogue``.
"""

# ruff: noqa: E501
# fmt: off

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from .catalogue import add, by_class, fixed_image, image, rows, sequence, sound, tokens
from .science import batched, graph, molecules

__all__: list[str] = []

def clicks(b: int, n: int) -> tuple[Any, ...]:
    """Three kinds and two numbers a row."""
    return (torch.cat([torch.randint(8, (b, 3)).float(), torch.rand(b, 2)], 1),)


VIT = {"image_size": 64, "patch_size": 16, "num_classes": 10, "dim": 32, "depth": 3, "heads": 4, "mlp_dim": 64}
CLIP = {"image_size": 32, "patch_size": 8, "num_classes": 10, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 64}
SQUARE = fixed_image()
VIDEO = {"image_size": 32, "image_patch_size": 16, "frames": 4, "frame_patch_size": 2, "num_classes": 10, "dim": 32, "heads": 4, "mlp_dim": 64}


def video(b: int, n: int) -> tuple[Any, ...]:
    """Four frames of 32 × 32."""
    return (torch.randn(b, 3, 4, 32, 32),)


for module, title, options, inputs in [
    ("crossformer", "CrossFormer", {"dim": (16, 32, 32, 32), "depth": (1, 1, 1, 1), "global_window_size": (4, 2, 2, 1), "local_window_size": 2, "num_classes": 10}, SQUARE),
    ("cross_vit", "CrossViT", {"image_size": 64, "num_classes": 10, "sm_dim": 32, "lg_dim": 32, "sm_patch_size": 16, "lg_patch_size": 32, "sm_enc_mlp_dim": 64, "lg_enc_mlp_dim": 64, "lg_enc_depth": 1, "depth": 2}, SQUARE),
    ("levit", "LeViT", {"image_size": 64, "num_classes": 10, "stages": 2, "dim": (16, 32), "depth": 1, "heads": (2, 2), "mlp_mult": 2}, SQUARE),
    ("max_vit", "MaxViT", {"num_classes": 10, "dim": 16, "depth": (1, 1), "dim_head": 8, "dim_conv_stem": 8, "window_size": 4, "dropout": 0.1}, fixed_image()),
    ("nest", "NesT", {"image_size": 64, "patch_size": 4, "num_classes": 10, "dim": 16, "heads": 2, "num_hierarchies": 2, "block_repeats": (1, 2)}, SQUARE),
    ("pit", "PiT", {"image_size": 64, "patch_size": 8, "num_classes": 10, "dim": 32, "depth": (1, 1), "heads": 2, "mlp_dim": 64, "dropout": 0.1}, SQUARE),
    ("regionvit", "RegionViT", {"dim": (16, 16, 32, 32), "depth": (1, 1, 1, 1), "window_size": 2, "num_classes": 10}, SQUARE),
    ("scalable_vit", "ScalableViT", {"num_classes": 10, "dim": 16, "heads": (2, 2, 2, 2), "depth": (1, 1, 1, 1), "reduction_factor": (4, 2, 2, 1), "window_size": (8, 4, None, None)}, SQUARE),
    ("sep_vit", "SepViT", {"num_classes": 10, "dim": 16, "depth": (1, 2), "heads": (2, 2), "window_size": 4}, SQUARE),
    ("t2t", "T2TViT", {"image_size": 64, "num_classes": 10, "dim": 32, "depth": 2, "heads": 2, "mlp_dim": 64}, SQUARE),
    ("xcit", "XCiT", {**VIT, "depth": 2, "cls_depth": 1, "layer_dropout": 0.0}, SQUARE),
    ("cvt", "CvT", {"num_classes": 10, "s1_emb_dim": 16, "s2_emb_dim": 16, "s3_emb_dim": 32, "s3_depth": 1, "s2_heads": 1, "s3_heads": 2}, image()),
    ("ats_vit", "ViT", {**VIT, "max_tokens_per_depth": (16, 12, 8)}, SQUARE),
    ("vit_1d", "ViT", {"seq_len": 64, "patch_size": 8, "num_classes": 10, "dim": 32, "depth": 3, "heads": 4, "mlp_dim": 64}, lambda b, n: (torch.randn(b, 3, 64),)),
    ("simple_vit_1d", "SimpleViT", {"seq_len": 64, "patch_size": 8, "num_classes": 10, "dim": 32, "depth": 3, "heads": 4, "mlp_dim": 64}, lambda b, n: (torch.randn(b, 3, 64),)),
    ("simple_vit_3d", "SimpleViT", {**VIDEO, "depth": 3}, video),
    ("vit_3d", "ViT", {**VIDEO, "depth": 3}, video),
    ("vivit", "ViViT", {**VIDEO, "spatial_depth": 2, "temporal_depth": 2, "use_flash_attn": False}, video),
    ("look_vit", "LookViT", {"dim": 32, "image_size": 64, "num_classes": 10, "depth": 2, "patch_size": 16, "heads": 2, "dim_head": 8, "highres_patch_size": 8, "cross_attn_heads": 2, "cross_attn_dim_head": 8, "patch_conv_kernel_size": 3}, SQUARE),
    ("normalized_vit", "nViT", {**VIT, "dim_head": 8}, SQUARE),
    ("simple_uvit", "SimpleUViT", {**VIT, "depth": 4}, SQUARE),
    ("jumbo_vit", "JumboViT", {**VIT}, SQUARE),
    ("max_vit_with_registers", "MaxViT", {"num_classes": 10, "dim": 16, "depth": (1, 1), "dim_head": 8, "dim_conv_stem": 8, "window_size": 4}, fixed_image()),
    ("simple_vit_with_fft", "SimpleViT", {**VIT, "freq_patch_size": 8}, SQUARE),
    ("simple_vit_with_value_residual", "SimpleViT", {**VIT}, SQUARE),
    ("simple_vit_with_hyper_connections", "SimpleViT", {**VIT, "num_residual_streams": 4}, SQUARE),
    ("vit_with_decorr", "ViT", {**VIT}, SQUARE),
]:
    add(module if title != "ViT" else f"{module}_", f"vit_pytorch.{module}", lambda m, t=title, o=options: getattr(m, t)(**o), inputs)
add("mae", "vit_pytorch.mae", lambda m: m.MAE(encoder=importlib.import_module("vit_pytorch").ViT(**CLIP), masking_ratio=0.5, decoder_dim=32), fixed_image(side=32))
add("simmim", "vit_pytorch.simmim", lambda m: m.SimMIM(encoder=importlib.import_module("vit_pytorch").ViT(**CLIP), masking_ratio=0.5), fixed_image(side=32))
add("efficient", "vit_pytorch.efficient", lambda m: m.ViT(image_size=64, patch_size=16, num_classes=10, dim=32, transformer=importlib.import_module("nystrom_attention").Nystromformer(dim=32, dim_head=8, heads=4, depth=2, num_landmarks=4)), SQUARE)
add("distill", "vit_pytorch.distill", lambda m: m.DistillWrapper(student=m.DistillableViT(**CLIP), teacher=importlib.import_module("torchvision.models").resnet18(num_classes=10), temperature=3, alpha=0.5), lambda b, n: (torch.randn(b, 3, 32, 32), torch.randint(10, (b,))))

LAYERS = {"dim": 32, "depth": 3, "heads": 4}
for name, more in {
    "layerdrop": {"layer_dropout": 0.3}, "sparse_topk": {"attn_sparse_topk": 4}, "talking": {"attn_pre_talking_heads": True, "attn_post_talking_heads": True},
    "memory_kv": {"attn_num_mem_kv": 4}, "gated": {"attn_gate_values": True}, "flash": {"attn_flash": True}, "shift": {"shift_tokens": 1}, "resi_dual": {"resi_dual": True},
    "scalenorm": {"use_scalenorm": True}, "dynamic_bias": {"dynamic_pos_bias": True, "dynamic_pos_bias_log_distance": False}, "gru": {"gate_residual": True}, "relu2": {"ff_relu_squared": True},
    "value_residual": {"attn_add_value_residual": True, "add_value_residual": True}, "hyper": {"num_residual_streams": 4}, "adaptive": {"use_adaptive_layernorm": False, "pre_norm_has_final_norm": False}, "window": {"attn_max_attend_past": 8},
}.items():
    add(f"x_{name}", "x_transformers", lambda m, o=more: m.TransformerWrapper(num_tokens=64, max_seq_len=64, attn_layers=m.Decoder(**LAYERS, **o)), tokens())
add("x_t5", "x_transformers", lambda m: m.XTransformer(dim=32, enc_num_tokens=64, enc_depth=2, enc_heads=4, enc_max_seq_len=64, dec_num_tokens=64, dec_depth=2, dec_heads=4, dec_max_seq_len=64), lambda b, n: (torch.randint(1, 64, (b, n)), torch.randint(1, 64, (b, n))))
add("x_autoregressive", "x_transformers", lambda m: m.AutoregressiveWrapper(m.TransformerWrapper(num_tokens=64, max_seq_len=64, attn_layers=m.Decoder(**LAYERS))), tokens())
add("x_vit", "x_transformers", lambda m: m.ViTransformerWrapper(image_size=64, patch_size=16, num_classes=10, attn_layers=m.Encoder(**LAYERS)), SQUARE)

GNN = {"in_channels": 16, "hidden_channels": 16, "num_layers": 3, "out_channels": 4}
add("graph_unet", "torch_geometric.nn", lambda m: m.GraphUNet(16, 16, 4, depth=2), graph())
add("polynormer", "torch_geometric.nn", lambda m: m.Polynormer(16, 16, 4, local_layers=2, global_layers=2), batched)
add("sgformer", "torch_geometric.nn", lambda m: m.SGFormer(16, 16, 4), batched)
add("pmlp", "torch_geometric.nn", lambda m: m.PMLP(16, 16, 4, 3), graph())
add("arlink", "torch_geometric.nn", lambda m: m.ARLinkPredictor(16, 16), graph())
add("fingerprint", "torch_geometric.nn", lambda m: m.NeuralFingerprint(16, 16, 4, 3), batched)
add("jumping", "torch_geometric.nn", lambda m: m.GCN(**GNN, jk="lstm"), graph())
add("gatv2", "torch_geometric.nn", lambda m: m.GAT(**GNN, v2=True, heads=2, dropout=0.2, norm="GraphNorm"), graph())
add("transformer", "torch_geometric.nn", lambda m: _Convs([m.TransformerConv(16, 4, 4), m.TransformerConv(16, 4, 4, beta=True), m.TransformerConv(16, 16, 1)]), graph())
for name, make in {"Cheb": lambda m: m.ChebConv(16, 16, 3), "GATv2": lambda m: m.GATv2Conv(16, 4, 4), "SG": lambda m: m.SGConv(16, 16, 2), "TAG": lambda m: m.TAGConv(16, 16), "ARMA": lambda m: m.ARMAConv(16, 16), "Graph": lambda m: m.GraphConv(16, 16), "GatedGraph": lambda m: m.GatedGraphConv(16, 2), "LEConv": lambda m: m.LEConv(16, 16), "FA": lambda m: _With(m.FAConv(16), "x, x, e"), "APPNP": lambda m: m.APPNP(3, 0.1), "SuperGAT": lambda m: m.SuperGATConv(16, 4, 4), "ResGated": lambda m: m.ResGatedGraphConv(16, 16), "Cluster": lambda m: m.ClusterGCNConv(16, 16), "Film": lambda m: m.FiLMConv(16, 16), "General": lambda m: m.GeneralConv(16, 16), "MF": lambda m: m.MFConv(16, 16), "Feast": lambda m: m.FeaStConv(16, 16, 2), "EG": lambda m: m.EGConv(16, 16), "Hypergraph": lambda m: m.HypergraphConv(16, 16)}.items():
    add(name, "torch_geometric.nn", lambda m, k=make: _Convs([k(m) for _ in range(3)]), graph())
add("gps", "torch_geometric.nn", lambda m: _Gps(m), batched)
add("rgcn", "torch_geometric.nn", lambda m: _Relations([m.RGCNConv(16, 16, 3), m.FastRGCNConv(16, 16, 3), m.RGATConv(16, 16, 3)]), lambda b, n: (*graph()(b, n), torch.randint(3, (16 * b,))))
add("set2set", "torch_geometric.nn", lambda m: _Read(m.GCNConv(16, 16), m.Set2Set(16, 2), 32), batched)
add("attentional", "torch_geometric.nn", lambda m: _Read(m.GCNConv(16, 16), m.AttentionalAggregation(nn.Linear(16, 1)), 16), batched)
add("topk", "torch_geometric.nn", lambda m: _TopK(m), batched)
add("vae", "torch_geometric.nn", lambda m: _Vae(m), graph())
add("node_mlp", "torch_geometric.nn", lambda m: m.MLP([16, 16, 16, 4], dropout=0.2), rows(16))
add("visnet", "torch_geometric.nn", lambda m: m.ViSNet(num_layers=2, hidden_channels=16, num_heads=2, num_rbf=8), molecules)

add("wav2letter", "torchaudio.models", lambda m: m.Wav2Letter(10, "mfcc", 16), lambda b, n: (torch.randn(b, 16, 2 * n),))
add("emformer", "torchaudio.models", lambda m: m.Emformer(32, 4, 64, 2, 4, right_context_length=1), lambda b, n: (torch.randn(b, n + 1, 32), torch.full((b,), n)))
add("hubert", "torchaudio.models", lambda m: m.hubert_base(), lambda b, n: (torch.randn(b, 100 * n),))
add("hdemucs", "torchaudio.models", lambda m: m.HDemucs(["a", "b"], audio_channels=1, channels=4, nfft=256, depth=3), lambda b, n: (torch.randn(b, 1, 512 * n // 8),))
add("tacotron", "torchaudio.models", lambda m: m.Tacotron2(n_mels=8, n_symbol=20, symbol_embedding_dim=16, encoder_embedding_dim=16, decoder_rnn_dim=16, prenet_dim=8, attention_rnn_dim=16, attention_hidden_dim=8, attention_location_n_filter=4, postnet_embedding_dim=16), lambda b, n: (torch.randint(20, (b, n)), torch.full((b,), n), torch.randn(b, 8, 12), torch.full((b,), 12)))
add("rnnt", "torchaudio.models", lambda m: m.emformer_rnnt_model(input_dim=16, encoding_dim=16, num_symbols=12, segment_length=4, right_context_length=1, time_reduction_input_dim=8, time_reduction_stride=1, transformer_num_heads=2, transformer_ffn_dim=32, transformer_num_layers=2, transformer_dropout=0.1, transformer_activation="gelu", transformer_left_context_length=4, transformer_max_memory_size=0, transformer_weight_init_scale_strategy="depthwise", transformer_tanh_on_mem=True, symbol_embedding_dim=16, num_lstm_layers=2, lstm_layer_norm=True, lstm_layer_norm_epsilon=1e-3, lstm_dropout=0.1), lambda b, n: (torch.randn(b, n + 1, 16), torch.full((b,), n, dtype=torch.int32), torch.randint(1, 12, (b, 5), dtype=torch.int32), torch.full((b,), 5, dtype=torch.int32)))
add("dprnn", "asteroid.models", lambda m: m.DPRNNTasNet(2, n_repeats=2, bn_chan=8, hid_size=8, chunk_size=20, n_filters=16, kernel_size=16), lambda b, n: (torch.randn(b, 320 * n // 8),))
add("dptnet", "asteroid.models", lambda m: m.DPTNet(2, n_repeats=2, ff_hid=16, n_heads=4, chunk_size=20, n_filters=16, kernel_size=16), lambda b, n: (torch.randn(b, 320 * n // 8),))
add("sudormrf", "asteroid.models", lambda m: m.SuDORMRFNet(2, bn_chan=8, num_blocks=2, upsampling_depth=3, n_filters=16), lambda b, n: (torch.randn(b, 320 * n // 8),))
add("demask", "asteroid.models", lambda m: m.DeMask(hidden_dims=(16,), n_filters=64, kernel_size=64, stride=32), lambda b, n: (torch.randn(b, 320 * n // 8),))
add("lstm_tasnet", "asteroid.models", lambda m: m.LSTMTasNet(2, n_filters=16, kernel_size=16, hid_size=16, n_repeats=2), lambda b, n: (torch.randn(b, 320 * n // 8),))
add("fasnet", "asteroid.models", lambda m: m.FasNetTAC(2, enc_dim=8, feature_dim=8, hidden_dim=8, n_layers=2, tac_hidden_dim=8), lambda b, n: (torch.randn(b, 2, 1600), torch.full((b,), 2)))
add("ecapa", "speechbrain.lobes.models.ECAPA_TDNN", lambda m: m.ECAPA_TDNN(16, channels=[16, 16, 16, 16, 48], attention_channels=8, res2net_scale=4, se_channels=8, lin_neurons=16), lambda b, n: (torch.randn(b, n, 16),))
add("xvector", "speechbrain.lobes.models.Xvector", lambda m: m.Xvector(tdnn_channels=[16, 16, 16, 16, 32], lin_neurons=16, in_channels=16), lambda b, n: (torch.randn(b, n, 16),))
add("crdnn", "speechbrain.lobes.models.CRDNN", lambda m: m.CRDNN(input_size=16, cnn_blocks=1, cnn_channels=(8,), rnn_layers=1, rnn_neurons=16, dnn_blocks=1, dnn_neurons=16), lambda b, n: (torch.randn(b, n, 16),))
add("hifigan", "speechbrain.lobes.models.HifiGAN", lambda m: m.HifiganGenerator(8, 1, "1", [[1, 3, 5]] * 2, [3, 3], [8, 8], 16, [4, 4]), lambda b, n: (torch.randn(b, 8, n),))
add("discriminator", "speechbrain.lobes.models.HifiGAN", lambda m: m.MultiPeriodDiscriminator(), sound(16))
add("rnnlm", "speechbrain.lobes.models.RNNLM", lambda m: m.RNNLM(32, embedding_dim=16, rnn_neurons=16, dnn_neurons=16), tokens(32))
add("cnn14", "speechbrain.lobes.models.Cnn14", lambda m: m.Cnn14(16, 32), lambda b, n: (torch.randn(b, 64, 16),))

by_class("monai.networks.nets", image(1), HighResNet={"spatial_dims": 2}, BasicUNetPlusPlus={"spatial_dims": 2, "features": (8, 8, 16, 16, 16, 8)}, VNet={"spatial_dims": 2, "dropout_prob_down": None}, Restormer={"spatial_dims": 2, "in_channels": 1, "out_channels": 1, "dim": 8, "num_refinement_blocks": 1}, SegResNetDS={"spatial_dims": 2, "init_filters": 8, "dsdepth": 2}, MedNeXt={"spatial_dims": 2, "init_filters": 8, "kernel_size": 3, "blocks_down": (1, 1), "blocks_bottleneck": 1, "blocks_up": (1, 1)}, VQVAE={"spatial_dims": 2, "in_channels": 1, "out_channels": 1, "channels": (8, 8), "num_res_layers": 1, "num_res_channels": (8, 8), "downsample_parameters": ((2, 4, 1, 1),) * 2, "upsample_parameters": ((2, 4, 1, 1, 0),) * 2, "num_embeddings": 8, "embedding_dim": 8}, PatchDiscriminator={"spatial_dims": 2, "channels": 8, "in_channels": 1}, AutoencoderKL={"spatial_dims": 2, "num_res_blocks": (1, 1), "channels": (8, 16), "attention_levels": (False, True), "norm_num_groups": 4})
add("resnet", "monai.networks.nets", lambda m: m.ResNet("basic", [1, 1, 1, 1], [8, 8, 16, 16], spatial_dims=2, n_input_channels=1, num_classes=4), image(1))
add("efficientnet", "monai.networks.nets", lambda m: m.EfficientNetBN("efficientnet-b0", pretrained=False, in_channels=1, num_classes=4), image(1))
add("flexible", "monai.networks.nets", lambda m: m.FlexibleUNet(1, 2, "resnet18"), image(1))
add("mae", "monai.networks.nets", lambda m: m.MaskedAutoEncoderViT(1, 32, 8, hidden_size=32, mlp_dim=32, num_layers=2, num_heads=2, decoder_hidden_size=32, decoder_mlp_dim=32, decoder_num_layers=1, decoder_num_heads=2, spatial_dims=2), fixed_image(1, 32))
add("vit_autoencoder", "monai.networks.nets", lambda m: m.ViTAutoEnc(1, 32, 8, hidden_size=32, mlp_dim=32, num_layers=2, num_heads=2, spatial_dims=2), fixed_image(1, 32))
add("mil", "monai.networks.nets", lambda m: m.MILModel(2, mil_mode="att_trans", pretrained=False, backbone="resnet18"), lambda b, n: (torch.randn(b, 3, 3, 32, 32),))
add("decoder_only", "monai.networks.nets", lambda m: m.DecoderOnlyTransformer(64, 64, 32, 3, 4), tokens())
add("controlnet", "monai.networks.nets", lambda m: m.ControlNet(2, 1, (1, 1), (8, 16), (False, True), norm_num_groups=4, num_head_channels=8, conditioning_embedding_in_channels=1, conditioning_embedding_num_channels=(8,)), lambda b, n: (torch.randn(b, 1, n, n), torch.randint(100, (b,)), torch.randn(b, 1, n, n)))
by_class("kornia.feature", lambda b, n: (torch.randn(b, 1, 32, 32),), SOSNet={"pretrained": False}, TFeat={"pretrained": False}, HyNet={"pretrained": False})
add("disk", "kornia.feature", lambda m: m.DISK().unet, image())
add("xfeat", "kornia.feature.xfeat", lambda m: m.XFeatModel(), image())
add("keynet", "kornia.feature", lambda m: m.KeyNet(False), image(1))
for name in ["PSPNet", "DPT", "Segformer"]:
    add(name, "segmentation_models_pytorch", lambda m, n=name: getattr(m, n)(encoder_name="resnet18" if n != "DPT" else "tu-vit_tiny_patch16_224", encoder_weights=None, classes=2), fixed_image(side=128 if name != "DPT" else 224))
for name in ["timm-efficientnet-b0", "mobilenet_v2", "densenet121", "dpn68", "xception", "mit_b0", "mobileone_s0", "se_resnet50", "vgg11_bn", "inceptionv4"]:
    add(f"unet_{name}", "segmentation_models_pytorch", lambda m, n=name: m.Unet(encoder_name=n, encoder_weights=None, classes=2), fixed_image(side=128))
for name in ["vit_base_patch16_clip_224", "beit_base_patch16_224", "cait_xxs24_224", "visformer_tiny", "nest_tiny", "crossvit_tiny_240", "maxvit_rmlp_pico_rw_256", "fastvit_t8", "mobileone_s0", "efficientformer_l1", "cspresnet50", "selecsls42", "rexnet_100", "hardcorenas_a", "vovnet39a", "res2net50_26w_4s", "skresnet18", "resnest14d", "tresnet_m", "nfnet_f0", "eca_nfnet_l0", "volo_d1_224", "twins_pcpvt_small", "sequencer2d_s", "swinv2_cr_tiny_224", "gcvit_xxtiny", "davit_tiny", "focalnet_tiny_srf", "convit_tiny", "tnt_s_legacy_patch16_224", "eva02_tiny_patch14_224", "hiera_tiny_224", "repvit_m0_9", "starnet_s1", "tiny_vit_5m_224", "mambaout_femto", "inception_v3", "xception41", "lambda_resnet26t", "halonet26t", "botnet26t_256", "efficientvit_b0", "mobilenetv4_conv_small"]:
    side = next((int(s) for s in ("224", "240", "256") if s in name), 224 if name.startswith(("visformer", "nest", "volo", "twins", "sequencer", "gcvit", "davit", "focalnet", "convit", "repvit", "maxvit", "efficientformer", "inception", "xception")) else 96)
    add(name, "timm", lambda m, n=name: m.create_model(n, num_classes=10), fixed_image(side=side))
by_class("torchvision.models", fixed_image(side=224), alexnet={"num_classes": 10}, vgg11_bn={"num_classes": 10}, googlenet={"num_classes": 10, "init_weights": False, "aux_logits": False}, vit_b_32={"num_classes": 10}, maxvit_t={"num_classes": 10}, swin_v2_t={"num_classes": 10}, wide_resnet50_2={"num_classes": 10}, resnext50_32x4d={"num_classes": 10})
add("deeplab", "torchvision.models.segmentation", lambda m: m.deeplabv3_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=4), image())
add("lraspp", "torchvision.models.segmentation", lambda m: m.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=4), image())
add("r3d", "torchvision.models.video", lambda m: m.r3d_18(num_classes=10), lambda b, n: (torch.randn(b, 3, 4, 32, 32),))
add("raft", "torchvision.models.optical_flow", lambda m: m.raft_small(), lambda b, n: (torch.randn(b, 3, 128, 128), torch.randn(b, 3, 128, 128)))

add("unet1d", "diffusers", lambda m: m.UNet1DModel(sample_size=64, in_channels=4, out_channels=4, block_out_channels=(32, 32, 64), extra_in_channels=16), lambda b, n: (torch.randn(b, 4, 2 * n), torch.randint(100, (b,))))
add("unet3d", "diffusers", lambda m: m.UNet3DConditionModel(sample_size=16, layers_per_block=1, block_out_channels=(32, 64), cross_attention_dim=24, attention_head_dim=8, down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"), up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"), norm_num_groups=8), lambda b, n: (torch.randn(b, 4, 3, 16, 16), torch.randint(100, (b,)), torch.randn(b, 7, 24)))
add("tiny", "diffusers", lambda m: m.AutoencoderTiny(encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8), num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1)), image(3, 32))
add("asymmetric", "diffusers", lambda m: m.AsymmetricAutoencoderKL(down_block_types=("DownEncoderBlock2D",) * 2, down_block_out_channels=(32, 32), up_block_types=("UpDecoderBlock2D",) * 2, up_block_out_channels=(32, 32)), image(3, 32))
add("oobleck", "diffusers", lambda m: m.AutoencoderOobleck(encoder_hidden_size=8, downsampling_ratios=[2, 4], channel_multiples=[1, 2], decoder_channels=8, decoder_input_channels=4, audio_channels=1), sound(8))
add("controlnet", "diffusers", lambda m: m.ControlNetModel(block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=24, attention_head_dim=8, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), conditioning_embedding_out_channels=(8, 16)), lambda b, n: (torch.randn(b, 4, 16, 16), torch.randint(100, (b,)), torch.randn(b, 7, 24), torch.randn(b, 3, 32, 32)))
add("adapter", "diffusers", lambda m: m.T2IAdapter(in_channels=3, channels=[16, 16], num_res_blocks=1, downscale_factor=4), image())
add("wan", "diffusers", lambda m: m.WanTransformer3DModel(patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=32, ffn_dim=32, num_layers=3), lambda b, n: (torch.randn(b, 4, 2, 8, 8), torch.randint(100, (b,)), torch.randn(b, 7, 16)))
add("ltx", "diffusers", lambda m: m.LTXVideoTransformer3DModel(in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8, cross_attention_dim=16, num_layers=3, caption_channels=16), lambda b, n: (torch.randn(b, 2 * 4 * 4, 4), torch.randn(b, 7, 16), torch.randint(100, (b,)), torch.ones(b, 7), 2, 4, 4))
add("sana", "diffusers", lambda m: m.SanaTransformer2DModel(in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8, num_layers=3, num_cross_attention_heads=2, cross_attention_head_dim=8, cross_attention_dim=16, caption_channels=16, sample_size=16), lambda b, n: (torch.randn(b, 4, 16, 16), torch.randn(b, 7, 16), torch.randint(100, (b,))))
add("auraflow", "diffusers", lambda m: m.AuraFlowTransformer2DModel(sample_size=16, in_channels=4, num_mmdit_layers=1, num_single_dit_layers=2, attention_head_dim=8, num_attention_heads=2, joint_attention_dim=16, caption_projection_dim=16, pos_embed_max_size=64), lambda b, n: (torch.randn(b, 4, 16, 16), torch.randn(b, 7, 16), torch.rand(b)))
add("stable_audio", "diffusers", lambda m: m.StableAudioDiTModel(sample_size=32, in_channels=4, num_layers=3, attention_head_dim=8, num_attention_heads=4, num_key_value_attention_heads=2, out_channels=4, cross_attention_dim=16, time_proj_dim=16, global_states_input_dim=16, cross_attention_input_dim=16), lambda b, n: (torch.randn(b, 4, n), torch.rand(b), torch.randn(b, 7, 16), torch.randn(b, 1, 16), torch.randn(n + 1, 4)))
add("cogvideox", "diffusers", lambda m: m.CogVideoXTransformer3DModel(num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, time_embed_dim=8, text_embed_dim=16, num_layers=3, sample_width=8, sample_height=8, sample_frames=9, max_text_seq_length=7), lambda b, n: (torch.randn(b, 3, 4, 8, 8), torch.randn(b, 7, 16), torch.randint(100, (b,))))
by_class("x_mlps_pytorch", rows(16), ResidualNormedMLP={"dim": 16, "depth": 4, "residual_every": 2})
add("mlp", "x_mlps_pytorch", lambda m: m.MLP(16, 32, 32, 8), rows(16))
add("nff", "x_mlps_pytorch.nff", lambda m: m.nFeedforwards(16, 3), sequence(16))
add("grouped", "x_mlps_pytorch.grouped_mlp", lambda m: m.GroupedMLP(16, 32, 8, groups=2), lambda b, n: (torch.randn(b, 2, 16),))
for name in ["AFM", "ONN", "IFM", "DIFM", "DCNMix", "AFN", "CCPM", "MLR", "ESMM", "MMOE"]:
    if name in ("ESMM", "MMOE"):
        add(name, "deepctr_torch.models", lambda m, n=name: _tasks(m, n), clicks)
    else:
        add(name, "deepctr_torch.models", lambda m, n=name: _rates(m, n), clicks)
for name in ["yolov5n.yaml", "yolov10n.yaml", "yolo11n.yaml", "rtdetr-l.yaml"]:
    add(name, "ultralytics.nn.tasks", lambda m, n=name: (m.RTDETRDetectionModel if "detr" in n else m.DetectionModel)(n, nc=4, verbose=False), image())
add("yolo_pose", "ultralytics.nn.tasks", lambda m: m.PoseModel("yolov8n-pose.yaml", nc=1, data_kpt_shape=(5, 3), verbose=False), image())
for name in ["DINOProjectionHead", "SwaVProjectionHead", "MoCoProjectionHead", "BarlowTwinsProjectionHead", "SimSiamPredictionHead"]:
    add(name, "lightly.models.modules", lambda m, n=name: getattr(m, n)(32, 64, *([16, 8] if n == "DINOProjectionHead" else [16] if n != "SimSiamPredictionHead" else [32])), rows(32))
add("deep_kernel", "gpytorch", lambda m: _Process(m), lambda b, n: (torch.randn(6 * b, 4),))
add("tft", "gluonts.torch.model.tft.module", lambda m: m.TemporalFusionTransformerModel(context_length=8, prediction_length=4, d_var=8, d_hidden=8, num_heads=2), lambda b, n: (torch.randn(b, 8), torch.ones(b, 8), torch.randn(b, 1), torch.zeros(b, 1).long(), torch.randn(b, 12, 1), torch.zeros(b, 12, 0).long(), torch.randn(b, 8, 0), torch.zeros(b, 8, 0).long()))
add("feed_forward", "gluonts.torch.model.simple_feedforward.module", lambda m: m.SimpleFeedForwardModel(4, 8, hidden_dimensions=[16, 16]), lambda b, n: (torch.randn(b, 8),))
add("d_linear", "gluonts.torch.model.d_linear.module", lambda m: m.DLinearModel(4, 8, 16, kernel_size=3), lambda b, n: (torch.rand(b, 8), torch.ones(b, 8)))
add("patch_tst", "gluonts.torch.model.patch_tst.module", lambda m: m.PatchTSTModel(prediction_length=4, context_length=8, patch_len=4, stride=2, padding_patch="end", d_model=16, nhead=2, dim_feedforward=32, dropout=0.1, activation="relu", norm_first=False, num_encoder_layers=2), lambda b, n: (torch.rand(b, 8), torch.ones(b, 8)))
add("lag_tst", "gluonts.torch.model.lag_tst.module", lambda m: m.LagTSTModel(prediction_length=4, context_length=8, freq="h", lags_seq=[1, 2], d_model=16, nhead=2, dim_feedforward=32, dropout=0.1, activation="relu", norm_first=False, num_encoder_layers=2), lambda b, n: (torch.rand(b, 10), torch.ones(b, 10)))
add("td3", "stable_baselines3.td3.policies", lambda m: m.TD3Policy(importlib.import_module("gymnasium.spaces").Box(-1.0, 1.0, (8,)), importlib.import_module("gymnasium.spaces").Box(-1.0, 1.0, (2,)), lambda progress: 1e-3).actor, rows(8))
add("combined", "stable_baselines3.common.policies", lambda m: m.MultiInputActorCriticPolicy(_views(), importlib.import_module("gymnasium.spaces").Discrete(3), lambda progress: 1e-3).features_extractor, lambda b, n: ({"image": torch.rand(b, 3, 64, 64), "vector": torch.randn(b, 4)},))
for name, more in {"pythia": {"rotary_percentage": 0.25}, "softcap": {"attention_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "norm_class_name": "RMSNorm", "post_attention_norm": True, "post_mlp_norm": True}, "qk_norm": {"norm_qk": True, "norm_class_name": "RMSNorm", "mlp_class_name": "GemmaMLP", "intermediate_size": 64}, "rope_scaled": {"rope_adjustments": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 32}}}.items():
    add(f"gpt_{name}", "litgpt", lambda m, o=more: m.GPT(m.Config(**{"n_layer": 3, "n_head": 4, "n_embd": 32, "vocab_size": 64, "padded_vocab_size": 64, "block_size": 64, **o})), tokens())
add("gpt_lora", "litgpt.lora", lambda m: m.GPT(m.Config(n_layer=3, n_head=4, n_embd=32, vocab_size=64, padded_vocab_size=64, block_size=64, lora_r=4, lora_alpha=8, lora_query=True, lora_value=True)), tokens())
add("gpt_adapter", "litgpt.adapter", lambda m: m.GPT(m.Config(n_layer=3, n_head=4, n_embd=32, vocab_size=64, padded_vocab_size=64, block_size=64, adapter_start_layer=1)), tokens())
add("sam", "segment_anything.modeling", lambda m: m.TwoWayTransformer(depth=2, embedding_dim=32, num_heads=4, mlp_dim=64), lambda b, n: (torch.randn(b, 32, 8, 8), torch.randn(b, 32, 8, 8), torch.randn(b, 5, 32)))
add("egnn_near", "egnn_pytorch", lambda m: m.EGNN_Network(depth=2, dim=16, num_nearest_neighbors=4, norm_coors=True, coor_weights_clamp_value=2.0), lambda b, n: (torch.randn(b, n, 16), torch.randn(b, n, 3)))
add("egnn_ids", "egnn_pytorch", lambda m: m.EGNN_Network(num_tokens=21, num_positions=64, dim=16, depth=2, num_nearest_neighbors=4), lambda b, n: (torch.randint(21, (b, n)), torch.randn(b, n, 3), torch.ones(b, n).bool()))
add("performer_layer", "performer_pytorch", lambda m: m.Performer(dim=32, depth=2, heads=4, dim_head=8, nb_features=16, causal=False), sequence())
add("perceiver_io", "perceiver_pytorch", lambda m: m.PerceiverIO(dim=16, queries_dim=16, depth=2, num_latents=8, latent_dim=32, logits_dim=10), lambda b, n: (torch.randn(b, n, 16), None, torch.randn(n, 16)))


class _Convs(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, edges).tanh()
        return x


class _With(nn.Module):
    """A layer that takes the first features beside those at hand."""

    def __init__(self, layer: nn.Module, how: str) -> None:
        super().__init__()
        self.layer, self.how = layer, how

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        return self.layer(x, x, edges)


class _Relations(_Convs):
    def forward(self, x: torch.Tensor, edges: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, edges, kinds).tanh()
        return x


class _Gps(nn.Module):
    def __init__(self, m: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([m.GPSConv(16, m.GCNConv(16, 16), heads=2) for _ in range(3)])

    def forward(self, x: torch.Tensor, edges: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, edges, which)
        return x


class _Read(nn.Module):
    def __init__(self, layer: nn.Module, read: nn.Module, width: int) -> None:
        super().__init__()
        self.layer, self.read, self.head = layer, read, nn.Linear(width, 3)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        return self.head(self.read(self.layer(x, edges).relu(), which))


class _TopK(nn.Module):
    def __init__(self, m: Any) -> None:
        super().__init__()
        self.first, self.pool, self.second = m.GCNConv(16, 16), m.TopKPooling(16, 0.5), m.GCNConv(16, 16)
        self.read, self.head = m.global_max_pool, nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        x, edges, _, which, *_ = self.pool(self.first(x, edges).relu(), edges, None, which)
        return self.head(self.read(self.second(x, edges).relu(), which))


class _Vae(nn.Module):
    def __init__(self, m: Any) -> None:
        super().__init__()
        self.model = m.GAE(_Convs([m.GCNConv(16, 16), m.GCNConv(16, 8)]))

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        return self.model.decode(self.model.encode(x, edges), edges)


class _Process(nn.Module):
    """A variational process over learnt features."""

    def __init__(self, m: Any) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

        class Inner(m.models.ApproximateGP):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                points = torch.randn(5, 2)
                distribution = m.variational.CholeskyVariationalDistribution(5)
                super().__init__(m.variational.VariationalStrategy(self, points, distribution))
                self.mean_module, self.covar_module = m.means.ConstantMean(), m.kernels.ScaleKernel(m.kernels.RBFKernel())

            def forward(self, x: torch.Tensor) -> Any:
                return m.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

        self.process = Inner()

    def forward(self, x: torch.Tensor) -> Any:
        out = self.process(self.features(x))
        return out.mean, out.variance


def _columns() -> list[Any]:
    fields = importlib.import_module("deepctr_torch.inputs")
    return [fields.SparseFeat(f"C{i}", 8, embedding_dim=4) for i in range(3)] + [fields.DenseFeat(f"I{i}", 1) for i in range(2)]


def _rates(models: Any, name: str) -> nn.Module:
    columns = _columns()
    if name == "MLR":
        return models.MLR(columns, region_num=2)
    return getattr(models, name)(columns, columns)


def _tasks(models: Any, name: str) -> nn.Module:
    return getattr(models, name)(_columns(), task_types=["binary", "binary"], task_names=["a", "b"])


def _views() -> Any:
    spaces = importlib.import_module("gymnasium.spaces")
    return spaces.Dict({"image": spaces.Box(0, 255, (3, 64, 64), "uint8"), "vector": spaces.Box(-1.0, 1.0, (4,))})
