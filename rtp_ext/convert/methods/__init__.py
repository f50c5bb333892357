"""Methods of converted models: those of `fully_shard`, `save_pretrained`, `generate`."""
