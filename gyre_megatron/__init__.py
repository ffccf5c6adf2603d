"""Gyre-Megatron: a Megatron-Core plugin for elastic reinforcement learning of coding agents."""

__version__ = "0.1.0"
