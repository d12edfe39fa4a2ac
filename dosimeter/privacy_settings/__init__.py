"""Privacy settings as frameworks take them, one a file: what each states, and what can be proved of what it does."""
