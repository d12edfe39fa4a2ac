"""The kinds of draws that `certificates.py` is made of. Every module here with a function `kinds` is part of the campaign."""
