"""Four bits for each number: group quantisation on the host, and its inverse in a graph."""

from popxl_addons.ops.group_quantize_decompress.group_quantize_decompress import (
    group_quantize_compress_numpy,
    group_quantize_decompress,
    group_quantize_decompress_numpy,
)

__all__ = ["group_quantize_compress_numpy", "group_quantize_decompress", "group_quantize_decompress_numpy"]
