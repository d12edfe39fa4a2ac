"""One check a file; each is a function `measure(sent)` that gives a statistic and a sentence, or says why it cannot look."""
