"""Drafts: tokens proposed cheaply, verified many at once, and never a change of the text."""
