"""Recognises modules of torch and transformers that rotate, alone or as a bundle."""
