"""The Dev view: one page, its style and its script. No CDN, no framework; served by ``pipeline/http/dev.py``."""
