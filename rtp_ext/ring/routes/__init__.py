"""Which way what travels goes: weights shard by shard or gathered, gradients along a chain or straight home, hops."""
