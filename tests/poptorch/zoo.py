"""Published models, each tried beside eager PyTorch: inference, three steps of training, what the first call costs.

    python -m tests.poptorch.zoo                          # tries what has not been tried yet, and writes docs/models.md
    python -m tests.poptorch.zoo --minutes 10 transformers  # for ten minutes, of one package
    python -m tests.poptorch.zoo --again                  # once more what has failed
    python -m tests.poptorch.zoo --short swin_b swin_s    # with one of equal layers in a row, where there are many

It needs `torchvision`, `timm` and `transformers`. Models are small where they can be, with random weights. What is
found is kept in docs/models.jsonl, a line for each model, so it can be stopped, and goes on there. Each model runs in a
process of its own, that is forked once everything has been imported.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

import poptorch

DOCS = Path(__file__).parents[2] / "docs"
KEPT, PAGE = DOCS / "models.jsonl", DOCS / "models.md"
TOO_LONG = "It took too long."
SECONDS = 600
"""How much of a processor one model may take."""


@dataclass(frozen=True)
class Found:
    """What came of trying a model.

    Attributes:
        package, name: the model.
        millions: of its parameters.
        inference, training: empty if the numbers are those of eager; else why not, in a sentence.
        difference: the largest one between results, relative to the largest result.
        first_inference, first_training: CPU seconds of the first call.
        rounding: how far rounding alone moves eager's losses, of what they are, where that decides; see `tried`.
        is_short: whether one of equal layers in a row was kept, where the model is else tried whole.
    """

    package: str
    name: str
    millions: float = 0.0
    inference: str = "It was not tried."
    training: str = "It was not tried."
    difference: float = 0.0
    first_inference: float = 0.0
    first_training: float = 0.0
    rounding: float = 0.0
    is_short: bool = False


@dataclass(frozen=True)
class Model:
    """A model to try.

    Attributes:
        package, name: what the table calls it.
        make: makes it, and what it is called with, in inference and in training.
    """

    package: str
    name: str
    make: Callable[[], tuple[torch.nn.Module, dict[str, Any], dict[str, Any]]]


# torchvision ----------------------------------------------------------------------------------------------------------


def torchvision_models() -> Iterator[Model]:
    """All that it has, but those that are quantized."""
    import torchvision

    for name in torchvision.models.list_models():
        if not name.startswith("quantized_"):
            yield Model("torchvision", name, lambda name=name: _torchvision(name))


def _torchvision(name: str) -> Any:
    import torchvision

    settings: dict[str, Any] = {"weights": None}
    size, more = 64, {}
    is_detection = "rcnn" in name or name.startswith(("ssd", "retinanet", "fcos"))
    if is_detection or "deeplab" in name or name.startswith(("fcn_", "lraspp")):
        settings |= {"weights_backbone": None, "num_classes": 3}
    elif not name.startswith("raft"):
        settings |= {"num_classes": 5}
    if name.startswith(("vit_", "maxvit")):
        size = {"vit_h_14": 56, "maxvit_t": 224}.get(name, 64)
        settings |= {"input_size": (size, size)} if name == "maxvit_t" else {"image_size": size}
    if name.startswith(("densenet", "regnet", "resnext")):
        size = 128  # their last norms would have eight values each
    if name.startswith(("inception", "googlenet")):
        size, settings["init_weights"], settings["aux_logits"] = 96, False, False
    size = 224 if name == "s3d" else size
    if name == "swin3d" or name.startswith(("swin3d", "mvit", "r3d", "mc3", "r2plus1d", "s3d")):
        shape = (3, 16, 224, 224) if name.startswith("mvit") else (3, 14 if name == "s3d" else 8, size, size)
        inputs = {"x": _normal(2, *shape)}
    elif is_detection:
        images = [_normal(3, 64, 64).sigmoid(), _normal(3, 64, 64, seed=1).sigmoid()]
        boxes = torch.tensor([[4.0, 4.0, 40.0, 40.0], [20.0, 10.0, 60.0, 50.0]])
        target = {"boxes": boxes, "labels": torch.tensor([1, 2]), "masks": torch.ones(2, 64, 64, dtype=torch.uint8)}
        target["keypoints"] = torch.rand(2, 17, 3) * 50
        inputs, more = {"images": images}, {"targets": [target, target]}
        if name.startswith(("faster", "mask", "keypoint", "retina", "fcos")):
            edge = 128 if name == "maskrcnn_resnet50_fpn_v2" else 64  # its norms would have few values each
            settings |= {"min_size": edge, "max_size": edge}
        if "rcnn" in name:  # all boxes are samples: which ones are drawn is by chance
            settings |= dict.fromkeys(("rpn_batch_size_per_image", "box_batch_size_per_image"), 4096)
            settings |= {f"rpn_{when}_nms_top_n_{stage}": 50 for when in ("pre", "post") for stage in ("train", "test")}
        if name.startswith("keypoint"):
            settings["num_classes"], target["labels"] = 2, torch.tensor([1, 1])
    elif name.startswith("raft"):
        inputs = {"image1": _normal(1, 3, 128, 128), "image2": _normal(1, 3, 128, 128, seed=1), "num_flow_updates": 2}
    else:
        inputs = {"x": _normal(2, 3, size, size)}
    module = torchvision.models.get_model(name, **settings)
    if name.startswith("ssdlite"):  # its norms have to be of these images, or all scores are one third
        norms = [each for each in module.modules() if isinstance(each, torch.nn.BatchNorm2d)]
        before = [norm.momentum for norm in norms]
        for norm in norms:
            norm.momentum = 1.0
        module(**inputs, **more)
        for norm, momentum in zip(norms, before, strict=True):
            norm.momentum = momentum
    if "x" in inputs and hasattr(module, "backbone") or name == "s3d" or "_v3" in name or "googlenet" in name:
        inputs = {_first_parameter(module): value for value in inputs.values()}
    return module, inputs, {**inputs, **more}


# timm -----------------------------------------------------------------------------------------------------------------

TIMM = {
    name: size
    for size, names in {
        28: "eva02_tiny_patch14_224",
        32: (
            "beit_base_patch16_224 cait_xxs24_224 coat_tiny convit_tiny deit_tiny_patch16_224 "
            "deit3_small_patch16_224 vit_tiny_patch16_224 xcit_nano_12_p16_224"
        ),
        64: (
            "caformer_s18 convmixer_768_32 convnext_atto convnextv2_atto cs3darknet_s cspresnet50 darknet53 davit_tiny "
            "densenet121 dla34 dm_nfnet_f0 dpn48b edgenext_xx_small efficientnet_b0 "
            "efficientvit_b0 ese_vovnet19b_dw fasternet_t0 fastvit_t8 focalnet_tiny_srf gernet_s ghostnet_100 "
            "ghostnetv2_100 hardcorenas_a hgnet_tiny hgnetv2_b0 hiera_tiny_224 hrnet_w18_small inception_next_tiny "
            "lambda_resnet26t lcnet_050 mambaout_femto mnasnet_100 mobilenetv3_small_050 mobilenetv4_conv_small "
            "mobileone_s0 mobilevit_xxs mobilevitv2_050 mvitv2_tiny nextvit_small poolformer_s12 pvt_v2_b0 rdnet_tiny "
            "regnetx_002 regnety_002 repvgg_a0 repvit_m0_9 res2net50_14w_8s resnest14d resnet18 resnetv2_50 rexnet_100 "
            "selecsls42 sequencer2d_s shvit_s1 skresnet18 starnet_s1 swiftformer_xs swin_tiny_patch4_window7_224 "
            "swinv2_tiny_window8_256 tf_efficientnetv2_b0 tinynet_e tresnet_m twins_pcpvt_small twins_svt_small vgg11 "
            "xception41"
        ),
        96: "inception_v3 inception_v4 nasnetalarge",
        224: (
            "coatnet_nano_rw_224 efficientformer_l1 efficientformerv2_s0 efficientvit_m0 gcvit_xxtiny gmixer_12_224 "
            "levit_128s mixer_s32_224 pit_ti_224 resmlp_12_224 swinv2_cr_tiny_224 tiny_vit_5m_224 "
            "tnt_s_legacy_patch16_224 visformer_tiny vitamin_small_224 volo_d1_224"
        ),
        240: "crossvit_tiny_240",
        256: "bat_resnext26ts botnet26t_256 halonet26t maxvit_nano_rw_256",
    }.items()
    for name in names.split()
}
"""Architectures, one of each family, and the size of an image that they take."""

_OF_ANY_SIZE = (
    "beit",
    "cait",
    "coat_",
    "convit",
    "deit",
    "eva02",
    "hiera",
    "mvit",
    "swin_",
    "swinv2_t",
    "vit_",
    "xcit",
)


def timm_models() -> Iterator[Model]:
    for name, size in TIMM.items():
        yield Model("timm", name, lambda name=name, size=size: _timm(name, size))


def _timm(name: str, size: int) -> Any:
    import timm

    more = {"img_size": size} if name.startswith(_OF_ANY_SIZE) else {}
    module = timm.create_model(name, pretrained=False, num_classes=5, **more)
    if not name.startswith(("gcvit", "hrnet")):  # theirs are also equal layers that halve an image, again and again
        shorten(module)
    inputs = {"x": _normal(2, 3, size, size)}
    return module, inputs, inputs


def shorten(module: torch.nn.Module) -> None:
    """Keep one of equal layers in a row, and one pair of those that take turns: what follows them takes the same."""
    for part in [*module.modules()]:
        is_list = type(part) is torch.nn.ModuleList and all("Block" in type(layer).__name__ for layer in part)
        if not is_list and type(part) is not torch.nn.Sequential:
            continue
        layers = [(_description(layer), layer) for layer in part]
        for turn in (1, 2):
            start = 0
            while start + 2 * turn <= len(layers):
                first, second = ([text for text, _ in layers[i : i + turn]] for i in (start, start + turn))
                if first == second:
                    del layers[start + turn : start + 2 * turn]
                else:
                    start += 1
        if len(layers) < len(part):
            part._modules = {str(index): layer for index, (_, layer) in enumerate(layers)}


def _description(module: torch.nn.Module) -> tuple[Any, ...]:
    """What two modules have in common that do the same with other numbers of the same shapes."""
    settings = {name: value for name, value in vars(module).items() if _is_plain(value) and "drop" not in name}
    settings.pop("p", None)  # how much is dropped, which grows with depth
    of_its_own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    shapes = [(name, tensor.shape) for name, tensor in of_its_own]
    return type(module), settings, shapes, [(name, _description(child)) for name, child in module.named_children()]


def _is_plain(value: Any) -> bool:
    is_row = isinstance(value, tuple | list)
    return all(map(_is_plain, value)) if is_row else isinstance(value, bool | int | float | str)


# transformers ---------------------------------------------------------------------------------------------------------

_WIDTHS = "hidden_size d_model n_embd dim embedding_size emb_dim projection_dim decoder_hidden_size"
_INNER = "intermediate_size ffn_dim d_ff d_inner hidden_dim n_inner encoder_ffn_dim decoder_ffn_dim"
_LAYERS = "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers"
_HEADS = "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads"
SMALL: dict[str, int] = {
    **dict.fromkeys(_WIDTHS.split(), 32),
    **dict.fromkeys(_INNER.split(), 48),
    **dict.fromkeys(_LAYERS.split(), 2),
    **dict.fromkeys([*_HEADS.split(), "num_key_value_heads", "num_kv_heads", "decoder_num_attention_heads"], 2),
    **dict.fromkeys("max_position_embeddings n_positions max_source_positions max_target_positions".split(), 64),
    "vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    "head_dim": 16, "d_kv": 16, "image_size": 32, "patch_size": 8, "decoder_num_hidden_layers": 2,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "decoder_intermediate_size": 48, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "num_labels": 3,
}  # fmt: skip
"""What sizes are made, where a configuration has them."""

TEXT, VISION, AUDIO, PAIR = "text", "vision", "audio", "pair"
VIDEO, SPECTRUM, SERIES = "video", "spectrum", "series"

CONVOLUTIONS = {"apply_spec_augment": False, "conv_dim": [16, 16, 16], "conv_stride": [4, 2, 2],
                "conv_kernel": [8, 3, 3], "num_feat_extract_layers": 3, "num_conv_pos_embeddings": 5,
                "num_conv_pos_embedding_groups": 4, "conv_pos_kernel_size": 5, "squeeze_factor": 1}  # fmt: skip
"""What speech goes through before it comes to a transformer."""

TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"{name}ForCausalLM": (TEXT, {})
        for name in (
            "Llama Mistral Qwen2 Qwen3 Gemma Gemma2 Phi Phi3 Olmo Olmo2 Cohere Granite StableLm Starcoder2 GPTNeoX OPT "
            "XGLM BioGpt Bloom Falcon Mpt Glm SmolLM3 Mixtral Qwen2Moe Olmoe Qwen3Moe Mamba "
            "Helium Persimmon"
        ).split()
    },
    "GPT2LMHeadModel": (TEXT, {}),
    "GPTJForCausalLM": (TEXT, {"rotary_dim": 8}),
    "CodeGenForCausalLM": (TEXT, {"hidden_size": 64, "n_embd": 64, "rotary_dim": 8, "num_attention_heads": 4,
                                  "n_head": 4}),
    "RwkvForCausalLM": (TEXT, {"attention_hidden_size": 32, "context_length": 32}),
    "JambaForCausalLM": (TEXT, {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4,
                                "mamba_d_state": 4, "use_mamba_kernels": False}),
    "DbrxForCausalLM": (TEXT, {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
                               "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48}, "max_seq_len": 64}),
    "FalconMambaForCausalLM": (TEXT, {"state_size": 4, "time_step_rank": 4}),
    "RecurrentGemmaForCausalLM": (TEXT, {"lru_width": 32, "attention_window_size": 8,
                                         "block_types": ["recurrent", "attention"]}),
    "Qwen3NextForCausalLM": (TEXT, {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
                                    "linear_num_value_heads": 4, "linear_key_head_dim": 8,
                                    "linear_value_head_dim": 8}),
    "xLSTMForCausalLM": (TEXT, {"hidden_size": 64, "chunk_size": 8, "qk_dim_factor": 1.0}),
    "Llama4ForCausalLM": (TEXT, {"attention_chunk_size": 8, "intermediate_size_mlp": 48}),
    "MiniMaxForCausalLM": (TEXT, {"block_size": 8, "layer_types": ["linear_attention", "full_attention"]}),
    "JetMoeForCausalLM": (TEXT, {"kv_channels": 16}),
    "Lfm2ForCausalLM": (TEXT, {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8}),
    "BambaForCausalLM": (TEXT, {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16,
                                "mamba_d_state": 8, "mamba_chunk_size": 8}),
    "DeepseekV2ForCausalLM": (TEXT, {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8,
                                     "qk_nope_head_dim": 8, "v_head_dim": 16, "head_dim": 8, "n_group": 1,
                                     "topk_group": 1, "first_k_dense_replace": 1, "num_experts_per_tok": 2}),
    **{
        f"{name}ForCausalLM": (TEXT, {})
        for name in "GPTBigCode Cohere2 Glm4 DiffLlama Doge Phimoe GraniteMoe BitNet ModernBertDecoder".split()
    },
    "NemotronForCausalLM": (TEXT, {"num_key_value_heads": 2, "head_dim": 16}),
    "Mamba2ForCausalLM": (TEXT, {"num_heads": 4, "head_dim": 16, "n_groups": 1, "state_size": 8}),
    "GPTNeoForCausalLM": (TEXT, {"attention_types": [[["global", "local"], 1]], "num_layers": 2}),
    "GptOssForCausalLM": (TEXT, {"layer_types": ["sliding_attention", "full_attention"]}),
    "Gemma3ForCausalLM": (TEXT, {}),
    "DeepseekV3ForCausalLM": (TEXT, {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
                                     "v_head_dim": 16, "head_dim": 8, "n_group": 1, "topk_group": 1,
                                     "first_k_dense_replace": 1}),
    **{
        f"{name}ForMaskedLM": (TEXT, {})
        for name in (
            "Bert Roberta DistilBert Albert Electra Deberta DebertaV2 MPNet XLMRoberta Camembert ConvBert "
            "SqueezeBert RoFormer Nystromformer Ernie FNet ModernBert Longformer BigBird MobileBert"
        ).split()
    },
    "FunnelModel": (TEXT, {"block_sizes": [1, 1], "d_head": 16}),
    "ReformerForMaskedLM": (TEXT, {"attn_layers": ["local", "lsh"], "axial_pos_shape": [4, 4],
                                   "axial_pos_embds_dim": [16, 16], "feed_forward_size": 48,
                                   "attention_head_size": 16, "local_attn_chunk_length": 4,
                                   "lsh_attn_chunk_length": 4, "num_buckets": 2, "hash_seed": 0}),
    "XmodForMaskedLM": (TEXT, {"languages": ["en_XX"], "default_language": "en_XX"}),
    "IBertForMaskedLM": (TEXT, {"quant_mode": True}),
    "LukeForMaskedLM": (TEXT, {"entity_vocab_size": 10, "entity_emb_size": 16}),
    "PerceiverForMaskedLM": (TEXT, {"num_latents": 8, "d_latents": 32, "num_self_attends_per_block": 2,
                                    "num_self_attention_heads": 2, "num_cross_attention_heads": 2,
                                    "qk_channels": 16, "v_channels": 32, "max_position_embeddings": 16}),
    "EsmForMaskedLM": (TEXT, {"vocab_size": 64, "pad_token_id": 0, "mask_token_id": 3}),
    "LayoutLMForMaskedLM": (TEXT, {}),
    "TapasForQuestionAnswering": (TEXT, {}),
    **{f"{name}ForMaskedLM": (TEXT, {}) for name in "RemBert MegatronBert EuroBert NomicBert RoCBert Yoso".split()},
    "XLNetLMHeadModel": (TEXT, {}),
    "CanineModel": (TEXT, {}),
    **{
        f"{name}ForConditionalGeneration": (PAIR, {})
        for name in "T5 Bart Pegasus MBart M2M100 Blenderbot Marian LED MT5 Whisper".split()
        if name != "Marian"
    },
    **{
        f"{name}ForConditionalGeneration": (PAIR, {})
        for name in "ProphetNet SwitchTransformers BigBirdPegasus PLBart UMT5".split()
    },
    "LongT5ForConditionalGeneration": (PAIR, {"local_radius": 3, "encoder_attention_type": "transient-global",
                                              "global_block_size": 4}),
    "Speech2TextForConditionalGeneration": (PAIR, {"conv_channels": 16, "input_feat_per_channel": 16}),
    "MoonshineForConditionalGeneration": (PAIR, {}),
    "MarianMTModel": (PAIR, {}),
    **{
        f"{name}ForImageClassification": (VISION, {})
        for name in "ViT DeiT Beit Dinov2 ViTMSN Data2VecVision".split()
    },
    "MobileNetV1ForImageClassification": (VISION, {"image_size": 64}),
    "MobileNetV2ForImageClassification": (VISION, {"image_size": 64}),
    "EfficientNetForImageClassification": (VISION, {"image_size": 64, "width_coefficient": 0.25, "hidden_dim": 320,
                                                    "depth_coefficient": 1.0, "num_block_repeats": [1] * 7}),
    "ResNetForImageClassification": (VISION, {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}),
    "RegNetForImageClassification": (VISION, {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1],
                                              "groups_width": 8}),
    "ConvNextForImageClassification": (VISION, {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}),
    "ConvNextV2ForImageClassification": (VISION, {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}),
    "SwinForImageClassification": (VISION, {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 4], "patch_size": 4,
                                            "window_size": 4}),
    "Swinv2ForImageClassification": (VISION, {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 4], "patch_size": 4,
                                              "window_size": 4}),
    "SegformerForSemanticSegmentation": (VISION, {"hidden_sizes": [8, 16, 24, 32], "decoder_hidden_size": 16,
                                                  "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 3, 4]}),
    "PoolFormerForImageClassification": (VISION, {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}),
    "ViTMAEForPreTraining": (VISION, {}),
    "YolosForObjectDetection": (VISION, {"image_size": [32, 32], "num_detection_tokens": 5}),
    "DPTForDepthEstimation": (VISION, {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3],
                                       "neck_hidden_sizes": [8, 8, 16, 16],
                                       "fusion_hidden_size": 16}),
    "GLPNForDepthEstimation": (VISION, {"hidden_sizes": [8, 16, 24, 32], "decoder_hidden_size": 16,
                                        "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 3, 4]}),
    "CvtForImageClassification": (VISION, {"embed_dim": [8, 16, 24], "num_heads": [1, 2, 3], "depth": [1, 2, 3]}),
    "PvtForImageClassification": (VISION, {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1],
                                           "num_attention_heads": [1, 2, 3, 4]}),
    "PvtV2ForImageClassification": (VISION, {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1],
                                             "num_attention_heads": [1, 2, 3, 4]}),
    "FocalNetForImageClassification": (VISION, {"embed_dim": 8, "depths": [1, 1], "hidden_sizes": [8, 16],
                                                "focal_levels": [2, 2], "focal_windows": [3, 3], "patch_size": 4}),
    "HieraForImageClassification": (VISION, {"embed_dim": 8, "depths": [1, 1, 1, 1], "image_size": [64, 64],
                                             "num_heads": [1, 2, 2, 4], "masked_unit_size": [8, 8]}),
    "LevitForImageClassification": (VISION, {"image_size": 64, "hidden_sizes": [16, 24, 32], "depths": [1, 1, 1],
                                             "num_attention_heads": [2, 3, 4], "key_dim": [4, 4, 4], "patch_size": 16}),
    "MobileViTForImageClassification": (VISION, {"image_size": 64, "hidden_sizes": [16, 24, 32], "patch_size": 2,
                                                 "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32]}),
    "MobileViTV2ForImageClassification": (VISION, {"image_size": 64, "width_multiplier": 0.25, "patch_size": 2}),
    "BitForImageClassification": (VISION, {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1],
                                           "num_groups": 4}),
    "SwiftFormerForImageClassification": (VISION, {"image_size": 64, "depths": [1, 1, 1, 1],
                                                   "embed_dims": [8, 16, 24, 32]}),
    "Dinov2WithRegistersForImageClassification": (VISION, {}),
    "Swin2SRForImageSuperResolution": (VISION, {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2],
                                                "window_size": 4, "patch_size": 1, "image_size": 16}),
    "DINOv3ViTModel": (VISION, {}),
    "DetrForObjectDetection": (VISION, {"num_queries": 5, "backbone_config": {
        "model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1],
        "out_features": ["stage2"]}}),
    "UperNetForSemanticSegmentation": (VISION, {"image_size": 64, "hidden_size": 16, "use_auxiliary_head": False,
                                                "backbone_config": {
        "model_type": "convnext", "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_stages": 4,
        "out_features": ["stage1", "stage2", "stage3", "stage4"]}}),
    "VideoMAEForVideoClassification": (VIDEO, {"num_frames": 4, "tubelet_size": 2}),
    "TimesformerForVideoClassification": (VIDEO, {"num_frames": 4}),
    "VivitForVideoClassification": (VIDEO, {"num_frames": 4, "tubelet_size": [2, 8, 8]}),
    "ImageGPTForImageClassification": (TEXT, {"n_positions": 64}),
    "SamModel": (VISION, {
        "vision_config": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 64,
                          "patch_size": 16, "window_size": 2, "global_attn_indexes": [1], "mlp_dim": 48,
                          "output_channels": 16, "num_pos_feats": 8},
        "prompt_encoder_config": {"hidden_size": 16, "image_size": 64, "patch_size": 16, "mask_input_channels": 4},
        "mask_decoder_config": {"hidden_size": 16, "mlp_dim": 24, "num_attention_heads": 2, "iou_head_hidden_dim": 16},
        "image_size": 64}),
    "Wav2Vec2ForCTC": (AUDIO, CONVOLUTIONS),
    "HubertForCTC": (AUDIO, CONVOLUTIONS),
    "WavLMForCTC": (AUDIO, CONVOLUTIONS),
    "SEWForCTC": (AUDIO, CONVOLUTIONS),
    "UniSpeechForCTC": (AUDIO, CONVOLUTIONS),
    "Data2VecAudioForCTC": (AUDIO, CONVOLUTIONS),
    "Wav2Vec2ConformerForCTC": (AUDIO, CONVOLUTIONS | {"vocab_size": 64}),
    "Wav2Vec2BertForCTC": (SPECTRUM, {"feature_projection_input_dim": 16, "apply_spec_augment": False,
                                      "vocab_size": 64}),
    "ASTForAudioClassification": (SPECTRUM, {"num_mel_bins": 16, "max_length": 40}),
    "EncodecModel": (AUDIO, {"num_filters": 4, "upsampling_ratios": [4, 2], "codebook_size": 8, "hidden_size": 16}),
    "PatchTSTForPrediction": (SERIES, {"num_input_channels": 3, "patch_length": 4, "patch_stride": 4,
                                       "prediction_length": 6}),
    "PatchTSMixerForPrediction": (SERIES, {"num_input_channels": 3, "patch_length": 4, "patch_stride": 4,
                                           "context_length": 32, "prediction_length": 6}),
    "BlipForConditionalGeneration": (TEXT + VISION, {}),
    "CLIPSegForImageSegmentation": (TEXT + VISION, {"extract_layers": [0, 1], "reduce_dim": 16,
                                                    "decoder_num_attention_heads": 2}),
    "GroupViTModel": (TEXT + VISION, {"projection_intermediate_dim": 32}),
    "OwlViTForObjectDetection": (TEXT + VISION, {}),
    "VisualBertForPreTraining": (TEXT, {"visual_embedding_dim": 12}),
    "LxmertModel": (TEXT, {"visual_feat_dim": 12, "l_layers": 1, "r_layers": 1, "x_layers": 1}),
    "DecisionTransformerModel": ("", {"state_dim": 5, "act_dim": 3, "max_ep_len": 20}),
    "CLIPModel": (TEXT + VISION, {}),
    "SiglipModel": (TEXT + VISION, {}),
}  # fmt: skip
"""Models, what they are called with, and what of their configuration is as no other's."""


def transformers_models() -> Iterator[Model]:
    for name, (kind, settings) in TRANSFORMERS.items():
        yield Model("transformers", name, lambda name=name, kind=kind, own=settings: _transformers(name, kind, own))


def _transformers(name: str, kind: str, own: dict[str, Any]) -> Any:
    import transformers

    cls = getattr(transformers, name)
    config = cls.config_class(**_small(cls.config_class(), own))
    parts = {key: getattr(config, key) for key in ("text_config", "vision_config") if hasattr(config, key)}
    if len(parts) == 2:
        own = {**{key: _small(part, {}) for key, part in parts.items()}, "projection_dim": 32, **own}
        config = cls.config_class(**own)
    module = cls(config)
    tokens = torch.randint(3, 60, (2, 16), generator=torch.Generator().manual_seed(0))
    inputs: dict[str, Any] = {}
    if TEXT in kind:
        inputs = {"input_ids": tokens, "attention_mask": torch.ones(2, 16, dtype=torch.long)}
        if name.startswith(("Mamba", "Rwkv", "xLSTM", "FalconMamba")):
            del inputs["attention_mask"]
    if VISION in kind or kind == VIDEO:
        size = own.get("image_size", 32)
        frames = [own["num_frames"]] if kind == VIDEO else []
        inputs["pixel_values"] = _normal(2, *frames, 3, *(size if isinstance(size, list) else [size, size]))
    if kind == AUDIO:
        inputs["input_values"] = _normal(2, *([1] if name.startswith("Encodec") else []), 800)
    if kind == SPECTRUM:
        inputs[module.main_input_name] = _normal(2, 40, 16)
    if kind == SERIES:
        inputs["past_values"] = _normal(2, 32, 3)
    if kind == PAIR:
        first = {"input_ids": tokens}
        if name.startswith("Whisper"):
            first = {"input_features": _normal(2, config.num_mel_bins, 128)}
        if name.startswith("Speech2Text"):
            first = {"input_features": _normal(2, 40, 16)}
        if name.startswith("Moonshine"):
            first = {"input_values": _normal(2, 4000)}
        inputs = {**first, "decoder_input_ids": tokens[:, :8].clone()}
    inputs |= _further(name, tokens)
    more: dict[str, Any] = {}
    if name.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM")):
        more["labels"] = tokens
    if kind == PAIR:
        more["labels"] = tokens[:, :8].clone()
    if name.endswith(("ForImageClassification", "ForVideoClassification", "ForAudioClassification")):
        more["labels"] = torch.tensor([0, 1])
    if kind == SERIES:
        more["future_values"] = _normal(2, 6, 3, seed=1)
    return module, inputs, {**inputs, **more}


def _further(name: str, tokens: torch.Tensor) -> dict[str, Any]:
    """What only one model takes."""
    if name.startswith("LayoutLM"):
        return {"bbox": torch.tensor([1, 2, 30, 40]).expand(2, 16, 4).clone()}
    if name.startswith("Tapas"):
        return {"token_type_ids": torch.arange(7).expand(2, 16, 7) % 2}
    if name.startswith("Sam"):
        return {"input_points": torch.tensor([10.0, 20.0]).expand(2, 1, 1, 2).clone()}
    if name.startswith("VisualBert"):
        return {"visual_embeds": _normal(2, 5, 12)}
    if name.startswith("Lxmert"):
        return {"visual_feats": _normal(2, 5, 12), "visual_pos": _normal(2, 5, 4)}
    if name.startswith("DecisionTransformer"):
        steps = torch.arange(4).expand(2, 4).clone()
        sizes = {"states": 5, "actions": 3, "rewards": 1, "returns_to_go": 1}
        return {"timesteps": steps, **{part: _normal(2, 4, size) for part, size in sizes.items()}}
    return {}


def _small(config: Any, own: dict[str, Any]) -> dict[str, Any]:
    """The settings of a configuration that make a small model of it."""
    known = {**config.to_dict(), **{n: getattr(config, n) for n in config.attribute_map if hasattr(config, n)}}
    is_number = lambda value: isinstance(value, int) and not isinstance(value, bool)  # noqa: E731
    small = {n: v for n, v in SMALL.items() if is_number(known.get(n)) or n.endswith("token_id") and n in known}
    small |= {n: 0.0 for n, value in known.items() if "drop" in n and isinstance(value, float)}
    small.pop("layer_types", None)
    return {**small, **own}


PACKAGES: dict[str, Callable[[], Iterator[Model]]] = {
    "torchvision": torchvision_models,
    "timm": timm_models,
    "transformers": transformers_models,
}

# Trying ---------------------------------------------------------------------------------------------------------------


def _normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _first_parameter(module: torch.nn.Module) -> str:
    return str(module.forward.__code__.co_varnames[1])


class WithLoss(torch.nn.Module):
    """A model that returns a loss: its own, the sum of several, or the mean of the squares of what it makes."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> torch.Tensor:
        result = self.model(**inputs)
        loss = getattr(result, "loss", None)
        if loss is not None:
            return loss
        if isinstance(result, dict) and result and all(t.dim() == 0 for t in result.values() if _is_float(t)):
            return poptorch.identity_loss(sum(result.values()), "none")
        return poptorch.identity_loss(torch.stack([t.square().mean() for t in _floats(result)]).sum(), "none")


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _floats(result: Any) -> list[torch.Tensor]:
    """The results that are numbers to compare; caches are not among them."""
    if _is_float(result):
        return [result]
    values = result.values() if isinstance(result, dict) else result if isinstance(result, list | tuple) else ()
    return [t for value in values for t in _floats(value)]


def tried(model: Model, is_short: bool = False) -> Iterator[Found]:
    """What comes of trying a model, more and more of it."""
    torch.manual_seed(0)
    found: dict[str, Any] = {"package": model.package, "name": model.name, "is_short": is_short}
    yield Found(**found, inference="Eager fails here, too.")
    module, inputs, training_inputs = model.make()
    if is_short:
        shorten(module)
    found["millions"] = round(sum(p.numel() for p in module.parameters()) / 1e6, 2)
    for each in module.modules():
        if isinstance(each, torch.nn.modules.dropout._DropoutNd) or type(each).__name__ == "StochasticDepth":
            each.p = 0.0  # numbers by chance are others on the device
    trained = copy.deepcopy(module).train()
    module.eval()
    with torch.no_grad():
        expected = _floats(module(**inputs))
    yield Found(**found, inference=TOO_LONG)
    start = time.process_time()
    wrapped = poptorch.inferenceModel(module)
    result = _floats(wrapped(**inputs))
    found["first_inference"] = round(time.process_time() - start, 1)
    wrapped.destroy()
    del wrapped, module  # some have weights of half a gigabyte
    pairs = list(zip(result, expected, strict=True))
    found["difference"] = float(f"{max((_difference(*pair) for pair in pairs), default=0.0):.1e}")
    wrong = found["difference"] > 1e-2
    found["inference"] = f"The numbers differ by {found['difference']:.0e}." if wrong else ""
    yield Found(**found, training=TOO_LONG)
    eager, first = WithLoss(copy.deepcopy(trained)), WithLoss(copy.deepcopy(trained))
    wanted = _losses(eager, torch.optim.SGD(eager.parameters(), lr=1e-3), training_inputs)
    del eager
    ours = WithLoss(trained)
    optimizer = torch.optim.SGD(ours.parameters(), lr=1e-3)
    start = time.process_time()
    wrapped = poptorch.trainingModel(ours, optimizer=optimizer)
    losses = [float(wrapped(**training_inputs))]
    found["first_training"] = round(time.process_time() - start, 1)
    losses += [float(wrapped(**training_inputs)) for _ in range(2)]
    far = _apart(losses, wanted)
    if far > TOLERANCE:  # steps may be such that rounding decides: then eager, too, is as far from what doubles give
        doubles = _doubled(training_inputs)
        eager_in_doubles = first.double()
        moved = [_moved(copy.deepcopy(eager_in_doubles), seed) for seed in range(3)]
        exact = _losses(eager_in_doubles, torch.optim.SGD(eager_in_doubles.parameters(), lr=1e-3), doubles)
        others = [_losses(each, torch.optim.SGD(each.parameters(), lr=1e-3), doubles) for each in moved]
        found["rounding"] = float(f"{max(_apart(each, exact) for each in [wanted, *others]):.1e}")
        far = _apart(losses, exact)
    is_near = far <= max(TOLERANCE, 2 * found.get("rounding", 0.0))  # one more draw is often the largest
    found["training"] = "" if is_near else f"The losses differ by {far:.0e} of what they are."
    yield Found(**found)


TOLERANCE = 2e-2
"""How far losses may be from those of eager, of what they are."""


def _apart(losses: Sequence[float], others: Sequence[float]) -> float:
    return max(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(losses, others, strict=True))


def _doubled(inputs: dict[str, Any]) -> dict[str, Any]:
    doubled: dict[str, Any] = pytree.tree_map(lambda value: value.double() if _is_float(value) else value, inputs)
    return doubled


def _moved(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """A model whose weights are other numbers, that float32 does not tell from them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p *= 1 + 2**-24 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return model


def _losses(model: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: dict[str, Any]) -> list[float]:
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(**inputs)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def _difference(ours: torch.Tensor, expected: torch.Tensor) -> float:
    if ours.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    finite = expected.isfinite()
    if not torch.equal(finite, ours.isfinite()):
        return float("inf")
    apart = (ours.double() - expected.double())[finite].abs()
    return float(apart.max() / expected[finite].abs().max().clamp_min(1e-6)) if apart.numel() else 0.0


def _in_a_process(model: Model, is_short: bool, write: Callable[[Found], None]) -> None:
    """Try a model, in a process of its own. What is found last is written."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 5))
        last = Found(model.package, model.name)
        with os.fdopen(writing, "w") as pipe:
            try:
                for last in tried(model, is_short):
                    print(json.dumps(asdict(last)), file=pipe, flush=True)
            except Exception as problem:  # whatever a model raises is what the table says
                part = "training" if last.training == TOO_LONG else "inference"
                before = "Eager fails here, too: " if last.inference.startswith("Eager") else ""
                reason = before + _sentence(problem)
                print(json.dumps(asdict(last) | {part: reason}), file=pipe, flush=True)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        lines = pipe.read().splitlines()
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    found = json.loads(lines[-1]) if lines else asdict(Found(model.package, model.name, inference=TOO_LONG))
    if ended < 0 and -ended != signal.SIGXCPU:
        killed = f"The system ended it ({signal.strsignal(-ended)}), as it does where memory runs out."
        found |= {part: killed for part in ("inference", "training") if found[part] == TOO_LONG}
    write(Found(**found))


def _sentence(problem: Exception) -> str:
    """The first sentence of an error, in a line."""
    text = " ".join(str(problem).split()).removeprefix("'poptorch_py_error': ")
    return f"{type(problem).__name__}: {text}"[:240]


# The page -------------------------------------------------------------------------------------------------------------

HEAD = """# Published models

Each model has random weights and gets the smallest input that it accepts. Most are built small. Models of `timm`, and
those marked *short*, keep one of several consecutive equal layers. The results in inference, and the losses of three
steps of training, are compared with those of eager PyTorch. `python -m tests.poptorch.zoo` makes the table, and
continues where it was stopped; with `--again` it repeats the models that failed. Not all models that it knows have been
tried yet.

The first call captures the model, compiles it and runs it once; the table gives its CPU seconds. The machine was shared
with other work, so read these as orders of magnitude.

Some models amplify rounding errors, for example by many norms over a few values. If losses differ from eager ones, both
are compared with eager losses in float64. The table then gives, as `±`, the largest distance from these of two others:
eager losses in float32, and eager losses in float64 with weights perturbed three times by less than the precision of
float32. The model's losses are within twice this distance. Where it is near 1, the comparison shows little more than
that the steps run.

"""


def kept() -> dict[tuple[str, str], Found]:
    """What has been found so far."""
    lines = KEPT.read_text(encoding="utf-8").splitlines() if KEPT.exists() else []
    return {(found.package, found.name): found for found in (Found(**json.loads(line)) for line in lines)}


def _row(found: Found) -> dict[str, Any]:
    """What is kept of a model."""
    return {name: value for name, value in asdict(found).items() if name not in ("rounding", "is_short") or value}


def page(all_found: Sequence[Found]) -> str:
    """The page, in Markdown."""
    packages = dict.fromkeys(found.package for found in all_found)
    text = HEAD + "| package | tried | inference as eager | training as eager |\n|---|---|---|---|\n"
    for package in packages:
        own = [found for found in all_found if found.package == package]
        good = [sum(not getattr(found, part) for found in own) for part in ("inference", "training")]
        text += f"| `{package}` | {len(own)} | {good[0]} | {good[1]} |\n"
    for package in packages:
        own = sorted((found for found in all_found if found.package == package), key=lambda found: found.name.lower())
        text += f"\n## {package}\n\n| model | M parameters | inference, first call s | training, first call s |\n"
        text += "|---|---|---|---|\n"
        for found in own:
            parts = (found.inference, found.first_inference), (found.training, found.first_training)
            cells = [f"{seconds:.0f}" if not why else _cell(why) for why, seconds in parts]
            if found.rounding and not found.training:
                cells[1] += f" (± {found.rounding:.0e})"
            name = f"`{found.name}`" + ", short" * found.is_short
            text += f"| {name} | {found.millions:g} | {' | '.join(cells)} |\n"
    return text


def _cell(why: str) -> str:
    return why.replace("|", "\\|").replace("<", "&lt;")


def main(arguments: Sequence[str] | None = None) -> int:
    """Try models, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m tests.poptorch.zoo", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="packages, or beginnings of names of models, in their order; else all")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so many minutes of a processor")
    parser.add_argument("--again", action="store_true", help="try once more what has failed")
    parser.add_argument("--every", type=int, default=1, help="only each so many-th of the models that are left")
    parser.add_argument("--short", action="store_true", help="keep one of equal layers in a row")
    given = parser.parse_args(arguments)
    found = kept()

    def is_left(model: Model) -> bool:
        known = found.get((model.package, model.name))
        return known is None or given.again and bool(known.inference or known.training)

    def is_named(model: Model, name: str) -> bool:
        return model.package == name or model.name.startswith(name)

    def write(one: Found) -> None:
        found.update(kept())  # another process may try other models meanwhile
        found[one.package, one.name] = one
        print(f"{one.package} {one.name}: {one.inference or 'ok'} / {one.training or 'ok'}", flush=True)
        KEPT.write_text("".join(json.dumps(_row(each)) + "\n" for each in found.values()), encoding="utf-8")

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    left = [model for listed in PACKAGES.values() for model in listed() if is_left(model)]
    named = [model for name in given.names for model in left if is_named(model, name)] if given.names else left
    for model in list(dict.fromkeys(named))[:: given.every]:
        if resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime > 60 * given.minutes:
            break
        _in_a_process(model, given.short, write)
    PAGE.write_text(page(list(kept().values())), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
