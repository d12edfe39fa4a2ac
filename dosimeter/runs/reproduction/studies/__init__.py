"""What a paper's figure shows of a client itself, where no method is scored: one file a study."""
