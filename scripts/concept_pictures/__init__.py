"""The pictures of docs/concepts: one module each, with `compute` for its numbers and `draw` for the picture."""
