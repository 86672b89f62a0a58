"""Llama-shaped recipes."""
