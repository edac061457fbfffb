"""Measures of a model and of its samples: likelihood, FID, generative perplexity, with their errors."""
