"""Classes of converted modules besides the layers of `rtp_ext.nn`: bundles, heads, gathered and whole modules."""
