"""Methods of converted models: those of `fully_shard` that a model answers, `save_pretrained`, `generate`."""
