"""What modules of a model become beside the layers of `rtp_ext.nn`: bundles, heads, what is gathered or stays whole."""
