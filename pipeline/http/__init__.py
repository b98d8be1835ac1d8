"""HTTP: the only package that imports Quart. It reads requests, writes answers, and decides nothing."""
