"""What every GPU holds."""
