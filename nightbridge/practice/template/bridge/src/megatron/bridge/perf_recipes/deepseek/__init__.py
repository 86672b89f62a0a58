"""DeepSeek-shaped recipes."""
