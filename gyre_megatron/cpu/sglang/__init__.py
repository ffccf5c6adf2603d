"""Runs the real SGLang server on machines without CUDA; see `launch.py`."""
