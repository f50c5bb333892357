"""What is known of other people's models: which of their modules rotate, and together with which others."""
