"""Models: a registry of builders, and the layers they are put together from."""
