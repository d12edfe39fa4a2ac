"""One check a file: `measure(received_model)` gives a statistic and a sentence, or the reason why it cannot look."""
