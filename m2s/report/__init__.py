"""Figures, tables and the HTML report, each with its numbers beside it in a JSON file."""
