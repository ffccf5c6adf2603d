"""Rollout engines: the SGLang server of a cell, its client, the router, and what runs inside the
engine's process."""
