"""Megatron-Core and SGLang on a machine without CUDA. Nothing here acts before it is asked to."""
