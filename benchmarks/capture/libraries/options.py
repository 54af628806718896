"""Models of transformers with the heads, inputs and options that people train with, beside the usual ones.

How a model is listed is left to ``catalogue``; the usual heads are walked by ``benchmarks.capture`` itself.
"""

# ruff: noqa: E501
# fmt: off

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .catalogue import Inputs, add

__all__: list[str] = []

TEXT = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 64, "pad_token_id": 0}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "pad_token_id": 0}
T5 = {"vocab_size": 64, "d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4, "pad_token_id": 0, "decoder_start_token_id": 0}
BART = {"vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": 2}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_key_value_heads": 2}
PICTURE = {"image_size": 32, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}


def ids(b: int, n: int) -> Tensor:
    """Token ids, none of them padding or an end."""
    return torch.randint(3, 64, (b, n))


def ragged(b: int, n: int) -> Tensor:
    """A mask whose rows end one by one."""
    return (torch.arange(n) < n - torch.arange(b)[:, None]).long()


def some(b: int, n: int) -> Tensor:
    """Labels of which a few are not counted."""
    return ids(b, n).masked_fill(torch.rand(b, n) < 0.2, -100)


def pixels(b: int, n: int) -> Tensor:
    """Small pictures."""
    return torch.randn(b, 3, 32, 32)


def listed(name: str, kind: str, head: str, options: dict[str, Any], inputs: Inputs, then: Callable[[Any], Any] = lambda model: model) -> None:
    """List a model of a config's class, ``kind``, and options, with what is done to it ``then``."""
    add(name, "transformers", lambda m: then(getattr(m, head)(getattr(m, f"{kind}Config")(**options))), inputs)


def checkpointed(model: Any) -> Any:
    """The model with its own checkpointing."""
    model.gradient_checkpointing_enable()
    return model


def checkpointed_again(model: Any) -> Any:
    """The same by the older of torch's ways."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    return model


def frozen_but_last(model: Any) -> Any:
    """The last layers alone are trained."""
    for p in list(model.parameters())[:-6]:
        p.requires_grad_(False)
    return model


def resized(model: Any) -> Any:
    """More tokens than the model was made with."""
    model.resize_token_embeddings(70)
    return model


def labelled(b: int, n: int) -> dict[str, Any]:
    x = ids(b, n)
    return {"input_ids": x, "labels": x}


listed("llama_labels", "Llama", "LlamaForCausalLM", TEXT, labelled)
listed("llama_ragged", "Llama", "LlamaForCausalLM", TEXT, lambda b, n: {"input_ids": ids(b, n), "attention_mask": ragged(b, n), "labels": some(b, n)})
listed("llama_left", "Llama", "LlamaForCausalLM", TEXT, lambda b, n: {"input_ids": ids(b, n), "attention_mask": ragged(b, n).flip(1), "position_ids": (ragged(b, n).flip(1).cumsum(1) - 1).clamp(min=0)})
listed("llama_hidden", "Llama", "LlamaForCausalLM", TEXT, lambda b, n: {"input_ids": ids(b, n), "output_hidden_states": True, "use_cache": False})
listed("llama_attentions", "Llama", "LlamaForCausalLM", TEXT | {"attn_implementation": "eager"}, lambda b, n: {"input_ids": ids(b, n), "output_attentions": True})
listed("llama_embeds", "Llama", "LlamaForCausalLM", TEXT, lambda b, n: {"inputs_embeds": torch.randn(b, n, 32), "labels": ids(b, n)})
listed("llama_keep", "Llama", "LlamaForCausalLM", TEXT, lambda b, n: {"input_ids": ids(b, n), "logits_to_keep": 4})
listed("llama_tuple", "Llama", "LlamaForCausalLM", TEXT, lambda b, n: {"input_ids": ids(b, n), "labels": ids(b, n), "return_dict": False})
listed("llama_items", "Llama", "LlamaForCausalLM", TEXT, lambda b, n: {"input_ids": ids(b, n), "labels": ids(b, n), "num_items_in_batch": torch.tensor(b * n)})
listed("llama_checkpointed", "Llama", "LlamaForCausalLM", TEXT, labelled, checkpointed)
listed("llama_reentrant", "Llama", "LlamaForCausalLM", TEXT, labelled, checkpointed_again)
listed("llama_frozen", "Llama", "LlamaForCausalLM", TEXT, labelled, frozen_but_last)
listed("llama_resized", "Llama", "LlamaForCausalLM", TEXT | {"tie_word_embeddings": True}, labelled, resized)
listed("llama_bf16", "Llama", "LlamaForCausalLM", TEXT, labelled, lambda m: m.bfloat16())
listed("llama_classes", "Llama", "LlamaForSequenceClassification", TEXT | {"num_labels": 3}, lambda b, n: {"input_ids": ids(b, n) * ragged(b, n), "labels": torch.randint(3, (b,))})
listed("llama_several", "Llama", "LlamaForSequenceClassification", TEXT | {"num_labels": 3}, lambda b, n: {"input_ids": ids(b, n), "labels": torch.rand(b, 3)})
listed("llama_regression", "Llama", "LlamaForSequenceClassification", TEXT | {"num_labels": 1}, lambda b, n: {"input_ids": ids(b, n), "labels": torch.rand(b)})
listed("llama_tags", "Llama", "LlamaForTokenClassification", TEXT | {"num_labels": 5}, lambda b, n: {"input_ids": ids(b, n), "attention_mask": ragged(b, n), "labels": torch.randint(5, (b, n)).masked_fill(ragged(b, n) == 0, -100)})
listed("llama_spans", "Llama", "LlamaForQuestionAnswering", TEXT, lambda b, n: {"input_ids": ids(b, n), "start_positions": torch.randint(n, (b,)), "end_positions": torch.randint(n, (b,))})
listed("llama_yarn", "Llama", "LlamaForCausalLM", TEXT | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}}, labelled)
listed("llama_dynamic", "Llama", "LlamaForCausalLM", TEXT | {"max_position_embeddings": 16, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, labelled)
listed("mistral_window", "Mistral", "MistralForCausalLM", TEXT | {"sliding_window": 8, "num_key_value_heads": 2}, labelled)
listed("gemma2_caps", "Gemma2", "Gemma2ForCausalLM", TEXT | {"head_dim": 8, "num_key_value_heads": 2, "sliding_window": 8, "attn_implementation": "eager"}, labelled)
listed("gemma3_text", "Gemma3Text", "Gemma3ForCausalLM", TEXT | {"head_dim": 8, "num_key_value_heads": 2, "sliding_window": 8}, labelled)
listed("mixtral_balance", "Mixtral", "MixtralForCausalLM", TEXT | EXPERTS | {"output_router_logits": True, "router_aux_loss_coef": 0.02}, labelled)
listed("mixtral_balance_ragged", "Mixtral", "MixtralForCausalLM", TEXT | EXPERTS | {"output_router_logits": True}, lambda b, n: {"input_ids": ids(b, n), "attention_mask": ragged(b, n), "labels": some(b, n)})
listed("qwen2_moe_balance", "Qwen2Moe", "Qwen2MoeForCausalLM", TEXT | EXPERTS | {"output_router_logits": True, "shared_expert_intermediate_size": 32}, labelled)
listed("olmoe_balance", "Olmoe", "OlmoeForCausalLM", TEXT | EXPERTS | {"output_router_logits": True}, labelled)
listed("jamba_balance", "Jamba", "JambaForCausalLM", TEXT | EXPERTS | {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1, "output_router_logits": True, "use_mamba_kernels": False, "mamba_d_state": 4, "mamba_expand": 2}, labelled)
listed("switch_balance", "SwitchTransformers", "SwitchTransformersForConditionalGeneration", T5 | {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 4, "router_jitter_noise": 0.0, "dropout_rate": 0.0}, labelled)
listed("gpt2_two_heads", "GPT2", "GPT2DoubleHeadsModel", GPT2, lambda b, n: {"input_ids": torch.randint(3, 64, (b, 2, n)), "mc_token_ids": torch.randint(n, (b, 2)), "labels": torch.randint(64, (b, 2, n)), "mc_labels": torch.randint(2, (b,))})
listed("gpt2_types", "GPT2", "GPT2LMHeadModel", GPT2, lambda b, n: {"input_ids": ids(b, n), "token_type_ids": torch.randint(2, (b, n)), "position_ids": torch.arange(n).expand(b, n), "labels": ids(b, n)})
listed("gpt2_cross", "GPT2", "GPT2LMHeadModel", GPT2 | {"add_cross_attention": True}, lambda b, n: {"input_ids": ids(b, n), "encoder_hidden_states": torch.randn(b, 7, 32), "encoder_attention_mask": ragged(b, 7), "labels": ids(b, n)})
listed("gpt2_upcast", "GPT2", "GPT2LMHeadModel", GPT2 | {"reorder_and_upcast_attn": True, "scale_attn_by_inverse_layer_idx": True, "attn_implementation": "eager"}, labelled)
listed("gpt_neo_local", "GPTNeo", "GPTNeoForCausalLM", {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 64, "window_size": 8, "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 64}, labelled)
listed("bert_pretraining", "Bert", "BertForPreTraining", TEXT, lambda b, n: {"input_ids": ids(b, n), "token_type_ids": torch.randint(2, (b, n)), "attention_mask": ragged(b, n), "labels": some(b, n), "next_sentence_label": torch.randint(2, (b,))})
listed("bert_next", "Bert", "BertForNextSentencePrediction", TEXT, lambda b, n: {"input_ids": ids(b, n), "labels": torch.randint(2, (b,))})
listed("bert_choices", "Bert", "BertForMultipleChoice", TEXT, lambda b, n: {"input_ids": torch.randint(3, 64, (b, 3, n)), "labels": torch.randint(3, (b,))})
listed("bert_causal", "Bert", "BertLMHeadModel", TEXT | {"is_decoder": True, "add_cross_attention": True}, lambda b, n: {"input_ids": ids(b, n), "encoder_hidden_states": torch.randn(b, 5, 32), "labels": ids(b, n)})
listed("bert_checkpointed", "Bert", "BertForMaskedLM", TEXT, lambda b, n: {"input_ids": ids(b, n), "attention_mask": ragged(b, n), "labels": some(b, n)}, checkpointed)
listed("albert_pretraining", "Albert", "AlbertForPreTraining", TEXT | {"embedding_size": 16}, lambda b, n: {"input_ids": ids(b, n), "labels": some(b, n), "sentence_order_label": torch.randint(2, (b,))})
listed("electra_discriminator", "Electra", "ElectraForPreTraining", TEXT | {"embedding_size": 16}, lambda b, n: {"input_ids": ids(b, n), "attention_mask": ragged(b, n), "labels": torch.randint(2, (b, n)).float()})
listed("roberta_spans", "Roberta", "RobertaForQuestionAnswering", TEXT | {"max_position_embeddings": 80, "pad_token_id": 1}, lambda b, n: {"input_ids": ids(b, n), "start_positions": torch.randint(2 * n, (b,)), "end_positions": torch.randint(2 * n, (b,))})
listed("xlnet_permuted", "XLNet", "XLNetLMHeadModel", {"vocab_size": 64, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}, lambda b, n: {"input_ids": ids(b, n), "perm_mask": torch.rand(b, n, n).gt(0.5).float(), "target_mapping": torch.eye(n)[:3].expand(b, 3, n), "labels": ids(b, 3)})
listed("xlnet_memory", "XLNet", "XLNetLMHeadModel", {"vocab_size": 64, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64, "mem_len": 8}, lambda b, n: {"input_ids": ids(b, n), "labels": ids(b, n), "use_mems": True})
listed("longformer_global", "Longformer", "LongformerForSequenceClassification", TEXT | {"attention_window": 8}, lambda b, n: {"input_ids": ids(b, n), "attention_mask": ragged(b, n), "global_attention_mask": torch.eye(n)[0].long().expand(b, n), "labels": torch.randint(2, (b,))})
listed("led", "LED", "LEDForConditionalGeneration", BART | {"attention_window": 8, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64}, lambda b, n: {"input_ids": ids(b, n), "global_attention_mask": torch.eye(n)[0].long().expand(b, n), "labels": ids(b, 6)})
listed("bigbird_sparse", "BigBird", "BigBirdForMaskedLM", TEXT | {"max_position_embeddings": 128, "attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1}, lambda b, n: {"input_ids": ids(b, 2 * n), "labels": ids(b, 2 * n)})
listed("reformer", "Reformer", "ReformerModelWithLMHead", {"vocab_size": 64, "hidden_size": 32, "attention_head_size": 8, "num_attention_heads": 4, "feed_forward_size": 64, "attn_layers": ["local", "lsh"], "is_decoder": True, "axial_pos_embds": False, "max_position_embeddings": 64, "lsh_attn_chunk_length": 8, "local_attn_chunk_length": 8, "num_hashes": 1, "num_buckets": 4, "hash_seed": 0}, labelled)
listed("funnel", "Funnel", "FunnelForPreTraining", {"vocab_size": 64, "d_model": 32, "block_sizes": [1, 1], "n_head": 4, "d_head": 8, "d_inner": 64, "num_decoder_layers": 1}, lambda b, n: {"input_ids": ids(b, n), "labels": torch.randint(2, (b, n))})
listed("t5_labels", "T5", "T5ForConditionalGeneration", T5, lambda b, n: {"input_ids": ids(b, n), "attention_mask": ragged(b, n), "labels": some(b, 7)})
listed("t5_decoder", "T5", "T5ForConditionalGeneration", T5, lambda b, n: {"inputs_embeds": torch.randn(b, n, 32), "decoder_inputs_embeds": torch.randn(b, 7, 32), "labels": ids(b, 7)})
listed("t5_encoded", "T5", "T5ForConditionalGeneration", T5, lambda b, n: {"encoder_outputs": (torch.randn(b, n, 32),), "labels": ids(b, 7)})
listed("t5_classes", "T5", "T5ForSequenceClassification", T5 | {"eos_token_id": 1}, lambda b, n: {"input_ids": ids(b, n).index_fill(1, torch.tensor(n - 1), 1), "labels": torch.randint(2, (b,))})
listed("bart_labels", "Bart", "BartForConditionalGeneration", BART, lambda b, n: {"input_ids": ids(b, n), "attention_mask": ragged(b, n), "labels": some(b, 7)})
listed("bart_classes", "Bart", "BartForSequenceClassification", BART, lambda b, n: {"input_ids": ids(b, n).index_fill(1, torch.tensor(n - 1), 2), "labels": torch.randint(3, (b,))})
listed("bart_layerdrop", "Bart", "BartForConditionalGeneration", BART | {"encoder_layerdrop": 0.3, "decoder_layerdrop": 0.3}, lambda b, n: {"input_ids": ids(b, n), "labels": ids(b, 7)})
listed("pegasus", "Pegasus", "PegasusForConditionalGeneration", BART, lambda b, n: {"input_ids": ids(b, n), "decoder_input_ids": ids(b, 5), "decoder_attention_mask": ragged(b, 5)})
listed("prophetnet", "ProphetNet", "ProphetNetForConditionalGeneration", {"vocab_size": 64, "hidden_size": 32, "num_encoder_layers": 2, "num_decoder_layers": 2, "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64, "ngram": 2}, lambda b, n: {"input_ids": ids(b, n), "labels": ids(b, 7)})
add("bert_to_bert", "transformers", lambda m: _encoder_decoder(m), lambda b, n: {"input_ids": ids(b, n), "attention_mask": ragged(b, n), "labels": some(b, 7)})
add("vit_to_gpt2", "transformers", lambda m: _captions(m), lambda b, n: {"pixel_values": pixels(b, n), "labels": some(b, 7)})
add("two_towers", "transformers", lambda m: m.VisionTextDualEncoderModel(m.VisionTextDualEncoderConfig.from_vision_text_configs(m.ViTConfig(**PICTURE), m.BertConfig(**TEXT), projection_dim=16)), lambda b, n: {"input_ids": ids(b, n), "pixel_values": pixels(b, n), "return_loss": True})
add("speech_to_bart", "transformers", lambda m: _transcripts(m), lambda b, n: {"input_values": torch.randn(b, 400), "labels": some(b, 7)})
for family in ("CLIP", "ChineseCLIP"):
    add(f"{family.lower()}_loss", "transformers", lambda m, f=family: getattr(m, f"{f}Model")(getattr(m, f"{f}Config")(text_config=TEXT, vision_config=PICTURE, projection_dim=16)), lambda b, n: {"input_ids": ids(b, n), "pixel_values": pixels(b, n), "return_loss": True})
add("siglip_loss", "transformers", lambda m: m.SiglipModel(m.SiglipConfig(text_config=TEXT, vision_config=PICTURE)), lambda b, n: {"input_ids": ids(b, n), "pixel_values": pixels(b, n), "return_loss": True})
add("clap_loss", "transformers", lambda m: m.ClapModel(m.ClapConfig(text_config=TEXT, audio_config={"hidden_size": 32, "patch_embeds_hidden_size": 16, "depths": [1, 1], "num_attention_heads": [2, 2], "num_mel_bins": 16, "spec_size": 64, "window_size": 4, "patch_size": 4, "patch_stride": [4, 4], "enable_fusion": False}, projection_dim=16)), lambda b, n: {"input_ids": ids(b, n), "input_features": torch.randn(b, 1, 64, 16), "return_loss": True})
listed("vit_masked", "ViT", "ViTForMaskedImageModeling", PICTURE | {"encoder_stride": 8}, lambda b, n: {"pixel_values": pixels(b, n), "bool_masked_pos": torch.rand(b, 16) > 0.5})
listed("vit_larger", "ViT", "ViTForImageClassification", PICTURE | {"num_labels": 3}, lambda b, n: {"pixel_values": torch.randn(b, 3, 8 * (n // 4), 8 * (n // 4)), "interpolate_pos_encoding": True, "labels": torch.randint(3, (b,))})
listed("vit_mae", "ViTMAE", "ViTMAEForPreTraining", PICTURE | {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 2, "decoder_num_attention_heads": 4, "decoder_intermediate_size": 32, "norm_pix_loss": True}, lambda b, n: {"pixel_values": pixels(b, n), "noise": torch.rand(b, 16)})
listed("beit_masked", "Beit", "BeitForMaskedImageModeling", PICTURE | {"vocab_size": 32, "use_mask_token": True}, lambda b, n: {"pixel_values": pixels(b, n), "bool_masked_pos": (torch.arange(16) % 3 == 0).expand(b, 16), "labels": torch.randint(32, (6 * b,))})
listed("swin_masked", "Swin", "SwinForMaskedImageModeling", {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4, "encoder_stride": 4}, lambda b, n: {"pixel_values": pixels(b, n), "bool_masked_pos": torch.rand(b, 256) > 0.5})
listed("dinov2_backbone", "Dinov2", "Dinov2Backbone", PICTURE | {"out_features": ["stage1", "stage3"]}, lambda b, n: {"pixel_values": pixels(b, n)})
listed("segformer_labels", "Segformer", "SegformerForSemanticSegmentation", {"depths": [1, 1], "num_encoder_blocks": 2, "hidden_sizes": [16, 32], "sr_ratios": [2, 1], "num_attention_heads": [2, 2], "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16, "num_labels": 3}, lambda b, n: {"pixel_values": torch.randn(b, 3, 2 * n, 2 * n), "labels": torch.randint(3, (b, 2 * n, 2 * n))})
listed("detr_labels", "Detr", "DetrForObjectDetection", BART | {"num_queries": 5, "num_labels": 3, "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone_config": {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", "out_features": ["stage2"]}}, lambda b, n: {"pixel_values": pixels(b, n), "labels": [{"class_labels": torch.randint(3, (2,)), "boxes": torch.rand(2, 4) * 0.4 + 0.2} for _ in range(b)]})
listed("yolos_labels", "Yolos", "YolosForObjectDetection", PICTURE | {"image_size": [32, 32], "num_detection_tokens": 5, "num_labels": 3}, lambda b, n: {"pixel_values": pixels(b, n), "labels": [{"class_labels": torch.randint(3, (2,)), "boxes": torch.rand(2, 4) * 0.4 + 0.2} for _ in range(b)]})
listed("videomae", "VideoMAE", "VideoMAEForPreTraining", PICTURE | {"num_frames": 4, "decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 4, "decoder_intermediate_size": 32}, lambda b, n: {"pixel_values": torch.randn(b, 4, 3, 32, 32), "bool_masked_pos": (torch.arange(32) % 4 > 0).expand(b, 32)})
listed("dpt", "DPT", "DPTForDepthEstimation", PICTURE | {"num_hidden_layers": 4, "is_hybrid": False, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 16}, lambda b, n: {"pixel_values": pixels(b, n)})
listed("whisper_labels", "Whisper", "WhisperForConditionalGeneration", BART | {"num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 64, "suppress_tokens": None, "begin_suppress_tokens": None}, lambda b, n: {"input_features": torch.randn(b, 16, 64), "labels": some(b, n // 2)})
listed("whisper_masked", "Whisper", "WhisperForConditionalGeneration", BART | {"num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 64, "apply_spec_augment": True, "mask_time_prob": 0.2, "mask_feature_prob": 0.1, "suppress_tokens": None, "begin_suppress_tokens": None}, lambda b, n: {"input_features": torch.randn(b, 16, 64), "attention_mask": ragged(b, 64), "labels": some(b, n // 2)})
listed("whisper_classes", "Whisper", "WhisperForAudioClassification", BART | {"num_mel_bins": 16, "max_source_positions": 32, "use_weighted_layer_sum": True, "num_labels": 3}, lambda b, n: {"input_features": torch.randn(b, 16, 64), "labels": torch.randint(3, (b,))})
SOUND = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "conv_dim": [16, 16], "conv_stride": [4, 2], "conv_kernel": [8, 3], "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "pad_token_id": 0}
listed("wav2vec2_ctc", "Wav2Vec2", "Wav2Vec2ForCTC", SOUND, lambda b, n: {"input_values": torch.randn(b, 16 * n), "attention_mask": ragged(b, 16 * n), "labels": torch.randint(1, 32, (b, 5))})
listed("wav2vec2_pretraining", "Wav2Vec2", "Wav2Vec2ForPreTraining", SOUND | {"codevector_dim": 16, "proj_codevector_dim": 16, "num_codevectors_per_group": 8, "num_negatives": 4, "feat_quantizer_dropout": 0.0}, lambda b, n: {"input_values": torch.randn(b, 260), "mask_time_indices": (torch.arange(31) % 3 == 0).expand(b, -1), "sampled_negative_indices": torch.randint(10, (b, 31, 4))})
listed("hubert_classes", "Hubert", "HubertForSequenceClassification", SOUND | {"use_weighted_layer_sum": True, "num_labels": 3}, lambda b, n: {"input_values": torch.randn(b, 16 * n), "labels": torch.randint(3, (b,))})
listed("wavlm_vectors", "WavLM", "WavLMForXVector", SOUND | {"tdnn_dim": [16, 16], "tdnn_kernel": [3, 1], "tdnn_dilation": [1, 1], "xvector_output_dim": 16, "num_labels": 3}, lambda b, n: {"input_values": torch.randn(b, 16 * n), "labels": torch.randint(3, (b,))})
listed("mamba_labels", "Mamba", "MambaForCausalLM", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 4, "pad_token_id": 0}, labelled)
listed("mamba2_labels", "Mamba2", "Mamba2ForCausalLM", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8, "pad_token_id": 0}, labelled)
listed("rwkv_labels", "Rwkv", "RwkvForCausalLM", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "context_length": 64}, lambda b, n: {"input_ids": ids(b, n // 4), "labels": ids(b, n // 4), "use_cache": False})
listed("recurrent_gemma", "RecurrentGemma", "RecurrentGemmaForCausalLM", TEXT | {"lru_width": 32, "attention_window_size": 8, "conv1d_width": 4}, labelled)
listed("falcon_alibi", "Falcon", "FalconForCausalLM", TEXT | {"alibi": True, "new_decoder_architecture": False}, labelled)
listed("bloom_labels", "Bloom", "BloomForCausalLM", {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}, lambda b, n: {"input_ids": ids(b, n), "attention_mask": ragged(b, n), "labels": some(b, n)})
listed("mpt_labels", "Mpt", "MptForCausalLM", {"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}, labelled)
listed("layoutlm", "LayoutLM", "LayoutLMForTokenClassification", TEXT | {"max_2d_position_embeddings": 32}, lambda b, n: {"input_ids": ids(b, n), "bbox": torch.randint(16, (b, n, 4)).sort(-1).values[..., [0, 1, 2, 3]], "labels": torch.randint(2, (b, n))})
listed("luke_pairs", "Luke", "LukeForEntityPairClassification", TEXT | {"entity_vocab_size": 16, "entity_emb_size": 16, "num_labels": 3, "pad_token_id": 1, "max_position_embeddings": 80}, lambda b, n: {"input_ids": ids(b, n), "entity_ids": torch.randint(2, 16, (b, 2)), "entity_position_ids": torch.randint(n, (b, 2, 5)), "labels": torch.randint(3, (b,))})
listed("tapas", "Tapas", "TapasForQuestionAnswering", TEXT | {"type_vocab_sizes": [3, 16, 16, 2, 8, 8, 4], "num_aggregation_labels": 0}, lambda b, n: {"input_ids": ids(b, n), "token_type_ids": torch.stack([torch.full((b, n), 1), *(torch.arange(n).remainder(k).expand(b, n) for k in (4, 4)), *(torch.zeros(b, n).long() for _ in range(4))], -1), "labels": torch.randint(2, (b, n))})
listed("decision", "DecisionTransformer", "DecisionTransformerModel", {"state_dim": 5, "act_dim": 3, "hidden_size": 32, "n_layer": 2, "n_head": 4, "max_ep_len": 64}, lambda b, n: {"states": torch.randn(b, n, 5), "actions": torch.randn(b, n, 3), "rewards": torch.randn(b, n, 1), "returns_to_go": torch.randn(b, n, 1), "timesteps": torch.arange(n).expand(b, n), "attention_mask": ragged(b, n)})
SERIES = {"prediction_length": 6, "context_length": 16, "lags_sequence": [1, 2], "num_time_features": 2, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}


def series(b: int, n: int) -> dict[str, Any]:
    """A past and a future."""
    return {"past_values": torch.rand(b, 18) + 1, "past_time_features": torch.randn(b, 18, 2), "past_observed_mask": (torch.rand(b, 18) > 0.1).float(), "future_values": torch.rand(b, 6) + 1, "future_time_features": torch.randn(b, 6, 2)}


listed("time_series", "TimeSeriesTransformer", "TimeSeriesTransformerForPrediction", SERIES, series)
listed("informer", "Informer", "InformerForPrediction", SERIES, series)
listed("autoformer", "Autoformer", "AutoformerForPrediction", SERIES | {"label_length": 4, "moving_average": 5}, series)
listed("patchtst", "PatchTST", "PatchTSTForPrediction", {"num_input_channels": 2, "context_length": 32, "patch_length": 8, "patch_stride": 8, "d_model": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 32, "prediction_length": 6}, lambda b, n: {"past_values": torch.randn(b, 32, 2), "future_values": torch.randn(b, 6, 2)})
listed("patchtst_masked", "PatchTST", "PatchTSTForPretraining", {"num_input_channels": 2, "context_length": 32, "patch_length": 8, "patch_stride": 8, "d_model": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 32, "random_mask_ratio": 0.5}, lambda b, n: {"past_values": torch.randn(b, 32, 2)})
listed("patchtsmixer", "PatchTSMixer", "PatchTSMixerForPrediction", {"num_input_channels": 2, "context_length": 32, "patch_length": 8, "patch_stride": 8, "d_model": 16, "num_layers": 2, "prediction_length": 6, "loss": "nll", "distribution_output": "normal"}, lambda b, n: {"past_values": torch.randn(b, 32, 2), "future_values": torch.randn(b, 6, 2)})
listed("blip_captions", "Blip", "BlipForConditionalGeneration", {"text_config": TEXT | {"bos_token_id": 1, "eos_token_id": 2, "sep_token_id": 2, "encoder_hidden_size": 32}, "vision_config": PICTURE, "projection_dim": 16}, lambda b, n: {"input_ids": ids(b, n), "pixel_values": pixels(b, n), "labels": ids(b, n)})
listed("blip_retrieval", "Blip", "BlipModel", {"text_config": TEXT | {"encoder_hidden_size": 32}, "vision_config": PICTURE, "projection_dim": 16}, lambda b, n: {"input_ids": ids(b, n), "pixel_values": pixels(b, n), "return_loss": True})
listed("git", "Git", "GitForCausalLM", TEXT | {"vision_config": PICTURE}, lambda b, n: {"input_ids": ids(b, n), "pixel_values": pixels(b, n), "labels": ids(b, n)})
listed("vilt_answers", "Vilt", "ViltForQuestionAnswering", TEXT | {"image_size": 32, "patch_size": 8, "num_labels": 4, "max_image_length": -1}, lambda b, n: {"input_ids": ids(b, n), "pixel_values": pixels(b, n), "pixel_mask": torch.ones(b, 32, 32).long(), "labels": torch.rand(b, 4)})
listed("owlvit", "OwlViT", "OwlViTForObjectDetection", {"text_config": TEXT | {"max_position_embeddings": 16}, "vision_config": PICTURE, "projection_dim": 32}, lambda b, n: {"input_ids": ids(2 * b, 8), "pixel_values": pixels(b, n)})
listed("sam", "Sam", "SamModel", {"vision_config": PICTURE | {"output_channels": 16, "window_size": 2, "global_attn_indexes": [1], "num_pos_feats": 8, "mlp_dim": 64}, "prompt_encoder_config": {"hidden_size": 16, "image_size": 32, "patch_size": 8, "mask_input_channels": 4}, "mask_decoder_config": {"hidden_size": 16, "mlp_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "iou_head_hidden_dim": 16}}, lambda b, n: {"pixel_values": pixels(b, n), "input_points": 32 * torch.rand(b, 1, 2, 2)})
listed("encodec", "Encodec", "EncodecModel", {"num_filters": 4, "hidden_size": 16, "codebook_size": 16, "codebook_dim": 16, "upsampling_ratios": [4, 2], "num_lstm_layers": 1, "target_bandwidths": [24.0], "sampling_rate": 24000}, lambda b, n: {"input_values": torch.randn(b, 1, 16 * n)})
listed("vits", "Vits", "VitsModel", {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 16, "flow_size": 16, "spectrogram_bins": 16, "upsample_initial_channel": 16, "upsample_rates": [4, 2], "upsample_kernel_sizes": [8, 4], "resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1]], "prior_encoder_num_wavenet_layers": 1, "posterior_encoder_num_wavenet_layers": 1, "wavenet_dilation_rate": 1}, lambda b, n: {"input_ids": torch.randint(1, 32, (b, 8))})
listed("esm_contacts", "Esm", "EsmForMaskedLM", TEXT | {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32, "position_embedding_type": "rotary", "token_dropout": True}, lambda b, n: {"input_ids": torch.randint(2, 33, (b, n)), "attention_mask": ragged(b, n), "labels": torch.randint(2, 33, (b, n))})
listed("perceiver_text", "Perceiver", "PerceiverForMaskedLM", {"num_latents": 8, "d_latents": 16, "d_model": 16, "num_blocks": 1, "num_self_attends_per_block": 2, "num_self_attention_heads": 2, "num_cross_attention_heads": 2, "vocab_size": 64, "max_position_embeddings": 32, "qk_channels": 16, "v_channels": 16}, lambda b, n: {"inputs": ids(b, 32), "attention_mask": ragged(b, 32), "labels": ids(b, 32)})
listed("data2vec", "Data2VecVision", "Data2VecVisionForImageClassification", PICTURE | {"num_labels": 3, "drop_path_rate": 0.2}, lambda b, n: {"pixel_values": pixels(b, n), "labels": torch.randint(3, (b,))})
listed("modernbert", "ModernBert", "ModernBertForMaskedLM", TEXT | {"global_attn_every_n_layers": 2, "local_attention": 8, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}, lambda b, n: {"input_ids": ids(b, n), "attention_mask": ragged(b, n), "labels": some(b, n)})
listed("deberta_tags", "DebertaV2", "DebertaV2ForTokenClassification", TEXT | {"relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"], "conv_kernel_size": 3}, lambda b, n: {"input_ids": ids(b, n), "attention_mask": ragged(b, n), "labels": torch.randint(2, (b, n))})
add("lora_labels", "peft", lambda m: _adapted(m, "LoraConfig", r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"]), labelled)
add("dora_labels", "peft", lambda m: _adapted(m, "LoraConfig", r=4, target_modules="all-linear", use_dora=True), labelled)
add("prompt_labels", "peft", lambda m: _adapted(m, "PromptTuningConfig", num_virtual_tokens=4), lambda b, n: {"input_ids": ids(b, n), "attention_mask": ragged(b, n), "labels": some(b, n)})
add("lora_checkpointed", "peft", lambda m: _checkpointed_adapters(m), labelled)
add("rslora_embedding", "peft", lambda m: _adapted(m, "LoraConfig", r=4, target_modules=["embed_tokens", "q_proj"], use_rslora=True, lora_dropout=0.1), labelled)


def _encoder_decoder(m: Any) -> nn.Module:
    config = m.EncoderDecoderConfig.from_encoder_decoder_configs(m.BertConfig(**TEXT), m.BertConfig(**TEXT))
    config.decoder_start_token_id = config.pad_token_id = 0
    return m.EncoderDecoderModel(config)


def _captions(m: Any) -> nn.Module:
    config = m.VisionEncoderDecoderConfig.from_encoder_decoder_configs(m.ViTConfig(**PICTURE), m.GPT2Config(**GPT2))
    config.decoder_start_token_id = config.pad_token_id = 0
    return m.VisionEncoderDecoderModel(config)


def _transcripts(m: Any) -> nn.Module:
    config = m.SpeechEncoderDecoderConfig.from_encoder_decoder_configs(m.Wav2Vec2Config(**SOUND), m.BartConfig(**BART))
    config.decoder_start_token_id = config.pad_token_id = 0
    return m.SpeechEncoderDecoderModel(config)


def _adapted(m: Any, kind: str, **options: Any) -> nn.Module:
    models = importlib.import_module("transformers")
    return m.get_peft_model(models.LlamaForCausalLM(models.LlamaConfig(**TEXT)), getattr(m, kind)(task_type="CAUSAL_LM", **options))


def _checkpointed_adapters(m: Any) -> nn.Module:
    model = _adapted(m, "LoraConfig", r=4, target_modules=["q_proj", "v_proj"])
    model.enable_input_require_grads()
    return checkpointed(model)
