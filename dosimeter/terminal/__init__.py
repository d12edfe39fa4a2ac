"""What a person sees in the terminal: a progress bar on stderr, tables on stdout. Each command imports the module it prints with."""
