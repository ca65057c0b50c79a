"""Runtime: wrapped models, arguments, results, weights, model files."""
