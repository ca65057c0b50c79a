"""Layers: modules with their variables, and the corresponding names in torch."""

from popxl_addons.layers._values import undrawn_weights, uninitialized_weights
from popxl_addons.layers.conv import Conv2D
from popxl_addons.layers.embedding import Embedding, TiedEmbedding
from popxl_addons.layers.experts import Experts
from popxl_addons.layers.group_norm import GroupNorm
from popxl_addons.layers.language_model import LanguageConfig, LanguageModel, NextTokenLoss
from popxl_addons.layers.layer_norm import LayerNorm
from popxl_addons.layers.linear import Linear
from popxl_addons.layers.rms_norm import RMSNorm
from popxl_addons.layers.transformer import MLP, Attention, TransformerBlock
from popxl_addons.ops.rotary_positions import Stretch

__all__ = [
    "MLP",
    "Attention",
    "Conv2D",
    "Embedding",
    "Experts",
    "GroupNorm",
    "LanguageConfig",
    "LanguageModel",
    "LayerNorm",
    "Linear",
    "NextTokenLoss",
    "RMSNorm",
    "Stretch",
    "TiedEmbedding",
    "TransformerBlock",
    "undrawn_weights",
    "uninitialized_weights",
]
