"""Terminal output: progress bars on stderr, tables on stdout. Each command imports only the module that it prints with."""
