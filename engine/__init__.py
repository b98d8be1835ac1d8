"""Tokens only: the engine process, its messages, models and weights. Knows no HTTP and no states."""
