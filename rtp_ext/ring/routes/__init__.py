"""Routes: of weights, shard by shard or gathered; of gradients, along a chain or directly to their owner; of hops."""
