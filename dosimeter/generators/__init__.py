"""Decoders that turn a feature of the target model back into its image, trained on auxiliary images."""
