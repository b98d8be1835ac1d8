"""Checkpoints: their files, their tokenizers, and the forms their matrices take in memory."""
