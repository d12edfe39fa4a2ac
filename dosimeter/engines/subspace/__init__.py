"""The head's gradient taken apart into its samples."""
